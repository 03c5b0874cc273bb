"""Find the tilings of kernels/attention_config.py on this GPU.

    python -m vitgraph.bench.tune_attention [--cases 20x400 mixed] [--seconds 100] [--save FILE]

Every candidate of the portable attention is compiled (in parallel, without the GPU), left out if it
spills, checked against float32 on short sequences between neighbours of NaN, and timed inside a
captured graph. Long cases are timed only by candidates that are near the best of 8x1024. Prints the
fastest three of each case and the choice of the table, then with --all every candidate. Near one
another means noise: prefer one row of the table that is good for many cases.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from vitgraph.bench.console import make_console
from vitgraph.bench.offline import ARCHITECTURES, MAX_SHARED_BYTES, compiling_for
from vitgraph.bench.options import require
from vitgraph.bench.outputs import output_file
from vitgraph.bench.report import header
from vitgraph.bench.tuning import compile_all, microseconds
from vitgraph.kernels.attention import attention, attention_reference
from vitgraph.kernels.attention_config import AttentionConfig, portable_config
from vitgraph.kernels.attention_schedule import attention_schedule

HEADS, HEAD_DIM = 16, 72
GATE = "8x1024"  # the case that decides who is timed on those after it
CASES = {
    "1x400": [400],
    "20x400": [400] * 20,
    GATE: [1024] * 8,
    "1x2048": [2048],
    "1x3072": [3072],
    "1x8160": [8160],
    "1x23040": [23040],
    "mixed": [280, 3072, 1260, 8160, 936, 2304, 400],
}
LONG = ("1x8160", "1x23040", "mixed")
NEAR = 1.3  # of the best, at the gate
EDGES = [1, 37, 63, 64, 65, 127, 128, 129, 400, 511, 700]
POISONED = 5  # this one of EDGES is made NaN
TOLERANCE = 3e-3  # of bf16 outputs


@dataclass(frozen=True)
class Compiled:
    """What became of a candidate: how many programs fit an SM, or why it is none."""

    config: AttentionConfig
    programs: int = 0
    registers: int = 0
    reason: str = ""


@dataclass
class Problem:
    qkv: Tensor
    cu_seqlens: Tensor

    @classmethod
    def make(cls, lengths: list[int]) -> "Problem":
        shape = sum(lengths), 3, HEADS, HEAD_DIM
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        return cls(
            torch.randn(shape, device="cuda", dtype=torch.bfloat16),
            offsets.to("cuda", torch.int32),
        )

    def launch(self, config: AttentionConfig) -> partial:
        schedule = attention_schedule(self.cu_seqlens, self.qkv.shape[0], HEADS, config)
        out = self.qkv.new_full((self.qkv.shape[0], HEADS * HEAD_DIM), float("nan"))
        return partial(attention, self.qkv, self.cu_seqlens, schedule=schedule, out=out)

    def error(self, config: AttentionConfig, expected: Tensor) -> float:
        """Against float32; infinite where the NaN of one sequence changes another."""
        clean = self.launch(config)()
        error = (clean.float() - expected).norm() / expected.norm()
        start, end = self.cu_seqlens[POISONED : POISONED + 2].tolist()
        poisoned = Problem(self.qkv.clone(), self.cu_seqlens)
        poisoned.qkv[start:end] = float("nan")
        result = poisoned.launch(config)()
        others = [slice(0, start), slice(end, None)]
        isolated = all(torch.equal(result[rows], clean[rows]) for rows in others)
        return float(error) if isolated else float("inf")

    def microseconds(self, config: AttentionConfig) -> float:
        launches = 2 if self.qkv.shape[0] > 8000 else 8
        launch = self.launch(config)
        launch()
        return microseconds([launch] * launches)


def candidates() -> Iterator[AttentionConfig]:
    """Tilings that may fit; how many programs an SM takes is seen when they are compiled."""
    narrow = [(64, 32), (64, 64), (64, 128), (128, 32), (128, 64)]
    wide = [(128, 64), (128, 128), (256, 64)]
    for (block_m, block_n), stages in itertools.product(narrow, (2, 3, 4)):
        yield AttentionConfig(block_m, block_n, num_stages=stages)
    for (block_m, block_n), stages in itertools.product(wide, (2, 3)):
        yield AttentionConfig(block_m, block_n, num_warps=8, num_stages=stages)


def compile_one(arch: str, config: AttentionConfig) -> Compiled:
    """In a process of the pool. The entry of Triton's cache is the one that the GPU looks up."""
    qkv = torch.empty(128, 3, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    offsets = torch.zeros(2, dtype=torch.int32)
    try:
        with compiling_for(arch) as kernels:
            schedule = attention_schedule(offsets, 128, HEADS, config)
            attention(qkv, offsets, schedule=schedule)
    except Exception as error:  # of the compiler, or shared memory that does not suffice
        return Compiled(config, reason=type(error).__name__)
    kernel = kernels[-1]
    if kernel.stack_bytes:
        return Compiled(config, reason=f"spills {kernel.stack_bytes} bytes")
    registers = -(-kernel.registers // 8) * 8 * 32 * config.num_warps
    shared = MAX_SHARED_BYTES[int(arch.removeprefix("sm_"))] + 1024
    programs = min(65536 // registers, shared // (kernel.shared_bytes + 1024), 8)
    return Compiled(config, programs, kernel.registers)


def fitting(compiled: list[Compiled]) -> list[AttentionConfig]:
    """As many programs as fit an SM, and one fewer."""
    return [
        replace(one.config, programs_per_sm=programs)
        for one in compiled
        if not one.reason
        for programs in sorted({one.programs, max(one.programs - 1, 1)})
    ]


def right(configs: list[AttentionConfig], bar: Progress) -> list[AttentionConfig]:
    """Those that compute the same as float32."""
    problem = Problem.make(EDGES)
    expected = attention_reference(problem.qkv.float(), problem.cu_seqlens)
    found, errors = [], {}
    for config in bar.track(configs, description="checking"):
        try:
            error = problem.error(config, expected)
        except Exception as failure:
            error = failure
        if isinstance(error, float) and error < TOLERANCE:
            found.append(config)
        else:
            errors[config] = error
    for config, error in errors.items():
        bar.console.print(f"wrong: {describe(config)}: {error}")
    return found


def time_all(
    cases: list[str], configs: list[AttentionConfig], deadline: float, bar: Progress
) -> tuple[dict[str, dict[AttentionConfig, float]], list[str]]:
    """Microseconds of each candidate by case, and what was left out."""
    times: dict[str, dict[AttentionConfig, float]] = {}
    left_out = []
    for case in cases:
        near, problem = configs, Problem.make(CASES[case])
        if case in LONG and GATE in times:
            best = min(times[GATE].values())
            near = [config for config in configs if times[GATE].get(config, 1e9) < NEAR * best]
        times[case] = {}
        for config in bar.track(near, description=case):
            if time.monotonic() > deadline:
                count = len(near) - len(times[case])
                left_out.append(f"{count} candidates of {case}: no time left")
                break
            try:
                times[case][config] = problem.microseconds(config)
            except Exception as failure:
                left_out.append(f"{case}, {describe(config)}: {failure}")
    return times, left_out


def of_table(case: str) -> AttentionConfig:
    """What the table chooses here, where every sequence is expected to be as long."""
    rows, count = sum(CASES[case]), len(CASES[case])
    return portable_config(rows, count, HEADS, torch.bfloat16, torch.device("cuda", 0))


def describe(config: AttentionConfig) -> str:
    """A tiling in words: what differs from the defaults behind the tile."""
    names = [f.name for f in fields(config)[2:] if getattr(config, f.name) != f.default]
    rest = ", ".join(f"{name} {getattr(config, name)}" for name in names)
    return f"{config.block_m}x{config.block_n}" + (f", {rest}" if rest else "")


def print_best(console: Console, times: dict, title: str) -> None:
    table = Table("case", "us", "TFLOP/s", "tiling", title=title, box=None)
    for case, found in times.items():
        lengths = CASES[case]
        own = of_table(case)
        flops = sum(4 * length**2 * HEADS * HEAD_DIM for length in lengths)
        best = sorted(found, key=found.get)[:3]
        for config in best + [own] * (own in found and own not in best):
            mark = " (table)" if config == own else ""
            us = found[config]
            table.add_row(case, f"{us:.1f}", f"{flops / us / 1e6:.0f}", describe(config) + mark)
    console.print(table)


def print_all(console: Console, times: dict) -> None:
    table = Table(*times, "tiling", box=None)
    for config in next(iter(times.values()), ()):
        cells = [f"{found[config]:.1f}" if config in found else "" for found in times.values()]
        table.add_row(*cells, describe(config))
    console.print(table)


def main() -> None:
    """Compile, check, time, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=100, help="nothing starts after these")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="that compile")
    parser.add_argument("--all", action="store_true", help="print every candidate")
    parser.add_argument("--save", type=output_file, default=None, help="all of them, as JSON")
    args = parser.parse_args()
    require(torch.cuda.is_available(), "a CUDA GPU, and torch sees none")
    deadline = time.monotonic() + args.seconds

    gpu = torch.cuda.get_device_properties(0)
    arch = f"sm_{gpu.major}{gpu.minor}"
    require(arch in ARCHITECTURES, f"one of {', '.join(ARCHITECTURES)}, and this is {arch}")
    own = [of_table(case) for case in args.cases]
    configs = list(dict.fromkeys([*own, *candidates()]))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=spawn) as pool, Progress() as bar:
        compiled = compile_all(pool, partial(compile_one, arch), "compiling", configs, bar)
        chosen = right(list(dict.fromkeys([*own, *fitting(compiled)])), bar)
        times, left_out = time_all(args.cases, chosen, deadline, bar)
    console = make_console()
    print_best(console, times, gpu.name)
    if args.all:
        print_all(console, times)
    dropped = sum(bool(one.reason) for one in compiled)
    console.print(f"{len(configs)} compiled, {dropped} of them spill or fail, {len(chosen)} timed")
    for what in left_out:
        console.print(f"left out: {what}")
    if args.save:
        results = [
            {"case": case, "us": us} | asdict(config)
            for case, found in times.items()
            for config, us in found.items()
        ]
        args.save.write_text(json.dumps(header() | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

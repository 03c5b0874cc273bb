"""SGLang's vision tower, its own ViT graphs and ours, in real engines: times, tokens, memory.

    python -m vitgraph.bench.sglang_engine [--requests 1000] [--save bench/results/NAME.json]

One engine after the other: SGLang's tower eagerly, with its ViT graphs, and ours. Weights, random
and large enough to matter, and inputs are the same in all.

milliseconds of the nine workloads of `vitgraph bench encoder`, in the scheduler, from SGLang's call
             of its encoder to the synchronised result: the first call of each size (SGLang's graphs
             are captured then) and the median of up to 20 more
embeddings   of ours, relative error to those of SGLang's eager tower
tokens       greedy, 28 prompts with 1 to 20 images, compared as vllm_engine.py does it
requests     images of a seeded stream of sizes: what the tower was given, hits and misses of our
             graphs, and the GPU's memory along the way
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vitgraph.bench.console import make_console
from vitgraph.bench.options import require
from vitgraph.bench.sglang_inside import SPEC, install
from vitgraph.bench.vllm_engine import EMBEDDING_TOLERANCE, compare_prompt

TOWERS = {
    "eager": {"VITGRAPH_DISABLE": "1"},
    "graphs": {"VITGRAPH_DISABLE": "1", "SGLANG_VIT_ENABLE_CUDA_GRAPH": "1"},
    "vitgraph": {"VITGRAPH_DISABLE": "0", "SGLANG_VIT_ENABLE_CUDA_GRAPH": "0"},
}
AT_ONCE, NEW_TOKENS, SETTLED = 20, 4, 300  # requests; memory is watched from the 300th on
GROWTH = 256  # MiB that the allocator may still take after that
FIRST, NOISE = 5, 1.03  # asked for: so many times as fast as a cold capture, never slower
ENGINE = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "mem_fraction_static": 0.5,
    "context_length": 16384,
    "chunked_prefill_size": 16384,
    "disable_cuda_graph": True,
    "disable_radix_cache": True,
    "grammar_backend": "none",
    "log_level": "info",
}


def main() -> int:
    """Run all engines; the exit status is 1 if one failed or a comparison did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="default: a dummy checkpoint")
    parser.add_argument("--geometry", default="8b", help="of the dummy's tower")
    parser.add_argument("--towers", nargs="+", choices=TOWERS, default=list(TOWERS))
    parser.add_argument("--workloads", nargs="+", default=[], help="by name; default: all nine")
    parser.add_argument("--attention", default=None, help="--mm-attention-backend of all engines")
    parser.add_argument("--engine-options", type=json.loads, default={}, help="JSON, of sgl.Engine")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=28)
    parser.add_argument("--engine-seconds", type=float, default=400, help="for one engine")
    parser.add_argument("--save", type=Path, default=None, help="JSON, written as it grows")
    parser.add_argument("--engine", type=json.loads, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine is not None:
        run_engine(args.engine)
        os._exit(0)  # SGLang has stopped its processes
    require(find_spec("sglang"), "SGLang, and it is not installed")
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"engines": {}}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        install(work / "plugin")
        for tower in args.towers:
            result["engines"][tower] = start_engine(tower, work, args)
            result["comparison"] = compare(result["engines"], work)
            if args.save:
                args.save.write_text(json.dumps(result, indent=1) + "\n")
    print_result(result)
    return int(bool(result["comparison"]["problems"]))


def start_engine(tower: str, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One engine in a process of its own, which ends with all of SGLang's."""
    model = args.model
    if model is None:
        from vitgraph.bench.dummy_model import write_model

        model = write_model(work / "model", args.geometry)
    files = {name: str(work / f"{tower}.{name}.json") for name in ("inside", "counts", "outside")}
    spec = files | {
        "model": str(model),
        "embeddings": str(work / f"{tower}.pt"),
        "workloads": args.workloads,
        "requests": args.requests,
        "prompts": args.prompts,
        "options": ENGINE | {"mm_attention_backend": args.attention} | args.engine_options,
    }
    path = [str(work / "plugin"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join(path),
        SGLANG_PLUGINS="vitgraph,bench",
        **TOWERS[tower],
        **{SPEC: json.dumps(spec)},
    )
    command = [sys.executable, "-m", "vitgraph.bench.sglang_engine", "--engine", json.dumps(spec)]
    outcome: dict[str, Any] = {}
    try:
        done = subprocess.run(command, env=environment, timeout=args.engine_seconds)
        if done.returncode:
            outcome["error"] = f"the engine ended with {done.returncode}"
    except subprocess.TimeoutExpired:
        outcome["error"] = f"no end after {args.engine_seconds:.0f} s"
    for name in ("inside", "outside"):
        if Path(files[name]).exists():
            outcome |= json.loads(Path(files[name]).read_text())
    return outcome


def run_engine(spec: dict) -> None:
    """Start the engine, which measures by the plugin, then serve prompts and requests."""
    import sglang

    from vitgraph.bench.sglang_inside import write

    outcome: dict[str, Any] = {}

    def record(**more: Any) -> None:
        outcome.update(more)
        write(Path(spec["outside"]), outcome)

    started = time.perf_counter()
    engine = sglang.Engine(model_path=spec["model"], **spec["options"])
    record(engine_up_s=time.perf_counter() - started)
    record(tokens=generate(engine, spec["prompts"]))
    record(requests=serve_requests(engine, spec))
    engine.shutdown()


def generate(engine: Any, count: int) -> list[list[list[tuple[int, float]]]]:
    """Greedy tokens of every prompt: at each step [token, logprob], the chosen one first."""
    from vitgraph.bench.vllm_inside import make_prompts

    answers = []
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    for prompt in [p for p in make_prompts() if "video" not in p["multi_modal_data"]][:count]:
        said = engine.generate(
            prompt["prompt"],
            sampling,
            image_data=prompt["multi_modal_data"]["image"],
            return_logprob=True,
            top_logprobs_num=5,
        )["meta_info"]
        chosen = [(token, logprob) for logprob, token, _ in said["output_token_logprobs"]]
        others = [[(t, p) for p, t, _ in step] for step in said["output_top_logprobs"]]
        answers.append(
            [
                [c, *(o for o in step if o[0] != c[0])]
                for c, step in zip(chosen, others, strict=True)
            ]
        )
    return answers


def serve_requests(engine: Any, spec: dict) -> dict[str, Any]:
    """One image each, of a seeded stream of sizes, twenty requests at once."""
    import numpy as np
    from PIL import Image

    from vitgraph.bench.vllm_inside import IMAGE
    from vitgraph.bench.workloads import photographs

    def counts() -> dict[str, int]:
        return json.loads(Path(spec["counts"]).read_text())

    random, before = np.random.default_rng(1), counts()
    grids = photographs(spec["requests"])
    memory: dict[int, int | None] = {0: gpu_memory()}
    started = time.perf_counter()
    for first in range(0, len(grids), AT_ONCE):
        part = grids[first : first + AT_ONCE]
        images = [
            Image.fromarray(random.integers(0, 256, (16 * h, 16 * w, 3), dtype=np.uint8))
            for _, h, w in part
        ]
        sampling = {"temperature": 0, "max_new_tokens": 1}
        engine.generate([f"{IMAGE}describe"] * len(part), sampling, image_data=images)
        memory[first + len(part)] = gpu_memory()
    after = counts()
    return {
        "sent": {"items": len(grids), "tokens": sum(h * w // 4 for _, h, w in grids)},
        "encoded": {name: after[name] - before.get(name, 0) for name in after},
        "seconds": time.perf_counter() - started,
        "memory_mib": memory,
    }


def gpu_memory() -> int | None:
    """MiB in use on the first GPU, by all processes; None without one."""
    command = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0")
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return int(said.split()[0])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return None


def compare(engines: dict[str, dict], work: Path) -> dict[str, Any]:
    """Ours with SGLang's own, and what contradicts what is asked for."""
    broken = {name: outcome["error"] for name, outcome in engines.items() if "error" in outcome}
    found = [f"{name}: {error.splitlines()[-1]}" for name, error in broken.items()]
    ours, eager, graphs = (engines.get(name, {}) for name in ("vitgraph", "eager", "graphs"))
    pair: dict[str, Any] = {"embedding_error": {}, "prompts": []}
    if ours and ours.get("serves") != "vitgraph":
        found.append("our tower does not serve")
    if ours.get("warm") and eager.get("warm"):
        import torch

        from vitgraph.bench.exactness import relative_error

        mine, theirs = (torch.load(work / f"{name}.pt") for name in ("vitgraph", "eager"))
        errors = pair["embedding_error"] = {n: relative_error(mine[n], theirs[n]) for n in mine}
        found += [
            f"{n}: embeddings differ by {e:.3f}"
            for n, e in errors.items()
            if e > EMBEDDING_TOLERANCE
        ]
        answers = zip(ours.get("tokens", []), eager.get("tokens", []), strict=False)
        pair["prompts"] = [compare_prompt(*answer) for answer in answers]
        found += [p for p in pair["prompts"] if p.startswith("different")]
    for name, ms in ours.get("warm", {}).items():
        best = min(
            (o["warm"][name] for o in (eager, graphs) if name in o.get("warm", {})), default=ms
        )
        if ms > NOISE * best:
            found.append(f"{name}: {ms:.2f} ms, SGLang's best {best:.2f}")
        cold = graphs.get("first", {}).get(name)
        if cold is not None and cold < FIRST * ours["first"][name]:
            found.append(f"{name}: first {ours['first'][name]:.1f} ms, cold capture {cold:.1f}")
    found += problems_of_requests(ours)
    return pair | {"problems": found}


def problems_of_requests(ours: dict) -> list[str]:
    """Every item encoded once and counted once, all of them replays, in memory that stays."""
    served = ours.get("requests")
    if served is None:
        return []
    found, sent, encoded = [], served["sent"], served["encoded"]
    for name, count in sent.items():
        if encoded[name] != count:
            found.append(f"{count} {name} sent, {encoded[name]} encoded")
    counted = encoded.get("graph_hits"), encoded.get("graph_misses")
    if counted != (sent["items"], 0):
        found.append(f"hits and misses {counted} of {sent['items']} items")
    settled = [m for at, m in served["memory_mib"].items() if m is not None and int(at) >= SETTLED]
    if settled and settled[-1] > settled[0] + GROWTH:
        found.append(f"memory grew from {settled[0]} to {settled[-1]} MiB after {SETTLED} requests")
    return found


def print_result(result: dict) -> None:
    """A table of times, then what was compared."""
    from rich.table import Table

    console, engines = make_console(), result["engines"]
    view = Table(title="encoder, ms", box=None, title_justify="left")
    view.add_column("", no_wrap=True)
    rows = {
        f"{tower}, {when}": outcome[key]
        for tower, outcome in engines.items()
        for key, when in (("first", "first call"), ("warm", "after"))
        if key in outcome
    }
    names = list(dict.fromkeys(name for times in rows.values() for name in times))
    for name in names:
        view.add_column(name, justify="right")
    for label, times in rows.items():
        view.add_row(label, *(f"{times[name]:.2f}" if name in times else "-" for name in names))
    console.print(view)
    comparison = result["comparison"]
    prompts = comparison["prompts"]
    worst = max(comparison["embedding_error"].values(), default=float("nan"))
    console.print(
        f"prompts {len(prompts)}, same {prompts.count('same')}; largest embedding error {worst:.1e}"
    )
    for name, outcome in engines.items():
        if "requests" in outcome:
            console.print(f"{name}: {outcome['requests']}", markup=False)
    console.print("\n".join(comparison["problems"]) or "nothing contradicts", markup=False)


if __name__ == "__main__":
    sys.exit(main())

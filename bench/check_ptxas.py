"""Attention of the Hopper tier through several releases of ptxas: the same bits, and right ones?

    python -m vitgraph.bench.check_ptxas 12.8=PATH 12.9=PATH 13.4=PATH [--rounds 20] [--save FILE]

The same PTX is assembled by each. ptxas 12.9 was seen to use registers again that a wgmma was still
reading (Triton 11781, fixed in CUDA 13.3): its code then differs from the others' now and then.
Every variant gets fresh random inputs each round, with items that are split and memory full of NaN.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rich.table import Table

from vitgraph.bench.console import make_console
from vitgraph.bench.outputs import output_file
from vitgraph.bench.report import header

LENGTHS = (1, 37, 192, 257, 1024, 700, 3100)


def outputs(rounds: int) -> dict[str, dict]:
    """For each variant a hash of each round's output, and the worst error of a row."""
    from vitgraph.kernels.attention import attention, attention_reference, attention_schedule
    from vitgraph.kernels.sm90.attention import CONFIGS

    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).to("cuda", torch.int32)
    found = {}
    for name, config in CONFIGS.items():
        for head_dim in (64, 72):
            for dtype in (torch.bfloat16, torch.float16):
                rng = torch.Generator("cuda").manual_seed(head_dim)
                hashes, worst = [], 0.0
                for turn in range(rounds):
                    shape = sum(LENGTHS), 3, 16, head_dim
                    qkv = torch.randn(shape, generator=rng, device="cuda").to(dtype)
                    schedule = attention_schedule(cu_seqlens, len(qkv), 16, config)
                    out = torch.full_like(qkv[:, 0].flatten(1), float("nan"))
                    attention(qkv, cu_seqlens, schedule=schedule, out=out)
                    raw = out.view(torch.int16).cpu().numpy().tobytes()
                    hashes.append(hashlib.sha256(raw).hexdigest()[:16])
                    if turn < 3:
                        truth = attention_reference(qkv.double(), cu_seqlens)
                        error = (out.double() - truth).norm(dim=1) / truth.norm(dim=1)
                        worst = max(worst, error.nan_to_num(float("inf")).max().item())
                label = f"{name} {head_dim} {str(dtype).removeprefix('torch.')}"
                found[label] = {"hashes": hashes, "worst": worst}
    return found


def run(ptxas: Path, rounds: int) -> dict:
    """`outputs` in a process whose kernels one ptxas assembles, and a hash of their PTX."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "TRITON_PTXAS_PATH": str(ptxas),
            "TRITON_PTXAS_BLACKWELL_PATH": str(ptxas),  # which Triton 3.9 uses for Hopper, too
            "TRITON_CACHE_DIR": cache,
        }
        command = [sys.executable, __file__, "--child", "--rounds", str(rounds)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{ptxas}: {done.stderr[-2000:]}")
        texts = (file.read_text() for file in Path(cache).rglob("attention_sm90*.ptx"))
        # The version of the language is the assembler's; nothing else may differ.
        plain = sorted(re.sub(r"\.version .*", "", text) for text in texts)
        ptx = hashlib.sha256("".join(plain).encode()).hexdigest()[:16]
    version = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True)
    return {
        "ptxas": version.stdout.split("release ")[-1].split("\n")[0],
        "ptx": ptx,
        "variants": json.loads(done.stdout.splitlines()[-1]),
    }


def main() -> int:
    """Run the command; the exit status is 1 if outputs differ or are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ptxas", nargs="*", help="NAME=PATH, two or more")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--save", type=output_file, default=None)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(outputs(args.rounds)))
        return 0
    if len(args.ptxas) < 2 or not all("=" in one for one in args.ptxas):
        parser.error("two or more NAME=PATH of ptxas")
    named = [one.split("=", 1) for one in args.ptxas]
    console = make_console()
    with ThreadPoolExecutor() as pool, console.status("assembling and running"):
        found = pool.map(lambda one: run(Path(one[1]), args.rounds), named)
        results = {name: result for (name, _), result in zip(named, found, strict=True)}
    view = Table("variant", *results, "same bits", box=None, title="worst error of a row")
    same_everywhere = True
    first = next(iter(results.values()))
    for label, one in first["variants"].items():
        others = [result["variants"][label] for result in results.values()]
        same = all(other["hashes"] == one["hashes"] for other in others)
        right = all(other["worst"] < 0.01 for other in others)
        same_everywhere &= same and right
        view.add_row(label, *(f"{other['worst']:.2g}" for other in others), "yes" if same else "NO")
    console.print(view)
    same_ptx = len({result["ptx"] for result in results.values()}) == 1
    console.print(f"the same PTX: {'yes' if same_ptx else 'NO'}, {args.rounds} rounds a variant")
    if args.save:
        about = {"rounds": args.rounds, "same_ptx": same_ptx, "same_bits": same_everywhere}
        args.save.write_text(json.dumps(header() | about | {"results": results}, indent=1) + "\n")
    return 0 if same_everywhere and same_ptx else 1


if __name__ == "__main__":
    sys.exit(main())

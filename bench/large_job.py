"""`vitgraph encode` on many JPEGs: images a second, where time goes, memory, a killed run resumed.

    python -m vitgraph.bench.large_job [--images N] [--workers 0 16] [--geometry 8b] [--save FILE]

Seeded photographs of 0.1 to 2.1 megapixels, blurred noise that compresses about as they do. Each
setting runs in a process of its own and writes a folder of shards; then one run is killed half way
and run again. The exit status is 1 if it does not end with the same items as the whole one.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image
from rich.table import Table

from vitgraph.bench.console import make_console
from vitgraph.bench.outputs import output_file
from vitgraph.bench.report import header

SIZES = ((336, 336), (640, 480), (1024, 768), (1280, 720), (1920, 1080))
SUMMARY = re.compile(r"(\d+) in ([\d.]+) s, ([\d.]+) a second: (.+)")


def make_images(folder: Path, count: int) -> None:
    """JPEGs of the sizes above, in turn by chance."""
    folder.mkdir()
    chance = random.Random(0)
    paths = [folder / f"{index:06}.jpg" for index in range(count)]
    with ProcessPoolExecutor() as pool:
        list(pool.map(make_image, paths, (chance.choice(SIZES) for _ in paths), chunksize=16))


def make_image(path: Path, size: tuple[int, int]) -> None:
    """One JPEG, the seed being its name."""
    width, height = size
    rng = np.random.default_rng(int(path.stem))
    coarse = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize(size, Image.BICUBIC).save(path, quality=90)


def start(images: Path, output: Path, options: list[str]) -> subprocess.Popen:
    """`vitgraph encode`, its output a pipe."""
    command = [sys.executable, "-m", "vitgraph", "encode", str(images), "--output", str(output)]
    return subprocess.Popen([*command, *options], stdout=-1, text=True)


def measure(images: Path, output: Path, options: list[str]) -> dict:
    """One whole run: what it printed of itself, its peak memory, and all of its seconds."""
    started = time.perf_counter()
    process = start(images, output, options)
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or not (found := SUMMARY.search(printed)):
        raise SystemExit(f"encode failed with status {process.returncode}: {printed[-2000:]}")
    return {
        "options": " ".join(options),
        "images": int(found[1]),
        "images_per_second": float(found[3]),
        "where": found[4],
        "all_seconds": time.perf_counter() - started,
        "peak_mib": usage.ru_maxrss / 1024,
    }


def kill_and_resume(images: Path, output: Path, options: list[str]) -> dict:
    """End a run once a few shards are written, without a word, and run it again."""
    process = start(images, output, options)
    while process.poll() is None and len(list(output.glob("*.safetensors"))) < 3:
        time.sleep(0.05)
    process.kill()
    process.wait()
    kept = len(list(output.glob("*.safetensors")))
    again = measure(images, output, options)
    return {"shards_kept": kept, "encoded_again": again["images"]}


def items(output: Path) -> dict[str, list[int]]:
    """Names and grids of what an index holds."""
    index = json.loads((output / "index.json").read_text())["items"]
    return {name: about["grid"] for name, about in index.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 16])
    parser.add_argument("--geometry", default="8b")
    parser.add_argument("--device", default=None)
    parser.add_argument("--shard-size", default="256")
    parser.add_argument("--save", type=output_file, default=None)
    args = parser.parse_args()
    console, runs = make_console(), []
    result = header() | {"images": args.images, "runs": runs}

    def save() -> None:
        if args.save:  # as it grows: a run that is cut keeps what it has
            args.save.write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with console.status("making images"):
            make_images(folder / "images", args.images)
        common = ["--geometry", args.geometry, "--shard-size", args.shard_size]
        common += ["--device", args.device] if args.device else []
        ways = [["--workers", str(workers)] for workers in args.workers]
        if args.device != "cpu":
            ways.append([*ways[-1], "--preprocess", "gpu"])
        for way in ways:
            runs.append(measure(folder / "images", folder / "whole", [*common, *way]))
            console.print(runs[-1], markup=False)
            save()
            expected = items(folder / "whole")
            shutil.rmtree(folder / "whole")  # 50 GB, of 2,000 images
        way = ["--workers", str(args.workers[-1])]
        killed = kill_and_resume(folder / "images", folder / "killed", [*common, *way])
        result["killed"] = killed | {"equal": items(folder / "killed") == expected}
        save()
    view = Table("options", "images/s", "peak MiB", "where the time went", box=None)
    for run in runs:
        numbers = f"{run['images_per_second']:.1f}", f"{run['peak_mib']:.0f}"
        view.add_row(run["options"], *numbers, run["where"])
    console.print(view)
    console.print(f"killed and run again: {result['killed']}", markup=False)
    return 0 if result["killed"]["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())

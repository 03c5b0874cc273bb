"""Ranks on the CPU, over gloo: `python ranks.py FILE FOLDER` tries the cases of a test file.

The file has WORLDS, CASES (names) and a class Cases(world, rank, folder), whose methods are called
by those names. FOLDER/WORLD/RANK.json says of each case what went wrong (conftest.py reads it). One
process imports torch for all of them.
"""

import json
import sys
import traceback
from pathlib import Path
from types import ModuleType

TIMEOUT = 30  # seconds of a collective


def run_worlds(module: ModuleType, folder: Path) -> None:
    """Fork the ranks of each world size from this process, which has started no thread."""
    import multiprocessing

    import vitgraph.graphs.parallel.data_parallel

    assert vitgraph.graphs.parallel.data_parallel
    context = multiprocessing.get_context("fork")
    for world in module.WORLDS:
        (folder / str(world)).mkdir()
        ranks = [
            context.Process(target=run_rank, args=(module, folder, world, rank))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(100)
            if process.exitcode != 0:
                process.kill()
                sys.exit(f"a rank of {world} ended with {process.exitcode}")


def run_rank(module: ModuleType, folder: Path, world: int, rank: int) -> None:
    """Try every case; what a rank got wrong must not keep it from the collectives of the others."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{world}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT),
    )
    cases = module.Cases(world, rank)
    found: dict[str, str | None] = {}
    for case in module.CASES:
        try:
            getattr(cases, case)()
            found[case] = None
        except BaseException:  # pytest's own are no `Exception`
            found[case] = traceback.format_exc()
    (folder / str(world) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("cases", sys.argv[1])
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    run_worlds(module, Path(sys.argv[2]))

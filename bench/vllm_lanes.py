"""Engines of vLLM, each in a process of its own, on several GPUs or several at once on one.

Shared by the vllm_*.py scripts. A script starts itself with `--engine SPEC` for every engine; the
process writes its result to the file that SPEC names, piece by piece, so what an engine measured
before it failed or ran out of time is kept. Most of an engine's minute is spent on coming up, so
engines share a GPU, and those that do stand still (SIGSTOP) while one of them is timed.
"""

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model is reached from the script
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # 0.26's has no encoder graphs
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # would compile CUDA sources
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions are sent to the workers
    "VLLM_LOGGING_LEVEL": "INFO",  # the plugin's line is kept in the result
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "NCCL_NVLS_ENABLE": "0",
}
ONE_GPU_ENVIRONMENT = {  # of ranks that share one; NCCL refuses that
    "VLLM_DISABLE_PYNCCL": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
TOWERS = ("vllm", "vitgraph")
LEAST_SECONDS = 30  # no engine is started with less left
# What a stopped process has launched goes on, and launches of others wait for their turn meanwhile.
QUIET_SECONDS, QUIET_LAUNCHES, LONGEST_QUIET_LAUNCH = 30, 200, 3e-4
KEPT = re.compile(r"vitgraph|CUDA graph (pool )?memory|Graph capturing finished")
FAULT = re.compile(r"^(\(.*?\) )?(ERROR.*|[\w.]*(Error|Exception|Interrupt)\b.*)$")


def engine_options(spec: dict) -> dict[str, Any]:
    """Arguments of `vllm.LLM`; `spec` has model, backend, graphs, budgets, items, ranks, tp_mode,
    at_once and one_gpu."""
    options = memory_options(spec["at_once"] * (spec["ranks"] if spec["one_gpu"] else 1))
    if spec["one_gpu"]:
        options |= dict(worker_cls="vllm_one_gpu.WorkerOnOneGpu", distributed_executor_backend="mp")
    return options | dict(
        model=spec["model"],
        load_format="dummy",
        max_model_len=16384,
        max_num_batched_tokens=16384,
        max_num_seqs=32,
        mm_encoder_attn_backend=spec["backend"],
        mm_processor_cache_gb=0,
        # The largest image takes vLLM's Triton attention 15 s.
        skip_mm_profiling=spec["backend"] == "TRITON_ATTN",
        enable_prefix_caching=False,
        seed=0,
        tensor_parallel_size=spec["ranks"],
        mm_encoder_tp_mode=spec["tp_mode"],
        disable_custom_all_reduce=True,
        limit_mm_per_prompt={"image": 20, "video": 1},
        compilation_config=compilation_options(spec),
    )


def memory_options(engines: int) -> dict[str, Any]:
    """Of one of several engines on a GPU. Alone it measures what is left for its cache, as usual;
    beside others that would measure theirs."""
    if engines == 1:
        return {"gpu_memory_utilization": 0.5}
    return {"gpu_memory_utilization": 0.6 / engines, "kv_cache_memory_bytes": 2 << 30}


def compilation_options(spec: dict) -> dict[str, Any]:
    """Graphs: few and of decoding only for the language model, the spec's for the encoder."""
    return {
        "mode": 0,
        # gloo, which ranks on one GPU use, cannot be captured.
        "cudagraph_mode": "NONE" if spec.get("one_gpu") else "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 8, 16, 32],
        "cudagraph_mm_encoder": spec["graphs"],
        "encoder_cudagraph_token_budgets": list(spec["budgets"]),
        "encoder_cudagraph_max_vision_items_per_batch": spec["items"],
        # As many frames as items: with more, vLLM's own replays of images leave zeros at the end
        # of its sequence offsets, and those of FlashInfer land elsewhere in them.
        "encoder_cudagraph_max_frames_per_batch": spec["items"],
    }


def register_plugin() -> str:
    """What an installed vitgraph needs no call for; returns who registered it."""
    if os.environ.get("VITGRAPH_DISABLE") == "1":
        return "nobody"
    if any(e.name == "vitgraph" for e in entry_points(group="vllm.general_plugins")):
        return "vLLM, by the entry point"
    from vitgraph.graphs.vllm_plugin import register

    register()
    return "this script: vitgraph is not installed"


def run_lanes(
    script: str,
    units: Sequence[Sequence[dict]],
    *,
    lanes: int,
    work: Path,
    seconds: float,
    engine_seconds: float,
    save: Callable[[dict, dict], None],
    gpus_per_lane: int = 1,
    at_once: int = 1,
) -> list[str]:
    """Run all engines.

    Args:
        units: engines that are compared with each other, which stay on one GPU.
        lanes: GPUs, or groups of `gpus_per_lane`, that work side by side.
        at_once: engines that share a GPU.
        seconds: for everything; `engine_seconds` for one engine.
        save: called with the spec and the outcome of every engine, one call at a time.

    Returns:
        Names of the engines there was no time for.
    """
    visible = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    devices = visible or [str(index) for index in range(lanes * gpus_per_lane)]
    if len(devices) < lanes * gpus_per_lane:
        raise ValueError(f"{lanes * gpus_per_lane} GPUs are asked for, {len(devices)} are visible")
    waiting, skipped, lock = list(units), [], threading.Lock()
    if lanes == 1:  # any order is on one GPU
        waiting = [[spec] for unit in units for spec in unit]
    for spec in (spec for unit in units for spec in unit):
        spec["at_once"] = at_once
    began = time.monotonic()

    def lane(index: int) -> None:
        mine = ",".join(devices[index * gpus_per_lane : (index + 1) * gpus_per_lane])
        while True:
            with lock:
                if not waiting:
                    return
                unit = waiting.pop(0)
            for spec in unit:
                left = seconds - (time.monotonic() - began)
                if left < LEAST_SECONDS:
                    skipped.append(spec["name"])
                    continue
                started = time.monotonic()
                outcome = run_engine_process(script, spec, mine, work, min(left, engine_seconds))
                outcome["process_s"] = time.monotonic() - started
                with lock:
                    save(spec, outcome)
                    state = "FAILED" if "error" in outcome else "done"
                    print(
                        f"{time.monotonic() - began:4.0f} s  GPU {mine}  {spec['name']}: {state} "
                        f"after {outcome['process_s']:.0f} s",
                        flush=True,
                    )

    threads = [
        threading.Thread(target=lane, args=(index,))
        for _ in range(at_once)
        for index in range(lanes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return skipped


def run_engine_process(script: str, spec: dict, gpus: str, work: Path, seconds: float) -> dict:
    """One engine; its result, or how far it came and how it ended."""
    output = work / f"{spec['name'].replace(' ', '-')}.json"
    log = output.with_suffix(".log")
    environment = ENVIRONMENT | {
        "CUDA_VISIBLE_DEVICES": gpus,
        "VITGRAPH_DISABLE": "0" if spec["tower"] == "vitgraph" else "1",
    }
    if spec.get("one_gpu"):
        environment |= ONE_GPU_ENVIRONMENT
    command = [sys.executable, script, "--engine", json.dumps(spec | {"output": str(output)})]
    ending = "the engine's process ended early"
    groups = work / f"GPU-{gpus}"
    groups.mkdir(exist_ok=True)
    (groups / "alone").touch()
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        (groups / str(process.pid)).touch()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            ending = f"stopped after {seconds:.0f} s"
        finally:  # workers of its own would keep the GPU
            _signal([process.pid], signal.SIGKILL)
            process.wait()
            (groups / str(process.pid)).unlink()
            if _is_alone(groups, process.pid):
                _signal(_others(groups, process.pid), signal.SIGCONT)
    lines = log.read_text(errors="replace").splitlines()
    outcome = {"log": [line for line in lines if KEPT.search(line)][-6:]}
    if output.exists():
        outcome |= json.loads(output.read_text())
    if not outcome.pop("complete", False):
        faults = [line for line in lines if FAULT.match(line)]
        outcome["error"] = ending
        outcome["faults"] = faults[:3] + faults[3:][-3:]
        outcome["log_tail"] = lines[-40:]
    return outcome


@contextlib.contextmanager
def alone(output: str) -> Iterator[None]:
    """In the engine's process: the other engines of its GPU stand still in here."""
    groups = _groups(output)
    mine = os.getpgid(0)
    with (groups / "alone").open("r+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.truncate()
        stream.write(str(mine))
        stream.flush()
        others = _others(groups, mine)
        _signal(others, signal.SIGSTOP)
        try:
            _await_quiet_gpu()
            yield
        finally:
            stream.seek(0)
            stream.truncate()
            _signal(others, signal.SIGCONT)


def _await_quiet_gpu() -> None:
    """Return when many launches in a row ended at once: nothing else runs on the GPU."""
    import torch

    if not torch.cuda.is_available():
        return
    number, quiet = torch.zeros((), device="cuda"), 0
    deadline = time.monotonic() + QUIET_SECONDS
    while quiet < QUIET_LAUNCHES and time.monotonic() < deadline:
        started = time.perf_counter()
        number.add_(1)
        torch.cuda.synchronize()
        quiet = quiet + 1 if time.perf_counter() - started < LONGEST_QUIET_LAUNCH else 0


def _groups(output: str) -> Path:
    """Where the process groups of an engine's GPU are listed, by name."""
    return Path(output).parent / f"GPU-{os.environ['CUDA_VISIBLE_DEVICES']}"


def _others(groups: Path, mine: int) -> list[int]:
    return [int(p.name) for p in groups.iterdir() if p.name not in ("alone", str(mine))]


def _is_alone(groups: Path, group: int) -> bool:
    """Whether this one ended while the others stood still."""
    return (groups / "alone").read_text() == str(group)


def _signal(groups: list[int], number: int) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)


class Recorder:
    """In the engine's process: the result so far, written whenever something is added. An engine
    does not start while another one is alone."""

    def __init__(self, path: str) -> None:
        self.path, self.outcome = Path(path), {}
        with (_groups(path) / "alone").open() as stream:
            fcntl.flock(stream, fcntl.LOCK_SH)

    def __call__(self, **more: Any) -> None:
        self.outcome |= more
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps(self.outcome))
        unfinished.replace(self.path)

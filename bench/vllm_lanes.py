"""Engines of vLLM, each in a process of its own, on several GPUs or several at once on one.

Shared by the vllm_*.py scripts. A script starts itself with `--engine SPEC` for every engine; the
process writes its result to the file that SPEC names, piece by piece, so what an engine measured
before it failed or ran out of time is kept. Most of an engine's minute is spent on starting, so
engines share a GPU, and those that do are stopped (SIGSTOP) while one of them is timed.
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

from vitgraph.bench.vllm_alone import groups_of, others, signal_groups, was_alone

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model is reached from the script
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
V2_RUNNER_HAS_GRAPHS = (0, 28)  # releases before it have them in their first model runner only
TOWERS = ("vllm", "vitgraph")
LEAST_SECONDS = 30  # no engine is started with less left
KEPT = re.compile(r"vitgraph|V2 Model Runner|CUDA graph (pool )?memory|Graph capturing finished")
FAULT = re.compile(r"^(\(.*?\) )?(ERROR.*|[\w.]*(Error|Exception|Interrupt)\b.*)$")


def runner_environment(release: str) -> dict[str, str]:
    """The model runner that a release of vLLM uses by itself, unless that has no encoder graphs."""
    numbers = tuple(int(part) for part in release.split(".")[:2])
    return {} if numbers >= V2_RUNNER_HAS_GRAPHS else {"VLLM_USE_V2_MODEL_RUNNER": "0"}


def engine_options(spec: dict) -> dict[str, Any]:
    """Arguments of `vllm.LLM`; `spec` has model, backend, graphs, budgets, items, ranks, tp_mode,
    at_once and one_gpu."""
    options = memory_options(spec["at_once"] * (spec["ranks"] if spec["one_gpu"] else 1))
    if spec["one_gpu"]:
        worker = "vitgraph.bench.vllm_one_gpu.WorkerOnOneGpu"
        options |= dict(worker_cls=worker, distributed_executor_backend="mp")
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


def prepare_vllm() -> str:
    """In the engine's process: choose the model runner and do what an installed vitgraph needs no
    call for; returns who registered the plugin."""
    import vllm

    os.environ |= runner_environment(vllm.__version__)
    if os.environ.get("VITGRAPH_DISABLE") == "1":
        return "nobody"
    if plugin_is_installed():
        return "vLLM, by the entry point"
    from vitgraph.graphs.vllm_plugin import register

    register()
    return "this script: vitgraph is not installed"


def plugin_is_installed() -> bool:
    """Whether vLLM finds the plugin by itself."""
    return any(e.name == "vitgraph" for e in entry_points(group="vllm.general_plugins"))


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
    only: Sequence[str] | None = None,
) -> list[str]:
    """Run all engines.

    Args:
        units: engines that are compared with each other, which stay on one GPU.
        lanes: GPUs, or groups of `gpus_per_lane`, that work side by side.
        at_once: engines that share a GPU.
        seconds: for everything; `engine_seconds` for one engine.
        save: called with the spec and the outcome of every engine, one call at a time.
        only: names of the engines to run, instead of all.

    Returns:
        Names of the engines there was no time for.
    """
    visible = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    devices = visible or [str(index) for index in range(lanes * gpus_per_lane)]
    if min(lanes, gpus_per_lane, at_once) < 1:
        raise ValueError(f"{lanes} lanes of {gpus_per_lane} GPUs, {at_once} engines at once: none")
    names = [spec["name"] for unit in units for spec in unit]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"engines asked for twice: {', '.join(sorted(repeated))}")
    if unknown := sorted({*(only or ())} - {*names}):
        raise ValueError(f"--only {unknown[0]!r} is none of {', '.join(names)}")
    units = [[spec for spec in unit if only is None or spec["name"] in only] for unit in units]
    if len(devices) < lanes * gpus_per_lane:
        raise ValueError(f"{lanes * gpus_per_lane} GPUs are asked for, {len(devices)} are visible")
    waiting, skipped, failures, lock = list(units), [], [], threading.Lock()
    if lanes == 1:  # any order is on one GPU
        waiting = [[spec] for unit in units for spec in unit]
    for spec in (spec for unit in units for spec in unit):
        spec["at_once"] = at_once
    began, stop = time.monotonic(), threading.Event()

    def lane(index: int) -> None:
        mine = ",".join(devices[index * gpus_per_lane : (index + 1) * gpus_per_lane])
        while True:
            with lock:
                if not waiting:
                    return
                unit = waiting.pop(0)
            for spec in unit:
                if stop.is_set():
                    return
                left = seconds - (time.monotonic() - began)
                if left < LEAST_SECONDS:
                    skipped.append(spec["name"])
                    continue
                started = time.monotonic()
                limit = min(left, engine_seconds)
                outcome = run_engine_process(script, spec, mine, work, limit, stop)
                outcome["process_s"] = time.monotonic() - started
                with lock:
                    try:
                        save(spec, outcome)
                    except Exception as error:  # the other engines' results are not lost by it
                        failures.append(error)
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
    with _ended_like_ctrl_c():
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:  # engines have sessions of their own, some are stopped
            waiting.clear()
            stop.set()
            for thread in threads:
                thread.join()
            raise
    if failures:
        raise failures[0]
    return skipped


@contextlib.contextmanager
def _ended_like_ctrl_c() -> Iterator[None]:
    """SIGTERM, which `timeout` sends, raises KeyboardInterrupt in here."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_engine_process(
    script: str, spec: dict, gpus: str, work: Path, seconds: float, stop: threading.Event
) -> dict:
    """One engine; its result, or how far it came and how it ended. Time in which it stands still
    counts, too."""
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
            deadline = time.monotonic() + seconds
            while process.poll() is None and not stop.wait(0.1):
                if time.monotonic() > deadline:
                    ending = f"stopped after {seconds:.0f} s"
                    break
        finally:  # workers of its own would keep the GPU
            signal_groups([process.pid], signal.SIGKILL)
            process.wait()
            (groups / str(process.pid)).unlink(missing_ok=True)
            if was_alone(groups, process.pid):
                signal_groups(others(groups, process.pid), signal.SIGCONT)
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


class Recorder:
    """In the engine's process: the result so far, written whenever something is added. An engine
    does not start while another one is alone."""

    def __init__(self, path: str) -> None:
        self.path, self.outcome = Path(path), {}
        with (groups_of(path) / "alone").open() as stream:
            fcntl.flock(stream, fcntl.LOCK_SH)

    def __call__(self, **more: Any) -> None:
        self.outcome |= more
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps(self.outcome))
        unfinished.replace(self.path)

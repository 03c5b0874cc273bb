"""vLLM's own vision tower against ours inside a real engine: same embeddings, same tokens, times.

    python bench/vllm_engine.py [--model DIR] [--seconds 540] [--save bench/results/NAME.json]

One engine at a time, in a process of its own, for each attention backend, graphs on and off, vLLM's
tower and ours. Weights and inputs are the same in all. What is compared with vLLM's tower:

embeddings   relative error over the nine workloads of `vitgraph bench encoder`
tokens       greedy, 30 prompts: 1 to 20 images, one of them a video
milliseconds the encoder's call to its synchronised result, median of up to 20, as the model runner
             calls it: through the graph manager, or eagerly

A result is saved after every engine; what --seconds left no time for is named in it. vLLM 0.26.0 on
one GPU was what this was written for; the environment it needs is set for the engines below.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model is reached from here
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # 0.26's has no encoder graphs
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # would compile CUDA sources
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_LOGGING_LEVEL": "INFO",  # the plugin's line is kept in the result
    "HF_HUB_OFFLINE": "1",
}
BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
PROMPTS, NEW_TOKENS, SAMPLED_ROWS, ENGINE_SECONDS = 30, 8, 64, 150
# Two bf16 evaluations of 27 layers that round in different places differ by about 1 %.
EMBEDDING_TOLERANCE = 0.03
TOWERS = ("vllm", "vitgraph")


def engines(backends: list[str]) -> list[dict]:
    """What to run, the most telling first."""
    return [
        {"backend": backend, "graphs": graphs, "tower": tower}
        for graphs in (True, False)
        for backend in backends
        for tower in TOWERS
    ]


def name_of(spec: dict) -> str:
    """E.g. "FLASH_ATTN graph vitgraph"."""
    return f"{spec['backend']} {'graph' if spec['graphs'] else 'eager'} {spec['tower']}"


def main() -> int:
    """Run all engines; the exit status is 1 if a comparison failed or an engine did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="default: a dummy 8B checkpoint")
    parser.add_argument("--geometry", default="8b", help="of the dummy's tower")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    parser.add_argument("--seconds", type=float, default=540, help="for everything")
    parser.add_argument("--save", type=Path, default=Path("vllm_engine.json"))
    parser.add_argument("--engine", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine is not None:
        run_engine(json.loads(args.engine))
        return 0
    deadline = time.monotonic() + args.seconds
    args.save.parent.mkdir(parents=True, exist_ok=True)
    result: dict = {"engines": {}, "comparisons": {}, "not_run": []}
    with tempfile.TemporaryDirectory() as work:
        folder = args.model
        if folder is None:
            from dummy_model import write_model

            folder = write_model(Path(work) / "model", args.geometry)
        for spec in engines(args.backends):
            left = deadline - time.monotonic()
            if left < 30:
                result["not_run"].append(name_of(spec))
                continue
            print(f"{name_of(spec)} ({left:.0f} s left)", flush=True)
            outcome = start_engine({**spec, "model": str(folder), "work": work}, left)
            result["engines"][name_of(spec)] = outcome
            result["header"] = outcome.pop("header", result.get("header"))
            result["comparisons"] = compare(result["engines"], Path(work))
            args.save.write_text(json.dumps(result, indent=1) + "\n")
    args.save.write_text(json.dumps(result, indent=1) + "\n")
    print_tables(result)
    failed = any("error" in outcome for outcome in result["engines"].values())
    wrong = any(not comparison["equal"] for comparison in result["comparisons"].values())
    return int(failed or wrong)


def start_engine(spec: dict, seconds: float) -> dict:
    """One engine in a process of its own; its result, or how it ended."""
    spec = spec | {"output": str(Path(spec["work"]) / f"{name_of(spec).replace(' ', '-')}.json")}
    command = [sys.executable, __file__, "--engine", json.dumps(spec)]
    log = Path(spec["output"]).with_suffix(".log")
    try:
        with log.open("w") as stream:
            subprocess.run(
                command,
                env=os.environ | ENVIRONMENT,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=min(seconds, ENGINE_SECONDS),
            )
    except subprocess.TimeoutExpired:
        pass  # what it had saved by then counts
    text = log.read_text(errors="replace")
    outcome = {"log": [line for line in text.splitlines() if "vitgraph" in line][-3:]}
    try:
        outcome |= json.loads(Path(spec["output"]).read_text())
    except FileNotFoundError:
        outcome["error"] = text[-2000:]
    if not outcome.get("complete"):
        outcome.setdefault("error", f"incomplete: {text[-1500:]}")
    return outcome


def run_engine(spec: dict) -> None:
    """In the engine's process: build, set weights, measure, save after each step."""
    import torch

    from vitgraph.graphs.benchmark.report import header
    from vitgraph.graphs.benchmark.workloads import BUDGETS, MAX_ITEMS, WORKLOADS

    if spec["tower"] == "vitgraph":
        from vitgraph.graphs.vllm_plugin import register

        os.environ.pop("VITGRAPH_DISABLE", None)
        register()  # as the entry point would, were vitgraph installed here
    else:
        os.environ["VITGRAPH_DISABLE"] = "1"
    import vllm
    from vllm import LLM

    started = time.perf_counter()
    llm = LLM(
        model=spec["model"],
        load_format="dummy",
        max_model_len=16384,
        max_num_batched_tokens=16384,
        gpu_memory_utilization=0.6,
        limit_mm_per_prompt={"image": 20, "video": 1},
        mm_encoder_attn_backend=spec["backend"],
        mm_processor_cache_gb=0,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_mm_encoder": spec["graphs"],
            "encoder_cudagraph_token_budgets": list(BUDGETS),
            "encoder_cudagraph_max_vision_items_per_batch": MAX_ITEMS,
            "encoder_cudagraph_max_frames_per_batch": 64,
        },
    )
    outcome: dict = {
        "engine_up_s": time.perf_counter() - started,
        "header": header() | {"vllm": vllm.__version__},
        "milliseconds": {},
    }

    def save(**more: object) -> None:
        outcome.update(more)
        Path(spec["output"]).write_text(json.dumps(outcome))

    runners: list = []
    llm.collective_rpc(lambda worker: runners.append(worker.model_runner))
    runner = runners[0]
    model = runner.get_model()
    save(
        model=f"{type(model).__module__}.{type(model).__name__}", tower=type(model.visual).__name__
    )
    if hasattr(model, "vitgraph"):
        save(attention=getattr(model.vitgraph, "attention", "vLLM's own tower"))
    set_weights(model)
    manager = getattr(runner, "encoder_cudagraph_manager", None)
    save(captured=manager is not None)
    embeddings: dict[str, torch.Tensor] = {}
    for name, grids in WORKLOADS.items():
        batch, key = make_batch(grids, model.visual)

        def encode(batch=batch, key=key) -> torch.Tensor:
            with torch.inference_mode():
                if manager is not None:
                    return torch.cat(list(manager.execute(dict(batch))))
                grid = torch.tensor(batch[key])
                return torch.cat(list(model.embed_multimodal(**batch | {key: grid})))

        rows = encode()
        step = max(1, len(rows) // SAMPLED_ROWS)
        embeddings[name] = rows[::step].float().cpu()
        outcome["milliseconds"][name] = wall(encode)
        save()
    torch.save(embeddings, Path(spec["output"]).with_suffix(".pt"))
    if manager is not None:
        save(statistics_workloads=dict(manager.get_cumulative_stats()))
    save(tokens=generate(llm))
    if manager is not None:
        save(statistics=dict(manager.get_cumulative_stats()))
    save(complete=True)


def set_weights(model) -> None:
    """The same values for every tower: what vLLM's dummy loader writes is too small to compare."""
    import torch

    generator = torch.Generator("cuda")
    with torch.no_grad():
        for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
            generator.manual_seed(index)
            values = torch.empty(parameter.shape, device="cuda").normal_(generator=generator)
            values.mul_(0.1 if "lm_head" in name else 0.02)
            if "norm" in name and name.endswith("weight"):
                values.add_(1)
            parameter.copy_(values)


def make_batch(grids: list, visual) -> tuple[dict, str]:
    """Random pixels on the GPU, as the model runner holds them."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    patches = sum(t * h * w for t, h, w in grids)
    pixels = torch.randn(patches, 1536, device="cuda", generator=generator).to(visual.dtype)
    if getattr(getattr(visual, "input_norm", None), "input_dtype", None) is not None:
        pixels = torch.randint(0, 256, pixels.shape, device="cuda", generator=generator).byte()
    if grids[0][0] > 1:
        names = ("pixel_values_videos", "video_grid_thw")
    else:
        names = ("pixel_values", "image_grid_thw")
    return {names[0]: pixels, names[1]: [list(grid) for grid in grids]}, names[1]


def wall(call, repeats: int = 20, seconds: float = 2) -> float:
    """Median milliseconds to the synchronised result; fewer repeats where a call is slow."""
    import torch

    for _ in range(2):
        call()
    times: list[float] = []
    while len(times) < repeats and (len(times) < 3 or sum(times) < seconds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 1e3 * sorted(times)[len(times) // 2]


def generate(llm) -> list[list[int]]:
    """Greedy tokens of every prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(make_prompts(), sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def make_prompts() -> list[dict]:
    """29 with 1 to 20 images of several sizes, and one with a video."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)

    def picture(width: int, height: int):
        coarse = random.integers(0, 256, (height // 32, width // 32, 3), dtype=np.uint8)
        return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)

    sizes = [(256, 256), (320, 320), (384, 256), (512, 768), (256, 448)]
    prompts = []
    for index in range(PROMPTS - 1):
        count = 1 + index % 20
        images = [picture(*sizes[(index + n) % len(sizes)]) for n in range(count)]
        places = "<|vision_start|><|image_pad|><|vision_end|>" * count
        prompts.append(
            {"prompt": f"{places}describe {index}", "multi_modal_data": {"image": images}}
        )
    frames = np.stack([np.asarray(picture(320, 192)) for _ in range(8)])
    about = {
        "fps": 2.0,
        "duration": 4.0,
        "total_num_frames": 8,
        "frames_indices": list(range(8)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
    place = "<|vision_start|><|video_pad|><|vision_end|>describe"
    prompts.append({"prompt": place, "multi_modal_data": {"video": [(frames, about)]}})
    return prompts


def compare(outcomes: dict[str, dict], work: Path) -> dict[str, dict]:
    """Ours against vLLM's, for every pair of engines that both have results."""
    import torch

    comparisons = {}
    for name, ours in outcomes.items():
        theirs = outcomes.get(name.replace("vitgraph", "vllm"))
        if not name.endswith("vitgraph") or theirs is None:
            continue
        names = (name, name.replace("vitgraph", "vllm"))
        files = [work / f"{n.replace(' ', '-')}.pt" for n in names]
        if not all(file.exists() for file in files):
            continue
        a, b = (torch.load(file) for file in files)
        errors = {
            workload: ((a[workload] - b[workload]).norm() / b[workload].norm()).item()
            for workload in a.keys() & b.keys()
        }
        pairs = list(zip(ours.get("tokens", []), theirs.get("tokens", []), strict=False))
        same = sum(mine == other for mine, other in pairs)
        comparisons[name.removesuffix(" vitgraph")] = {
            "embedding_error": errors,
            "prompts": len(pairs),
            "prompts_with_the_same_tokens": same,
            "speedup": {
                workload: theirs.get("milliseconds", {})[workload] / ms
                for workload, ms in ours.get("milliseconds", {}).items()
                if workload in theirs.get("milliseconds", {})
            },
            "equal": ours.get("tower", "").startswith("Vitgraph")
            and same == len(pairs) == PROMPTS
            and max(errors.values(), default=1.0) <= EMBEDDING_TOLERANCE,
        }
    return comparisons


def print_tables(result: dict) -> None:
    """Times of all engines, then the comparisons."""
    for name, outcome in result["engines"].items():
        times = outcome.get("milliseconds", {})
        print(f"\n{name}: {'; '.join(outcome['log'][-1:])}")
        print("  " + "  ".join(f"{workload} {ms:.2f}" for workload, ms in times.items()))
        if "error" in outcome:
            print("  error:", outcome["error"].strip().splitlines()[-1])
    for name, comparison in result["comparisons"].items():
        print(
            f"{name}: {'equal' if comparison['equal'] else 'DIFFERENT'}; largest embedding error "
            f"{max(comparison['embedding_error'].values(), default=float('nan')):.1e}; same tokens "
            f"{comparison['prompts_with_the_same_tokens']} of {comparison['prompts']}; speedup "
            + ", ".join(f"{ratio:.2f}" for ratio in comparison["speedup"].values())
        )
    if result["not_run"]:
        print("no time for:", ", ".join(result["not_run"]))


if __name__ == "__main__":
    sys.exit(main())

"""What vllm_engine.py does inside an engine's processes: weights, workloads, prompts."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitgraph.bench.report import header
from vitgraph.bench.vllm_alone import alone
from vitgraph.bench.vllm_lanes import Recorder, engine_options, prepare_vllm
from vitgraph.bench.workloads import BUDGETS, MAX_ITEMS, WORKLOADS

PROMPTS, NEW_TOKENS, SAMPLED_ROWS = 30, 4, 32
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


def measure_engine(spec: dict) -> None:
    """Build the engine, load weights, measure; what is there is saved after each step."""
    record = Recorder(spec["output"])
    record(registered_by=prepare_vllm())
    import vllm

    spec = spec | {"budgets": BUDGETS, "items": MAX_ITEMS}
    started = time.perf_counter()
    llm = vllm.LLM(**engine_options(spec))
    record(engine_up_s=time.perf_counter() - started, asked_for_graphs=spec["graphs"])
    record(**llm.collective_rpc(prepare)[0])
    milliseconds = {}
    with alone(spec["output"]) as quiet:
        record(quiet=quiet)
        for name in WORKLOADS:
            arguments = name, spec["output"], spec["ranks"]
            milliseconds[name] = max(llm.collective_rpc(encode_workload, args=arguments))
            record(milliseconds=milliseconds)
    record(tower=llm.collective_rpc(describe)[0]["tower"])  # as of the first forward with weights
    before = llm.collective_rpc(statistics)
    prompts = make_prompts()
    started = time.perf_counter()
    tokens = generate(llm, prompts)
    after = llm.collective_rpc(statistics)
    record(
        prompts_s=time.perf_counter() - started,
        tokens=tokens,
        distinct_answers=len({tuple(step[0][0] for step in answer) for answer in tokens}),
        items=sum(len(items) for p in prompts for items in p["multi_modal_data"].values()),
        statistics_workloads=before,
        statistics_prompts=[(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, after, strict=True)],
    )
    record(complete=True)


# What follows is called in each worker, which for one rank is this process.


def prepare(worker: Any) -> dict[str, Any]:
    """Load the weights and describe the worker."""
    # Or vLLM's counting of ranks, which log-probabilities need, is compiled first.
    torch.compiler.set_stance("force_eager")
    runner = worker.model_runner
    model = runner.get_model()
    with torch.no_grad():
        model.load_weights(random_checkpoint(runner.model_config.hf_config, model.visual.device))
    return describe(worker) | {
        "model": f"{type(model).__module__}.{type(model).__name__}",
        "tower_is_replicated": model.use_data_parallel,
        "memory_estimate_gib": getattr(worker, "cudagraph_memory_estimate", 0) / 2**30,
    }


def describe(worker: Any) -> dict[str, Any]:
    """Where and with what a worker runs, and which tower serves."""
    runner = worker.model_runner
    model = runner.get_model()
    ours = getattr(model, "vitgraph", None)
    declined = getattr(ours, "unshareable", None)  # the tower has our class all the same
    return {
        "header": header(model.visual.device),
        "runner": "V2" if type(runner).__module__.startswith("vllm.v1.worker.gpu.") else "V1",
        "tower": f"vLLM's: {declined}" if declined else type(model.visual).__name__,
        "attention": getattr(ours, "attention", None),
        "captured": _manager(worker) is not None,
    }


def random_checkpoint(config: Any, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Names as in a published checkpoint; weights on which a difference would show, unlike those of
    vLLM's dummy loader. The same for any number of ranks."""
    import transformers

    family = config.architectures[0]
    kind = getattr(transformers, family)
    with torch.device("meta"):  # vLLM may have a configuration class of its own
        shapes = kind(kind.config_class.from_dict(config.to_dict())).state_dict()
    for index, (name, like) in enumerate(sorted(shapes.items())):
        generator = torch.Generator(device).manual_seed(index)
        values = torch.randn(like.shape, device=device, generator=generator)
        values.mul_(2 / like.shape[1] ** 0.5 if "lm_head" in name else 0.02)
        if "norm" in name and name.endswith("weight"):
            # Sharp attention: an answer depends on few tokens of the pictures, not on their mean.
            values.add_(2.25 if "q_norm" in name or "k_norm" in name else 1)
            if "Qwen3_5" in family and ".language_model." in name and "linear_attn" not in name:
                values.sub_(1)  # RMSNorm's weight is what is added to one
        yield name, values.to(torch.bfloat16)


def encode_workload(worker: Any, name: str, output: str, ranks: int) -> float:
    """Encode as the model runner does, save some rows of the result; milliseconds a call."""
    model, manager = worker.model_runner.get_model(), _manager(worker)
    batch = make_batch(WORKLOADS[name], model.visual)

    def encode() -> Any:
        with torch.inference_mode():
            return manager.execute(dict(batch)) if manager else model.embed_multimodal(**batch)

    rows = torch.cat(list(encode()))
    rows = rows[:: max(1, len(rows) // SAMPLED_ROWS)].to(torch.bfloat16).cpu()
    path = Path(output).with_suffix(f".rank{worker.rank}.pt")
    unfinished = path.with_suffix(".part")
    torch.save((torch.load(path) if path.exists() else {}) | {name: rows}, unfinished)
    unfinished.replace(path)
    # Ranks must agree on the number of calls.
    return wall(encode, *((5, float("inf")) if ranks > 1 else ()))


def statistics(worker: Any) -> tuple[int, int]:
    """Hits and misses of the graphs, in items, as vLLM counts them."""
    if (manager := _manager(worker)) is None:
        return 0, 0
    counted = manager.get_cumulative_stats()
    return counted["graph_hits"], counted["graph_misses"]


def _manager(worker: Any) -> Any:
    """The graph manager of either model runner, if it has one."""
    runner = worker.model_runner
    if hasattr(runner, "encoder_cudagraph_manager"):
        return runner.encoder_cudagraph_manager
    return getattr(runner.model_state.encoder_runner, "cudagraph_manager", None)


def make_batch(grids: list, visual: nn.Module) -> dict[str, Tensor]:
    """Random pixels on the device and grids on the host, as the model runner holds them."""
    generator = torch.Generator(visual.device).manual_seed(0)
    patches = sum(t * h * w for t, h, w in grids)
    pixels = torch.randn(patches, 1536, device=visual.device, generator=generator)
    if getattr(getattr(visual, "input_norm", None), "input_dtype", None) is not None:
        pixels = pixels.mul_(64).add_(128).clamp_(0, 255).byte()
    else:
        pixels = pixels.to(visual.dtype)
    names = ("pixel_values", "image_grid_thw")
    if grids[0][0] > 1:
        names = ("pixel_values_videos", "video_grid_thw")
    return {names[0]: pixels, names[1]: torch.tensor(grids)}


def wall(call: Any, repeats: int = 20, seconds: float = 2) -> float:
    """Median milliseconds to the synchronised result; fewer repeats where a call is slow."""
    times: list[float] = []
    call()
    while len(times) < repeats and (len(times) < 3 or sum(times) < seconds):
        _synchronize()
        started = time.perf_counter()
        call()
        _synchronize()
        times.append(time.perf_counter() - started)
    return 1e3 * sorted(times)[len(times) // 2]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def generate(llm: Any, prompts: list[dict]) -> list[list[list[tuple[int, float]]]]:
    """Greedy tokens of every prompt: at each step [token, logprob], the chosen one first."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=5
    )
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [
        [
            sorted(
                ((token, entry.logprob) for token, entry in step.items()),
                key=lambda pair, chosen=chosen: (pair[0] != chosen, -pair[1]),
            )
            for chosen, step in zip(answer.token_ids, answer.logprobs, strict=True)
        ]
        for answer in (output.outputs[0] for output in outputs)
    ]


def make_prompts() -> list[dict]:
    """28 with 1 to 20 images of several sizes, one with a video, one with both; their text is the
    same."""
    random = np.random.default_rng(0)

    def picture(width: int, height: int) -> Image.Image:
        coarse = random.integers(0, 256, (height // 32, width // 32, 3), dtype=np.uint8)
        return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)

    sizes = [(256, 256), (320, 320), (384, 256), (512, 768), (256, 448)]
    prompts = []
    for index in range(PROMPTS - 2):
        count = 1 + index % 20
        images = [picture(*sizes[(index + n) % len(sizes)]) for n in range(count)]
        prompts.append(
            {"prompt": f"{IMAGE * count}describe", "multi_modal_data": {"image": images}}
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
    video = [(frames, about)]
    prompts.append({"prompt": f"{VIDEO}describe", "multi_modal_data": {"video": video}})
    both = {"image": images[:2], "video": video}
    prompts.append({"prompt": f"{IMAGE * 2}{VIDEO}describe", "multi_modal_data": both})
    return prompts

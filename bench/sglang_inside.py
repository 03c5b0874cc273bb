"""What sglang_engine.py does inside SGLang's scheduler: a plugin that loads weights, measures the
encoder, and counts what is encoded while the engine serves."""

import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SPEC = "VITGRAPH_BENCH_SPEC"  # environment variable; spawned processes inherit it
WARM_UP = [(1, 26, 26)]  # none of the workloads
SAMPLED_ROWS = 32
# Our plugin comes first, so that its hook does, too.
ENTRY_POINTS = """[sglang.srt.plugins]
vitgraph = vitgraph.graphs.sglang_plugin:register
bench = vitgraph.bench.sglang_inside:register
"""


def install(folder: Path) -> None:
    """Write a distribution that SGLang finds where `folder` is on the path."""
    information = folder / "vitgraph_bench-0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vitgraph-bench\nVersion: 0\n"
    )
    (information / "entry_points.txt").write_text(ENTRY_POINTS)


def register() -> None:
    """SGLang calls this in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from vitgraph.graphs.sglang_plugin.names import find_target

    HookRegistry.register(find_target(), after_loading, HookType.AFTER)


def after_loading(result: Any, loaded: Any, *_: Any, **__: Any) -> None:
    """The hook: measure, and write down what came of it."""
    spec = json.loads(os.environ[SPEC])
    model = loaded.model if hasattr(loaded, "load_model") else loaded
    try:
        outcome = measure(model, spec)
        count_calls(model.visual, Path(spec["counts"]))
    except Exception:
        outcome = {"error": traceback.format_exc()}
    write(Path(spec["inside"]), outcome)


def measure(model: Any, spec: dict) -> dict[str, Any]:
    """Milliseconds of the nine workloads, the first call and the median of later ones, as SGLang
    calls its encoder; some rows of each result are saved."""
    from transformers import AutoConfig

    from vitgraph.bench.report import header
    from vitgraph.bench.vllm_inside import random_checkpoint, wall
    from vitgraph.bench.workloads import WORKLOADS

    tower = model.visual
    with torch.no_grad():
        model.load_weights(
            random_checkpoint(AutoConfig.from_pretrained(spec["model"]), tower.device)
        )
    encode(model, make_items(WARM_UP, tower))
    first, warm, rows = {}, {}, {}
    for name in spec.get("workloads") or WORKLOADS:
        items = make_items(WORKLOADS[name], tower)
        started = time.perf_counter()
        out = encode(model, items)
        first[name] = 1e3 * (time.perf_counter() - started)
        rows[name] = out[:: max(1, len(out) // SAMPLED_ROWS)].to(torch.bfloat16).cpu()
        warm[name] = wall(lambda items=items: encode(model, items))
    torch.save(rows, spec["embeddings"])
    service = getattr(tower, "vitgraph", None)
    plans = service.manager.model.plans.items() if service else ()
    return {
        "header": header(tower.device),
        "serves": "vitgraph" if service else "SGLang",
        "attention": tower.blocks[0].attn.qkv_backend.__class__.__name__
        if service is None
        else {budget: plan.attention for budget, plan in plans},
        "budgets": list(service.manager.budgets) if service else [],
        "graph_memory": service.manager.memory_report() if service else None,
        "first": first,
        "warm": warm,
    }


def make_items(grids: list, tower: Any) -> list:
    """One request's image or video each, pixels on the device."""
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    generator = torch.Generator(tower.device).manual_seed(0)
    items = []
    for t, h, w in grids:
        pixels = torch.randn(t * h * w, 1536, device=tower.device, generator=generator)
        video = t > 1
        items.append(
            MultimodalDataItem(
                modality=Modality.VIDEO if video else Modality.IMAGE,
                feature=pixels.to(tower.dtype),
                model_specific_data={
                    "video_grid_thw" if video else "image_grid_thw": torch.tensor([[t, h, w]])
                },
            )
        )
    return items


def encode(model: Any, items: list) -> Tensor:
    """To the synchronised result."""
    is_video = items[0].modality.name == "VIDEO"
    with torch.inference_mode():
        rows = (model.get_video_feature if is_video else model.get_image_feature)(items)
    if rows.is_cuda:
        torch.cuda.synchronize()
    return rows


def count_calls(tower: Any, path: Path) -> None:
    """Write the items and tokens that the tower encodes from now on, and our own statistics."""
    service = getattr(tower, "vitgraph", None)
    counts = {"calls": 0, "items": 0, "tokens": 0}
    before = service.manager.get_cumulative_stats() if service else {}

    def count(_: Any, args: tuple, kwargs: dict, rows: Tensor) -> None:
        grids = kwargs["grid_thw"] if "grid_thw" in kwargs else args[1]
        counts["calls"] += 1
        counts["items"] += len(grids)
        counts["tokens"] += len(rows)
        if service is not None:
            now = service.manager.get_cumulative_stats()
            for name in ("graph_hits", "graph_misses"):
                counts[name] = now[name] - before[name]
        write(path, counts)

    tower.register_forward_hook(count, with_kwargs=True)
    write(path, counts)


def write(path: Path, value: dict) -> None:
    """Readers never see half of it."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.replace(path)

"""vLLM's vision tower under vLLM's own graph manager, without an engine around them.

What is used of vLLM is there from 0.23 on; tests/vllm_bench.py runs it with the releases tested.
"""

import os
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitgraph.graphs.benchmark.systems import Setup, System, copy_weights, measure_capture
from vitgraph.graphs.benchmark.workloads import Batch


def vllm_systems(setup: Setup, backend: str) -> list[System]:
    """Eager and through graphs, with one attention backend.

    With several ranks the batch is spread over them as vLLM's data-parallel tower does it.

    Raises:
        ImportError, ValueError: vLLM or the backend is not there.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.models import qwen3_vl
    from vllm.model_executor.models.vision import run_dp_sharded_mrope_vision_model
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    encoder, replayed = setup.encoder, []
    device, dtype = encoder.device, encoder.dtype
    config = _config(setup, backend)

    class Manager(EncoderCudaGraphManager):
        """Remembers what it replayed."""

        def _run_budget_graph(
            self, mm_kwargs: Any, token_budget: int, *args: Any, **kwargs: Any
        ) -> Any:
            output = super()._run_budget_graph(mm_kwargs, token_budget, *args, **kwargs)
            graphs = self.budget_graphs  # as of 0.24 by attention path, of which there is one
            if token_budget not in graphs:
                graphs = next(iter(graphs.values()))
            replayed.append((token_budget, graphs[token_budget].graph))
            return output

    _join(setup.ranks, device)
    with set_current_vllm_config(config):
        model = _model(qwen3_vl, config, dtype, device)
        copy_weights(encoder, model.visual)
        for module in model.visual.modules():
            if (method := getattr(module, "quant_method", None)) is not None:
                method.process_weights_after_loading(module)
        manager = Manager(config, device, dtype, model)
        captured = measure_capture(lambda: _capture(manager, device), device)

    @torch.inference_mode()
    def eager(batch: Batch) -> Tensor | tuple[Tensor, ...]:
        if setup.ranks == 1:
            return model.encoder_eager_forward(batch.mm_kwargs)
        pixels, grids = batch.mm_kwargs.values()
        return run_dp_sharded_mrope_vision_model(model.visual, pixels, grids, rope_type="rope_3d")

    @torch.inference_mode()
    def graph(batch: Batch) -> list[Tensor]:
        replayed.clear()
        missed = manager.graph_misses
        output = manager.execute(batch.mm_kwargs)
        if manager.graph_misses > missed:
            replayed.append((None, None))
        return output

    return [
        System(f"vllm {backend} eager", eager),
        System(f"vllm {backend} graph", graph, lambda: list(replayed), **captured),
    ]


def _capture(manager: Any, device: torch.device) -> None:
    """As an engine does it: on a stream of its own, which vLLM's manager takes for granted."""
    from vllm.distributed.parallel_state import graph_capture

    on_gpu = device.type == "cuda"
    with graph_capture(device) if on_gpu else nullcontext():
        manager.capture(torch.cuda.graph_pool_handle() if on_gpu else None)


def _config(setup: Setup, backend: str) -> Any:
    """As much of vLLM's configuration as its tower and its graph manager read."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
    from vllm.config import VllmConfig
    from vllm.config.multimodal import MultiModalConfig

    multimodal = MultiModalConfig(mm_encoder_attn_backend=backend, mm_encoder_tp_mode="data")
    config = VllmConfig()
    config.model_config = SimpleNamespace(
        hf_config=Qwen3VLConfig(vision_config=setup.encoder.config.to_dict()),
        dtype=setup.encoder.dtype,
        max_model_len=setup.budgets[-1],
        multimodal_config=multimodal,
        is_diffusion=False,
    )
    config.parallel_config.tensor_parallel_size = setup.ranks
    compilation = config.compilation_config
    compilation.cudagraph_mm_encoder = True
    compilation.encoder_cudagraph_token_budgets = list(setup.budgets)
    compilation.encoder_cudagraph_max_vision_items_per_batch = setup.max_items
    # As many as items: 0.26 leaves the offsets' tail zero where images meet more room for frames.
    compilation.encoder_cudagraph_max_frames_per_batch = setup.max_items
    return config


def _model(
    qwen3_vl: ModuleType, config: Any, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """vLLM's model without its language half: the tower and the methods its manager calls."""

    class Tower(qwen3_vl.Qwen3VLForConditionalGeneration):
        """Only what the graph methods read is set."""

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.model_config = config.model_config
            self.multimodal_config = config.model_config.multimodal_config
            self.is_multimodal_pruning_enabled = False
            self.visual = qwen3_vl.Qwen3_VisionTransformer(
                config.model_config.hf_config.vision_config, prefix="visual"
            )

        def get_max_frames_per_video(self) -> int:
            return 1  # asks the Hugging Face processor otherwise; the configuration says it already

    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return Tower().requires_grad_(False)
    finally:
        torch.set_default_dtype(default)


def _join(ranks: int, device: torch.device) -> None:
    """vLLM's process groups, once a process, over the default group; alone where there is none."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )
    from vllm.distributed.parallel_state import set_custom_all_reduce

    if model_parallel_is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    # A data-parallel tower gathers and never reduces.
    set_custom_all_reduce(False)
    os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] = "0"
    local_rank = device.index or 0
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(ranks, dist.get_rank(), "env://", local_rank, backend)
        initialize_model_parallel(ranks)

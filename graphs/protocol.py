"""What a model must offer to be served by `EncoderCudaGraphManager`: vLLM's protocol, by the same
names.

Batches are dictionaries of keyword inputs (`mm_kwargs`); what is in them is the model's business.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from vitgraph.graphs.packing import Item


@dataclass(frozen=True)
class EncoderCudaGraphConfig:
    """What the manager must know of a model.

    Attributes:
        modalities: which the graphs serve.
        input_key_by_modality: key of the tensor whose rows are the items' patches.
        buffer_keys: metadata tensors copied before a replay.
        out_hidden_size: width of an output row.
        zero_buffers: zero input and metadata past the copied rows before a replay; False where the
            forward reads the number of real rows on the device.
        sequences_are_free: empty sequence slots cost nothing, so replays need no limit of them.
    """

    modalities: tuple[str, ...]
    input_key_by_modality: dict[str, str]
    buffer_keys: tuple[str, ...]
    out_hidden_size: int
    zero_buffers: bool = True
    sequences_are_free: bool = False


@dataclass
class EncoderCudaGraphCaptureInputs:
    """Static inputs of one capture: keyword inputs of the model, and metadata buffers by name."""

    mm_kwargs: dict[str, Any]
    buffers: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class EncoderCudaGraphReplayBuffers:
    """Values to copy into the metadata buffers before one replay."""

    buffers: dict[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class SupportsEncoderCudaGraph(Protocol):
    """Ten methods. `isinstance` checks that they exist.

    More is used where the model has it:

    device, dtype                                   of the static buffers
    module                                          whose weights the graphs read
    check_encoder_inputs(mm_kwargs) -> mm_kwargs    validates a batch, before anything else
    get_encoder_cudagraph_per_item_sequences(mm_kwargs) -> list[int]
                                                    attention sequences, otherwise one an item
    warm_up_encoder_eager()                         compiles what a miss needs
    estimate_encoder_memory(budget) -> int          bytes of a captured budget
    """

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """Describe the inputs of the graphs."""

    def get_encoder_cudagraph_budget_range(self, config: Any = None) -> tuple[int, int]:
        """Smallest and largest budget worth capturing, in output tokens."""

    def get_encoder_cudagraph_num_items(self, mm_kwargs: dict[str, Any]) -> int:
        """Items in the batch."""

    def get_encoder_cudagraph_per_item_output_tokens(self, mm_kwargs: dict[str, Any]) -> list[int]:
        """Output rows of each item."""

    def get_encoder_cudagraph_per_item_input_sizes(self, mm_kwargs: dict[str, Any]) -> list[int]:
        """Input rows of each item."""

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        """The sub-batch of `indices`, in that order."""

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> EncoderCudaGraphCaptureInputs:
        """Inputs and metadata buffers of a full budget, valid for a first run."""

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int
    ) -> EncoderCudaGraphReplayBuffers:
        """Values of the metadata buffers for one batch; they may be shorter than the buffers."""

    def encoder_cudagraph_forward(
        self, mm_kwargs: dict[str, Any], buffers: dict[str, Tensor]
    ) -> Tensor:
        """The forward that is captured: no host read of a device value. Returns one row a token."""

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any]) -> Tensor:
        """The forward for batches that no graph serves. Returns one row a token."""


def require_protocol(model: object) -> None:
    """Refuse a model that cannot be managed.

    Raises:
        ValueError: naming the methods it lacks.
    """
    names = [name for name in vars(SupportsEncoderCudaGraph) if "encoder" in name]
    if missing := [name for name in names if not hasattr(model, name)]:
        raise ValueError(f"{type(model).__name__} lacks {', '.join(missing)}")


def check_rows(model: object, rows: Tensor, tokens: int, shape: torch.Size | None = None) -> None:
    """Refuse what a forward returned: not a row a token, or rows unlike others, of `shape`.

    Raises:
        ValueError: naming the model and both numbers.
    """
    name = type(model).__name__
    if len(rows) != tokens:
        raise ValueError(f"{name} returned {len(rows)} rows for {tokens} tokens")
    if shape is not None and rows.shape[1:] != shape:
        raise ValueError(f"{name} returned rows of {(*rows.shape[1:],)} after rows of {(*shape,)}")


def look(
    model: SupportsEncoderCudaGraph, mm_kwargs: dict[str, Any]
) -> tuple[dict[str, Any], list[Item]]:
    """The batch, validated where the model can (no later method reads the device then), and what
    packing must know of its items.

    Raises:
        ValueError: what the model's check says, or a model whose answers do not fit together.
    """
    if check := getattr(model, "check_encoder_inputs", None):
        mm_kwargs = check(mm_kwargs)
    tokens = model.get_encoder_cudagraph_per_item_output_tokens(mm_kwargs)
    count = model.get_encoder_cudagraph_num_items(mm_kwargs)
    sequences = [1] * count
    if per_item := getattr(model, "get_encoder_cudagraph_per_item_sequences", None):
        sequences = per_item(mm_kwargs)
    for what, sizes in (("output", tokens), ("sequence", sequences)):
        if len(sizes) != count:
            raise ValueError(
                f"{type(model).__name__} says that a batch has {count} items, and {len(sizes)} "
                f"{what}s"
            )
    return mm_kwargs, list(map(Item, tokens, sequences))

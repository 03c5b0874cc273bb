"""Geometry of a vision tower as Qwen3-VL has it, read from a Hugging Face config.json."""

import sys
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any

from vitgraph.encoder.checkpoint import open_checkpoint

_SIZES = (
    "depth",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "out_hidden_size",
    "num_position_embeddings",
    "in_channels",
    "patch_size",
    "temporal_patch_size",
    "spatial_merge_size",
)
# Fields of the towers of Qwen2.5-VL (attention in windows) and Qwen2-VL.
_OTHER_TOWERS = {"fullatt_block_indexes", "window_size", "embed_dim", "mlp_ratio"}
# Where a whole model's config.json has that of the model around the tower.
_WRAPPERS = ("thinker_config", "vlm_config")

# The classes of transformers that are this tower, and whose it is. Deepstack is optional.
TOWERS = {
    "Qwen3VLVisionModel": "Qwen3-VL",
    "Qwen3VLMoeVisionModel": "Qwen3-VL MoE",
    "Qwen3_5VisionModel": "Qwen3.5 to 3.8",
    "Qwen3_5MoeVisionModel": "Qwen3.5 to 3.8 MoE",
    "Qwen4ExpVisionModel": "Qwen4Exp",
    "Qwen3OmniMoeVisionEncoder": "Qwen3-Omni",
    "CohereCompassVisionModel": "Cohere Compass",
}
SUPPORTED = f"supported are the towers of {', '.join(TOWERS.values())}"

ROPE_TYPES = (None, "default", "axial")  # one formula under two names


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the tower; the names are those of `vision_config` in the published config.json
    files.

    Raises:
        ValueError: where a field contradicts another, naming both numbers.
    """

    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_heads: int = 16
    out_hidden_size: int = 4096
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)
    num_position_embeddings: int = 2304
    in_channels: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    hidden_act: str = "gelu_pytorch_tanh"
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if type(value) is not int or not 0 < value < 1 << 24:
                raise ValueError(f"{name} {value!r} is no positive integer below 2**24")
        levels = self.deepstack_visual_indexes
        if not all(isinstance(level, Integral) for level in levels):
            raise ValueError(f"deepstack_visual_indexes {list(levels)} are no integers")
        if any(a >= b for a, b in pairwise(levels)):
            raise ValueError(f"deepstack_visual_indexes {list(levels)} must ascend")
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            raise ValueError(
                f"hidden_size {self.hidden_size} over num_heads {self.num_heads} must give a whole "
                f"head whose size is a multiple of 4"
            )
        if self.position_grid_side**2 != self.num_position_embeddings:
            raise ValueError(
                f"num_position_embeddings {self.num_position_embeddings} is no square; the nearest "
                f"is {self.position_grid_side}**2 = {self.position_grid_side**2}"
            )
        for level in self.deepstack_visual_indexes:
            if not 0 <= level < self.depth:
                raise ValueError(f"deepstack level {level} is outside the depth {self.depth}")
        theta = self.rope_theta
        if not isinstance(theta, int | float) or not 0 < theta <= sys.float_info.max:
            raise ValueError(f"rope_theta {theta!r:.50} is no positive number")
        object.__setattr__(self, "rope_theta", float(theta))
        if self.hidden_act != "gelu_pytorch_tanh":
            raise ValueError(
                f"hidden_act {self.hidden_act!r} is not 'gelu_pytorch_tanh'; {SUPPORTED}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def position_grid_side(self) -> int:
        """Side of the square of learned position embeddings."""
        return round(self.num_position_embeddings**0.5)

    @property
    def patch_width(self) -> int:
        """Values of one patch, the width of `pixel_values`."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def output_width(self) -> int:
        """Width of an output row: the merger's columns, then those of each deepstack level."""
        return (1 + len(self.deepstack_visual_indexes)) * self.out_hidden_size

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "VisionConfig":
        """Read the fields of a whole model's config.json or of its `vision_config`.

        Raises:
            ValueError: another kind of tower, by what it has or lacks, or fields that contradict
                one another.
        """
        config = config if isinstance(config, dict) else {}
        inner = [config[name] for name in _WRAPPERS if isinstance(config.get(name), dict)]
        found = (one["vision_config"] for one in (config, *inner) if "vision_config" in one)
        vision = next(found, config)
        vision = vision if isinstance(vision, dict) else {}
        kind = vision.get("model_type") or config.get("model_type") or "this"
        for name in sorted(_OTHER_TOWERS & vision.keys()):
            raise ValueError(f"{kind} is another kind of tower: it has {name}; {SUPPORTED}")
        missing = [name for name in ("depth", "hidden_size", "num_heads") if name not in vision]
        if missing:
            raise ValueError(
                f"{kind} has no vision config of this kind: it lacks {', '.join(missing)}; "
                f"{SUPPORTED}"
            )
        known = {f.name: vision[f.name] for f in fields(cls) if vision.get(f.name) is not None}
        levels = vision.get("deepstack_visual_indexes") or ()
        if not isinstance(levels, list | tuple):
            raise ValueError(f"deepstack_visual_indexes {levels!r} is no list")
        known["deepstack_visual_indexes"] = tuple(levels)
        rope = vision.get("rope_parameters")
        rope = rope if isinstance(rope, dict) else {}
        if rope.get("rope_type") not in ROPE_TYPES:
            raise ValueError(f"rope_type {rope['rope_type']!r:.50} is none of {ROPE_TYPES[1:]}")
        if rope.get("rope_theta") is not None:
            known["rope_theta"] = rope["rope_theta"]
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        """The fields under their names in `vision_config`, which has no `rope_theta`."""
        known = asdict(self) | {"deepstack_visual_indexes": list(self.deepstack_visual_indexes)}
        del known["rope_theta"]
        return known

    @classmethod
    def from_pretrained(cls, model: str | Path, revision: str | None = None) -> "VisionConfig":
        """Read config.json of a local directory or a hub repository."""
        checkpoint = open_checkpoint(model, revision)
        checkpoint.file("config.json")  # or a ValueError
        return cls.from_dict(checkpoint.json("config.json") or {})


_LARGE: dict[str, Any] = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304}
_SMALL: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "deepstack_visual_indexes": (5, 11, 17),
}

# Published checkpoints by name, for random weights; a checkpoint's own config.json always wins.
GEOMETRIES: dict[str, VisionConfig] = {
    "2b": VisionConfig(**_SMALL, out_hidden_size=2048),
    "4b": VisionConfig(**_SMALL, out_hidden_size=2560),
    "8b": VisionConfig(**_LARGE, out_hidden_size=4096),
    "30b-a3b": VisionConfig(**_LARGE, out_hidden_size=2048),
    "32b": VisionConfig(**_LARGE, out_hidden_size=5120),
    "235b-a22b": VisionConfig(**_LARGE, out_hidden_size=4096),
    "qwen3.5-9b": VisionConfig(**_LARGE, out_hidden_size=4096, deepstack_visual_indexes=()),
    "qwen3.5-35b-a3b": VisionConfig(**_LARGE, out_hidden_size=2048, deepstack_visual_indexes=()),
    "tiny": VisionConfig(
        depth=4,
        hidden_size=144,
        intermediate_size=304,
        num_heads=2,
        out_hidden_size=128,
        deepstack_visual_indexes=(0, 1, 2),
    ),
}

"""The manager's configuration, with vLLM's names and defaults, and the budgets it stands for."""

import json
from dataclasses import dataclass, fields
from typing import Any

# Names that vLLM gave the same fields in later releases.
_ALIASES = {
    "encoder_cudagraph_max_vision_items_per_batch": "encoder_cudagraph_max_images_per_batch",
}


@dataclass(frozen=True)
class CompilationConfig:
    """How encoder graphs are captured; the names are those of vLLM's `--compilation-config`.

    Attributes:
        cudagraph_mm_encoder: capture and replay graphs; False runs everything eagerly.
        encoder_cudagraph_token_budgets: capacities in tokens; empty infers powers of two over the
            model's range, its maximum included. Also a name: "ladder" (four steps an octave) or
            "ladder:STEPS".
        encoder_cudagraph_max_images_per_batch: items in one replay; 0 infers max_budget //
            min_budget, never above the smallest budget.
            `encoder_cudagraph_max_vision_items_per_batch` is the same.
        encoder_cudagraph_max_frames_per_batch: attention sequences (frames) in one replay; None: no
            limit where the attention backend does not pay for empty ones, else the number of items
            and at least 64.

    Raises:
        ValueError: an impossible value, naming the field and the numbers.
    """

    cudagraph_mm_encoder: bool = False
    encoder_cudagraph_token_budgets: tuple[int, ...] | str = ()
    encoder_cudagraph_max_images_per_batch: int = 0
    encoder_cudagraph_max_frames_per_batch: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.cudagraph_mm_encoder, bool):
            raise ValueError(
                f"cudagraph_mm_encoder: {self.cudagraph_mm_encoder!r} is neither true nor false"
            )
        budgets = self.encoder_cudagraph_token_budgets
        if not isinstance(budgets, str | list | tuple):
            raise ValueError(
                f"encoder_cudagraph_token_budgets: {budgets!r} is no list of capacities"
            )
        if isinstance(budgets, str):
            check_name(budgets)
        else:
            for budget in budgets:
                if not _is_count(budget) or budget < 1:
                    raise ValueError(
                        f"encoder_cudagraph_token_budgets: {budget!r} in {list(budgets)} is no "
                        f"positive integer"
                    )
            object.__setattr__(self, "encoder_cudagraph_token_budgets", tuple(sorted(set(budgets))))
        items = self.encoder_cudagraph_max_images_per_batch
        if not _is_count(items) or items < 0:
            raise ValueError(
                f"encoder_cudagraph_max_images_per_batch: {items!r} is no integer of at least 0"
            )
        frames = self.encoder_cudagraph_max_frames_per_batch
        if frames is not None and (not _is_count(frames) or frames < 1):
            raise ValueError(
                f"encoder_cudagraph_max_frames_per_batch: {frames!r} is neither None nor an "
                f"integer of at least 1"
            )

    @classmethod
    def from_json(cls, value: str | dict[str, Any]) -> "CompilationConfig":
        """Read the JSON form, e.g. '{"cudagraph_mm_encoder": true}'.

        Raises:
            ValueError: bad JSON, or a field that does not exist here.
        """
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"the compilation config is not JSON: {error}: {value:.200}"
                ) from None
        if not isinstance(value, dict):
            raise ValueError(f"the compilation config must be a JSON object, got {value!r}")
        known = [field.name for field in fields(cls)]
        given: dict[str, Any] = {}
        for name, entry in value.items():
            target = _ALIASES.get(name, name)
            if target not in known:
                raise ValueError(
                    f"compilation config: no field {name!r}; fields are {', '.join(known)}"
                )
            if target in given:
                raise ValueError(f"compilation config: {name!r} and {target!r} are the same field")
            given[target] = entry
        return cls(**given)

    def to_json(self) -> str:
        """The JSON form, accepted by `from_json`."""
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True)
class Limits:
    """What packs may hold, after inference.

    Attributes:
        budgets: capacities in tokens, ascending.
        max_items: items in one replay.
        max_sequences: attention sequences in one replay.
    """

    budgets: tuple[int, ...]
    max_items: int
    max_sequences: int


def check_name(budgets: str) -> tuple[str, str]:
    """Split a named choice of budgets into name and argument.

    Raises:
        ValueError: no such choice.
    """
    name, _, argument = budgets.partition(":")
    steps = argument.isdecimal() and len(argument) < 10 and 0 < int(argument) < 1000
    known = {"powers_of_two": not argument, "ladder": steps or not argument}
    if not known.get(name):
        raise ValueError(
            f"encoder_cudagraph_token_budgets: {budgets!r} is none of 'powers_of_two', 'ladder', "
            f"'ladder:STEPS' (1 to 999)"
        )
    return name, argument


def powers_of_two(smallest: int, largest: int) -> tuple[int, ...]:
    """`smallest` doubled while it fits, and `largest` itself."""
    if not 0 < smallest <= largest:
        raise ValueError(f"budget range: smallest {smallest} must be in 1..largest {largest}")
    budgets = [smallest]
    while budgets[-1] * 2 <= largest:
        budgets.append(budgets[-1] * 2)
    if budgets[-1] < largest:
        budgets.append(largest)
    return tuple(budgets)


def infer_limits(
    config: CompilationConfig, budget_range: tuple[int, int], sequences_are_free: bool = False
) -> Limits:
    """Fill what the configuration leaves open from the model's budget range.

    A replay of the smallest budget must be able to hold the most items with one token each, so the
    number of items never exceeds the smallest budget.

    Raises:
        ValueError: more items asked for than the smallest budget has tokens.
    """
    budgets = config.encoder_cudagraph_token_budgets
    assert not isinstance(budgets, str)  # `resolve_budgets` was there before
    max_items = config.encoder_cudagraph_max_images_per_batch
    smallest, largest = budget_range
    if max_items > budgets[0]:
        raise ValueError(
            f"encoder_cudagraph_max_images_per_batch {max_items} is above the smallest budget "
            f"{budgets[0]}: every item has at least one token"
        )
    if max_items == 0:
        max_items = min(max(largest // smallest, 1), budgets[0])
    # A sequence has at least one token, so no more of them than tokens can ever be needed.
    needed = budgets[-1] if sequences_are_free else max(max_items, 64)
    max_sequences = config.encoder_cudagraph_max_frames_per_batch or needed
    return Limits(budgets, max_items, max_sequences)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

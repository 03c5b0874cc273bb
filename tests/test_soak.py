"""The soak of bench/soak.py, shortened, and what it judges."""

import json
import sys
from pathlib import Path

from vitgraph.bench import soak
from vitgraph.encoder import Qwen3VLVisionEncoder


def run(tmp_path: Path, monkeypatch) -> tuple[int, dict]:
    save = tmp_path / "soak.json"
    command = f"soak.py --requests 20 --threads 3 --geometry tiny --device cpu --save {save}"
    monkeypatch.setattr(sys, "argv", command.split())
    monkeypatch.setattr(soak, "CHECK_EVERY", 5)
    return soak.main(), json.loads(save.read_text())


def test_soak_passes(tmp_path, monkeypatch) -> None:
    status, result = run(tmp_path, monkeypatch)
    assert status == 0
    assert (result["requests"], result["checked"], result["wrong"]) == (20, 4, [])
    assert list(result["memory_bytes"]) == ["0", *map(str, range(2, 21, 2)), "end"]


def test_soak_finds_wrong_outputs(tmp_path, monkeypatch) -> None:
    """The eager encoder that is compared with answers twice what the manager's batches get."""
    forward = Qwen3VLVisionEncoder.forward

    def doubled(self, pixel_values, grid_thw, *args, **kwargs):
        outputs = forward(self, pixel_values, grid_thw, *args, **kwargs)
        return 2 * outputs if isinstance(grid_thw, list) else outputs

    monkeypatch.setattr(Qwen3VLVisionEncoder, "forward", doubled)
    status, result = run(tmp_path, monkeypatch)
    assert status == 1
    assert len(result["wrong"]) == 4


def test_a_thread_that_ends_fails_the_soak(tmp_path, monkeypatch) -> None:
    def fail(*_) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(soak.EncoderCudaGraphManager, "execute", fail)
    status, result = run(tmp_path, monkeypatch)
    assert status == 1
    assert "thread 0 ended: RuntimeError: no memory" in result["wrong"]


def test_an_interrupted_soak_ends_and_saves(tmp_path, monkeypatch) -> None:
    join, calls = soak.join_or_exit, []

    def interrupted(*arguments) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        join(*arguments)

    monkeypatch.setattr(soak, "join_or_exit", interrupted)
    _, result = run(tmp_path, monkeypatch)
    assert len(calls) == 2 and 0 <= result["requests"] < result["asked_for"] == 20


def test_memory_that_torch_keeps_for_later_is_not_held() -> None:
    start, end = {"used": 1000, "unused": 0}, {"used": 1500, "unused": 490}
    assert soak.is_flat({0: start, "end": end})
    assert not soak.is_flat({0: start, "end": end | {"unused": 470}})
    growing = {tenth: {"used": 1000 + tenth, "unused": tenth} for tenth in range(0, 1001, 100)}
    assert not soak.is_flat(growing | {"end": growing[1000]})

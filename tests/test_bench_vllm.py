"""The scripts that drive vLLM's engines, without vLLM: processes, lanes, what counts as equal."""

import argparse
import dataclasses
import os
import signal
import subprocess
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers

from vitgraph.bench import dummy_model, vllm_engine, vllm_inside, vllm_lanes, vllm_mm_processor
from vitgraph.encoder import GEOMETRIES, VisionConfig

ENGINE = """
    import json, os, sys, time
    spec = json.loads(sys.argv[sys.argv.index("--engine") + 1])
    print("INFO vitgraph serves", flush=True)
    seen = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "VITGRAPH_DISABLE")}
    def write(**more):
        with open(spec["output"], "w") as stream:
            json.dump(seen | more, stream)
    def beside(name):
        return os.path.join(os.path.dirname(spec["output"]), name + ".json")
    write()
    if spec["name"] == "fails":
        raise ValueError("no such thing")
    if spec["name"] == "hangs":
        time.sleep(60)
    alone = None
    if "alone" in spec:
        from vitgraph.bench import vllm_alone, vllm_lanes
        vllm_lanes.Recorder(spec["output"])
        while spec.get("beside") and not os.path.exists(beside(spec["beside"])):
            time.sleep(0.01)
        with vllm_alone.alone(spec["output"]):
            began = time.monotonic()
            time.sleep(spec["alone"])
            alone = began, time.monotonic()
            if spec["name"] == "dies alone":
                os._exit(1)
    ticks = []
    def waiting():
        for name in spec["until"]:
            if not os.path.exists(beside(name)):
                return True
            with open(beside(name)) as stream:
                if "complete" not in stream.read():
                    return True
    while "until" in spec and (len(ticks) < 2 or waiting()):
        ticks.append(time.monotonic())
        with open(beside("ticking"), "w"):
            pass
        time.sleep(0.01)
    ticks.append(time.monotonic())
    time.sleep(spec.get("sleep", 0))
    write(complete=True, ticks=ticks, alone=alone)
"""


@pytest.fixture
def script(tmp_path) -> str:
    path = tmp_path / "engine.py"
    path.write_text(textwrap.dedent(ENGINE))
    return str(path)


def run(script: str, units: list, tmp_path: Path, **options) -> tuple[dict, list[str]]:
    outcomes: dict = {}
    options = {"lanes": 1, "seconds": 100, "engine_seconds": 20} | options
    skipped = vllm_lanes.run_lanes(
        script,
        units,
        work=tmp_path,
        save=lambda spec, outcome: outcomes.update({spec["name"]: outcome}),
        **options,
    )
    return outcomes, skipped


def test_engines_that_are_compared_share_a_gpu(script, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    units = [
        [{"name": f"{unit} {tower}", "tower": tower, "sleep": 0.3} for tower in vllm_lanes.TOWERS]
        for unit in ("a", "b")
    ]
    outcomes, skipped = run(script, units, tmp_path, lanes=2)
    assert skipped == []
    gpus = {name: outcome["CUDA_VISIBLE_DEVICES"] for name, outcome in outcomes.items()}
    assert gpus["a vllm"] == gpus["a vitgraph"] != gpus["b vllm"] == gpus["b vitgraph"]
    assert outcomes["a vllm"]["VITGRAPH_DISABLE"] == "1"
    assert outcomes["a vitgraph"]["VITGRAPH_DISABLE"] == "0"
    assert "error" not in outcomes["b vllm"]
    assert outcomes["b vllm"]["log"] == ["INFO vitgraph serves"]
    with pytest.raises(ValueError, match="3 GPUs are asked for, 2 are visible"):
        run(script, units, tmp_path, lanes=3)


def test_some_engines_of_all(script, tmp_path) -> None:
    units = [[{"name": f"{unit} {tower}", "tower": tower} for tower in ("x", "y")] for unit in "ab"]
    outcomes, skipped = run(script, units, tmp_path, only=["b x", "a y"])
    assert (list(outcomes), skipped) == (["a y", "b x"], [])
    with pytest.raises(ValueError, match="--only 'c x' is none of a x, a y, b x, b y"):
        run(script, units, tmp_path, only=["a x", "c x"])


def test_what_an_engine_did_before_it_failed_is_kept(script, tmp_path) -> None:
    units = [[{"name": name, "tower": "vllm"} for name in ("fails", "hangs", "works")]]
    outcomes, _ = run(script, units, tmp_path, engine_seconds=2)
    assert outcomes["fails"]["error"] == "the engine's process ended early"
    assert outcomes["fails"]["faults"] == ["ValueError: no such thing"]
    assert outcomes["hangs"]["error"] == "stopped after 2 s"
    assert outcomes["hangs"]["CUDA_VISIBLE_DEVICES"] == "0"
    assert "error" not in outcomes["works"]


def test_engines_stand_still_while_another_is_timed(script, tmp_path) -> None:
    """Three at once on a GPU: one counts, two want to be alone; nobody counts meanwhile, and an
    engine that ends while it is alone does not leave the others asleep."""
    units = [
        [{"name": "counts", "tower": "vllm", "until": ["first", "second"]}],
        [
            {"name": name, "tower": "vllm", "alone": 0.5, "beside": "ticking"}
            for name in ("first", "second")
        ],
        [{"name": "dies alone", "tower": "vllm", "alone": 0.2}],
    ]
    outcomes, _ = run(script, units, tmp_path, at_once=3, engine_seconds=90)
    ticks = outcomes["counts"]["ticks"]
    (a0, a1), (b0, b1) = sorted(outcomes[name]["alone"] for name in ("first", "second"))
    assert ticks[0] < a0 < a1 <= b0 < b1 < ticks[-1]
    for began, ended in ((a0, a1), (b0, b1)):
        assert not any(began < tick < ended for tick in ticks)
    assert outcomes["dies alone"]["error"] == "the engine's process ended early"


def test_an_interrupted_run_leaves_no_engine(script, tmp_path) -> None:
    """SIGTERM, while one engine is alone and the other stands still."""
    units = [[{"name": "alone", "tower": "vllm", "alone": 60}, {"name": "hangs", "tower": "vllm"}]]
    timer = threading.Timer(4, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(script, units, tmp_path, at_once=2, engine_seconds=50)
    assert time.monotonic() - started < 20
    left = subprocess.run(["pgrep", "-f", script], capture_output=True, text=True).stdout
    assert left == ""


def test_nothing_is_asked_for(script, tmp_path) -> None:
    for options in ({"lanes": 0}, {"at_once": 0}):
        with pytest.raises(ValueError, match="none"):
            run(script, [[{"name": "works", "tower": "vllm"}]], tmp_path, **options)
    with pytest.raises(ValueError, match="asked for twice: works"):
        run(script, [[{"name": "works", "tower": "vllm"}] * 2], tmp_path)


def test_a_result_that_cannot_be_saved_costs_no_other(script, tmp_path) -> None:
    saved = []

    def save(spec: dict, outcome: dict) -> None:
        saved.append(spec["name"])
        if spec["name"] == "a":
            raise OSError("disk full")

    units = [[{"name": name, "tower": "vllm"} for name in "abc"]]
    with pytest.raises(OSError, match="disk full"):
        vllm_lanes.run_lanes(
            script, units, lanes=1, work=tmp_path, seconds=100, engine_seconds=20, save=save
        )
    assert saved == ["a", "b", "c"]


def test_no_engine_is_started_without_time(script, tmp_path) -> None:
    outcomes, skipped = run(script, [[{"name": "works", "tower": "vllm"}]], tmp_path, seconds=29)
    assert (outcomes, skipped) == ({}, ["works"])


def step(*pairs: tuple[int, float]) -> list:
    return [list(pair) for pair in pairs]


SURE, CLOSE, OTHER_WAY = (
    step((5, -0.1), (6, -3.0)),
    step((7, -0.70), (8, -0.75)),
    step((8, -0.70), (7, -0.72)),
)


@pytest.mark.parametrize(
    ("theirs", "verdict"),
    [
        ([SURE, CLOSE], "same"),
        ([SURE, OTHER_WAY], "tie at token 1, gaps 0.050 and 0.020"),
        ([SURE, step((8, -0.5), (7, -1.0))], "different at token 1, gaps 0.050 and 0.500"),
        ([SURE, step((9, -0.7), (7, -0.7))], "different at token 1, gaps inf and 0.000"),
        ([OTHER_WAY, CLOSE], "different at token 0, gaps inf and inf"),
    ],
    ids=["same", "tie", "far_apart", "another_token", "sure"],
)
def test_ties_are_not_differences(theirs, verdict) -> None:
    assert vllm_engine.compare_prompt([SURE, CLOSE], theirs) == verdict


def test_problems_are_named() -> None:
    outcome = {"tower": "Qwen3_VisionTransformer", "captured": True, "tower_is_replicated": False}
    outcome |= {"distinct_answers": 2, "asked_for_graphs": True}
    theirs = outcome | {"items": 5, "statistics_prompts": [(5, 0), (5, 0)]}
    ours = theirs | {"tower": "VitgraphQwen3_VisionTransformer", "tower_is_replicated": True}
    ours["statistics_prompts"] = [(3, 0), (2, 0)]
    errors = dict.fromkeys(vllm_engine.WORKLOADS, 0.01)
    pair = {"embedding_error": errors, "prompts": 2, "same": 1, "ties": ["t"], "different": []}
    assert vllm_engine.problems(pair, ours, theirs) == []
    assert vllm_engine.problems(pair, theirs, theirs) == ["not our tower: Qwen3_VisionTransformer"]
    empty = pair | {"embedding_error": {"a": 0.01}, "same": 0, "ties": ["t", "t"]}
    same_answers = ours | {"distinct_answers": 0}
    assert vllm_engine.problems(empty, same_answers, theirs | {"captured": False}) == [
        "ours: 0 answers to all prompts",
        "vLLM's: graphs were asked for, none captured",
        "graphs in one of them only",
        "1 of 9 workloads compared",
        "2 of 2 prompts are ties",
    ]
    busy = "vLLM's: something else ran on the GPU while it was timed"
    assert vllm_engine.problems(pair, ours, theirs | {"quiet": False}) == [busy]
    wrong = pair | {"embedding_error": errors | {"b": float("inf")}, "different": ["d"]}
    found = vllm_engine.problems(wrong, ours | {"statistics_prompts": [(3, 0), (1, 1)]}, theirs)
    assert found == [
        "ours: hits and misses [(3, 0), (1, 1)], items 5",
        "embeddings differ by inf",
        "tokens of 1 of 2 prompts differ",
    ]


def test_vllms_triton_attention_comes_last_on_one_gpu() -> None:
    args = argparse.Namespace(
        backends=vllm_engine.BACKENDS, modes=("graph", "eager"), towers=vllm_lanes.TOWERS, ranks=1,
        gpus=1, one_gpu=False,
    )  # fmt: skip
    names = [spec["name"] for unit in vllm_engine.units(args) for spec in unit]
    assert len(set(names)) == 12
    assert names[:2] == ["FLASH_ATTN graph vllm", "FLASH_ATTN graph vitgraph"]
    assert names[-2:] == ["TRITON_ATTN graph vllm", "TRITON_ATTN eager vllm"]
    args.gpus = 2  # what is compared stays on one of them
    assert all(len(unit) == 2 for unit in vllm_engine.units(args))


def test_table_of_vllms_tool() -> None:
    def times(mean: float) -> dict:
        forward = {"mean": mean, "median": mean - 1, "p99.0": mean + 9}
        return {"default mix": {"encoder_forward_ms": forward}}

    result = {
        "header": {"gpu": "H200"},
        "engines": {
            "FLASH_ATTN graph vllm": {"mixes": times(8.0)},
            "FLASH_ATTN graph vitgraph": {"mixes": times(4.0), "tower": "Vitgraph"},
            "FLASH_ATTN eager vitgraph": {"error": "stopped after 150 s", "faults": ["why"]},
            "FLASH_ATTN eager vllm": {"quiet": False},
        },
        "not_run": ["FLASHINFER eager vllm"],
    }
    table = vllm_mm_processor.markdown(result)
    row = "| default mix | FLASH_ATTN | graph | 8.00 | 7.00 | 17.00 | 4.00 | 3.00 | 13.00 | 2.00 |"
    assert row in table
    assert "FLASH_ATTN eager vitgraph: stopped after 150 s\n\nwhy" in table.replace(
        "\nwhy", "\n\nwhy"
    )
    assert "no time for: FLASHINFER eager vllm" in table
    assert "FLASH_ATTN eager vllm: something else ran on the GPU" in table


@pytest.mark.parametrize("family", dummy_model.FAMILIES)
def test_a_dummy_checkpoint_is_a_model_of_its_family(family, tmp_path, monkeypatch) -> None:
    """Its tower is the geometry's, and the engine's random weights are the model's."""
    levels = () if "3_5" in family else (0, 2)
    tower = dataclasses.replace(GEOMETRIES["tiny"], deepstack_visual_indexes=levels)
    monkeypatch.setitem(GEOMETRIES, "small", tower)
    folder = dummy_model.write_model(tmp_path, "small", family)
    assert VisionConfig.from_pretrained(folder) == tower
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.architectures == [family] and type(config) is dummy_model.FAMILIES[family]
    model = getattr(transformers, family)(config)
    weights = dict(vllm_inside.random_checkpoint(config, torch.device("cpu")))
    model.load_state_dict(weights)
    norm = weights["model.language_model.norm.weight"].float().mean()
    assert abs(norm - (0 if "3_5" in family else 1)) < 0.01  # one, as the layer counts it


def test_a_dummy_with_deepstack_is_no_qwen3_5(tmp_path) -> None:
    with pytest.raises(ValueError, match="geometry 8b has deepstack, Qwen3_5"):
        dummy_model.write_model(tmp_path, "8b", "Qwen3_5ForConditionalGeneration")

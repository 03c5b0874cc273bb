"""Tables and pictures of benchmark results."""

import sys
import types

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from vitgraph.bench import pictures, report
from vitgraph.bench.serving import add_scaling, publish, sheets_of

NAMES = ["vitgraph eager", "vitgraph graph", "vllm FLASH_ATTN eager", "vllm FLASH_ATTN graph"]
HEADER = {
    "gpu": "NVIDIA H200",
    "driver": "580.95.05",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "vllm": "0.26.0",
    "commit": "abcdef0",
    "date": "2026-11-30",
    "geometry": "8b",
    "dtype": "bfloat16",
}


def numbers(scale: float) -> dict:
    samples = [scale * (1 + n / 100) for n in range(100)]
    ours = [1 + n / 100 for n in range(100)]
    return (
        report.summarise(samples)
        | report.ratio(samples, ours)
        | {"error": 0.01, "wrong": False, "percentiles_ms": report.percentiles_of(samples)}
    )


@pytest.fixture
def encoder_result() -> dict:
    systems = {name: numbers(scale) for name, scale in zip(NAMES, (8, 1, 16, 1.5), strict=True)}
    row = {"tokens": 100, "sequences": 1, "floor_ms": 0.5, "systems": systems}
    wide = row | {"tokens": 2000, "sequences": 20}
    about = {name: {"capture_s": 1.0, "memory_mib": 10.0} for name in NAMES}
    return HEADER | {
        "baseline": "vitgraph graph",
        "systems": about | {"transformers eager": {"missing": "ImportError: none"}},
        "workloads": {"1 x (1,20,20)": row, "20 x (1,20,20)": wide},
    }


@pytest.fixture
def serving_result() -> dict:
    def experiment(title: str, speed: float, **more) -> dict:
        scales = zip(NAMES, (8, 1, 16, 1.5), strict=True)
        systems = {name: numbers(scale / speed) for name, scale in scales}
        counts = {"requests": 100, "warm_up": 10, "complete": True}
        errors = dict.fromkeys(NAMES, 0.01)
        baseline = {"baseline": "vitgraph graph", "title": title}
        return {"systems": systems, "errors": errors, **counts, **baseline, **more}

    experiments = {
        "images": experiment("One image a request", 1),
        "parallel 1": experiment("20 images, 1 rank", 1, ranks=1),
        "parallel 4": experiment("20 images, 4 ranks", 3.4, ranks=4),
    }
    return HEADER | {"systems": {}, "experiments": experiments, "not_run": []}


def test_statistics() -> None:
    one = report.summarise([float(n) for n in range(101)])
    assert (one["mean_ms"], one["p50_ms"], one["p99_ms"]) == (50, 50, 99)
    assert one["quartiles_ms"] == [25, 75]
    assert report.summarise([3.0])["p99_ms"] == 3
    paired = report.ratio([2, 8, 3], [1, 2, 3])
    assert paired == {"ratio": 2, "ratio_quartiles": [1.5, 3]}


def test_encoder_tables(encoder_result) -> None:
    times, ratios, details, capture = report.encoder_sheets(encoder_result)
    assert times.head == ["workload", "tokens", *NAMES, "floor"]
    assert times.rows[0][:4] == ["1 x (1,20,20)", "100", "11.96", "1.50"]
    assert ratios.rows[1][-1] == "1.50 (1.50-1.50)"
    assert len(details.rows) == 8 and len(capture.rows) == 4
    text = times.markdown().splitlines()
    assert text[2].count("|") == text[3].count("|") == text[4].count("|") == 8
    title = report.title_of(encoder_result)
    for part in ("H200", "driver 580.95.05", "torch 2.11.0", "vllm 0.26.0", "commit abcdef0"):
        assert part in title
    lines = report.missing_lines(encoder_result["systems"])
    assert lines == ["not here: transformers eager: ImportError: none"]


def test_scaling_and_what_graphs_save(serving_result, capsys, tmp_path) -> None:
    from rich.console import Console

    experiments = serving_result["experiments"]
    add_scaling(experiments)
    assert experiments["parallel 4"]["systems"]["vitgraph graph"]["speedup"] == pytest.approx(3.4)
    assert experiments["parallel 4"]["systems"]["vitgraph graph"]["efficiency"] == pytest.approx(
        0.85
    )
    one = experiments["parallel 4"]
    (sheet,) = report.serving_sheets(one)
    assert sheet.rows[1][-3:] == ["+87.5%", "3.40", "0.85"]
    assert "graphs save (mean)" in sheet.head
    (on_a_cpu,) = sheets_of(serving_result | {"gpu": "none", "experiments": {"one": one}})
    assert "packing saves (no graphs on a CPU)" in on_a_cpu.head
    assert publish(serving_result, tmp_path / "a.json", Console()) == 0
    experiments["images"]["errors"]["vllm FLASH_ATTN graph"] = float("nan")
    assert publish(serving_result, None, Console()) == 1
    assert "WRONG: images: vllm FLASH_ATTN graph" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["encoder", "serving"])
def test_nothing_in_the_picture_is_cut(kind, encoder_result, serving_result) -> None:
    result = encoder_result if kind == "encoder" else serving_result
    figure = getattr(pictures, f"{kind}_picture")(result)
    FigureCanvasAgg(figure).draw()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
    for axes in figure.axes:
        if axes.get_visible():
            assert "ms" in axes.get_ylabel() + axes.get_xlabel() or "times" in axes.get_xlabel()
            labels = {text.get_text().partition(":")[0] for text in axes.get_legend().get_texts()}
            assert {"vitgraph eager", "vllm FLASH_ATTN graph"} <= labels


def test_versions_are_those_of_the_modules_in_use(monkeypatch) -> None:
    """A newer triton put before the installed one was reported as the installed one."""
    modules = {"triton": "3.8.0", "vllm": "0.33.0", "flashinfer": None}
    for name, version in modules.items():
        module = types.ModuleType(name)
        if version:
            module.__version__ = version
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    about = report.header(torch.device("cpu"))
    assert {name: about[name] for name in modules} == modules | {"flashinfer": "unknown"}
    assert about["torch"] == torch.__version__ and "transformers" not in about
    assert "triton 3.8.0, vllm 0.33.0" in report.title_of(about)


def test_the_assembler_of_the_gpu_is_named(monkeypatch) -> None:
    compiler = pytest.importorskip("triton.backends.nvidia.compiler", reason="needs Triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    tools = {90: "12.9", 100: "13.1"}
    monkeypatch.setattr(
        compiler, "get_ptxas", lambda arch: types.SimpleNamespace(version=tools[arch])
    )
    assert report._ptxas(None) == "12.9"
    monkeypatch.delattr(compiler, "get_ptxas")
    assert report._ptxas(None) == "unknown"

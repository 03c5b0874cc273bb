"""bench/vllm_serve.py without vLLM: the server, the client and what is read off them."""

import json
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from vitgraph.bench import vllm_inside, vllm_lanes, vllm_mm_processor, vllm_serve

# As much of vLLM as the script calls: the server tells how it was started, the client what it read.
STAND_IN = {
    "__init__": "__version__ = '0.33.0'",
    "utils.argparse_utils": "from argparse import ArgumentParser as FlexibleArgumentParser",
    "benchmarks.serve": """
        import json, urllib.request
        def add_cli_args(parser):
            for name in ("base-url", "model", "max-concurrency", "num-prompts", "extra-body"):
                parser.add_argument(f"--{name}")
            known = parser.parse_known_args
            parser.parse_args = lambda words: known(words)[0]
        def main(args):
            with urllib.request.urlopen(args.base_url + "/health") as answer:
                answer.read()
            ttft = float(args.max_concurrency)
            failed = int(args.model.endswith("failing"))
            return {
                "mean_ttft_ms": ttft, "median_ttft_ms": ttft, "p99_ttft_ms": 2 * ttft,
                "request_throughput": 0.5, "completed": int(args.num_prompts), "failed": failed,
            }
    """,
    "entrypoints.cli.main": """
        import http.server, os, sys
        from importlib.metadata import entry_points
        if sys.argv[2].endswith("ending"):
            raise SystemExit(3)
        plugins = [e.name for e in entry_points(group="vllm.general_plugins")]
        print("Using V2 Model Runner", flush=True)
        if "vitgraph" in plugins and os.environ["VITGRAPH_DISABLE"] == "0":
            print("vitgraph serves the vision tower of all", flush=True)
        class Healthy(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                if self.path == "/metrics":
                    sample = b'vitgraph_encoder_items_total{served="graph"} 7.0'
                    self.wfile.write(b"vllm:num_requests 1\\n" + sample + b"\\n")
        port = int(sys.argv[sys.argv.index("--port") + 1])
        http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
    """,
}


@pytest.fixture
def measure(tmp_path):
    """Run the script; its exit status, what it printed and saved."""
    for name, source in STAND_IN.items():
        path = tmp_path.joinpath("path", "vllm", *name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))

    def run(model: str) -> tuple[int, str, dict]:
        (tmp_path / model).mkdir()
        save = tmp_path / "serve.json"
        options = ["--model", str(tmp_path / model), "--requests", "2", "--concurrency", "1", "4"]
        command = [sys.executable, vllm_serve.__file__, *options, "--save", str(save)]
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "path")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.stderr == ""
        return done.returncode, done.stdout, json.loads(save.read_text())

    return run


def test_both_towers_are_served_and_measured(measure) -> None:
    status, printed, result = measure("model")
    assert status == 0
    engines = result["engines"]
    assert [engines[f"FLASH_ATTN graph {t}"]["tower"] for t in vllm_lanes.TOWERS] == [
        "vLLM's",
        "Vitgraph",
    ]
    mixes = engines["FLASH_ATTN graph vitgraph"]["mixes"]
    assert [one["completed"] for one in mixes.values()] == [2, 2, 8, 8]
    counters = engines["FLASH_ATTN graph vitgraph"]["metrics"]
    assert counters == {'vitgraph_encoder_items_total{served="graph"}': 7.0}
    assert result["header"]["vllm"] == "0.33.0" and "model runner V2" in printed
    row = "| 20 x 336x336, 4 at once | FLASH_ATTN | graph | vitgraph | 4.00 | 4.00 | 8.00 | 0.50 |"
    assert row in printed
    left = subprocess.run(["pgrep", "-f", "cli.main serve"], capture_output=True, text=True).stdout
    assert left == ""


@pytest.mark.parametrize(
    ("model", "reason"),
    [("failing", "4 requests failed"), ("ending", "vllm serve ended with status 3")],
)
def test_failures_are_named(measure, model, reason) -> None:
    status, printed, _ = measure(model)
    assert status == 1 and reason in printed


def test_only_releases_without_graphs_there_get_the_older_runner() -> None:
    older = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    for release, expected in (("0.26.0", older), ("0.27.1+cpu", older), ("0.28.0", {})):
        assert vllm_lanes.runner_environment(release) == expected
    assert vllm_lanes.runner_environment("1.0.0rc1") == {}


def test_who_serves_is_read_off_the_log(tmp_path) -> None:
    (log := tmp_path / "log").write_text("INFO vitgraph leaves the tower alone\n")
    assert vllm_serve.describe(log) == {"runner": "V1", "tower": "vLLM's"}
    serves = "vitgraph serves the vision tower of Qwen3VLForConditionalGeneration\n"
    log.write_text(f"{serves}Using V2 Model Runner\n")
    assert vllm_serve.describe(log) == {"runner": "V2", "tower": "Vitgraph"}
    log.write_text(f"{serves}vitgraph: after loading, int8 weights: vLLM's own tower serves\n")
    assert vllm_serve.describe(log)["tower"] == "vLLM's"


def test_a_tower_that_declined_fails_the_run() -> None:
    engines = {"A graph vllm": {"tower": "Qwen3"}, "A graph vitgraph": {"tower": "vLLM's: int8"}}
    assert vllm_mm_processor.declined(engines) == {"A graph vitgraph": "vLLM's: int8"}
    assert not vllm_mm_processor.declined({"A graph vitgraph": {"tower": "VitgraphQwen3"}})


@pytest.mark.parametrize("manager", [None, object()], ids=["eager", "graphs"])
def test_both_model_runners_are_described(manager) -> None:
    visual = torch.nn.Linear(1, 1)
    visual.device = torch.device("cpu")
    model = SimpleNamespace(visual=visual)
    first = type("Runner", (), {"__module__": "vllm.v1.worker.gpu_model_runner"})()
    first.encoder_cudagraph_manager = manager
    second = type("Runner", (), {"__module__": "vllm.v1.worker.gpu.model_runner"})()
    encoder_runner = SimpleNamespace(cudagraph_manager=manager)
    second.model_state = SimpleNamespace(encoder_runner=encoder_runner)
    for runner, name in ((first, "V1"), (second, "V2")):
        runner.get_model = lambda: model
        found = vllm_inside.describe(SimpleNamespace(model_runner=runner))
        assert (found["runner"], found["captured"]) == (name, manager is not None)
        assert found["tower"] == "Linear" and found["header"]["gpu"] == "none"

"""`vllm serve` under vLLM's own `vllm bench serve`, with its tower and with ours.

    python -m vitgraph.bench.vllm_serve [--requests 30] [--concurrency 1 8] [--save FILE]

Time to first token (mean, P50, P99) and requests a second as a client sees them, for the requests
of vllm_mm_processor.py: 20 images of 336x336, and one image of 256x256 or 1280x720. They hold what
a server does besides encoding: images are decoded and resized on the host, the prompt is read by
the language model, of which the dummy checkpoint has few layers. Budgets and items are those of
vLLM's published experiment. The servers come up side by side; while one is measured the others
are stopped. The plugin's counters are read from `/metrics`. JSON, and Markdown beside it.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from vitgraph.bench.vllm_alone import alone
from vitgraph.bench.vllm_lanes import TOWERS, Recorder, plugin_is_installed, runner_environment
from vitgraph.bench.vllm_mm_processor import (
    MIXES,
    remarks,
    request_arguments,
    run_units,
    server_arguments,
    where,
)
from vitgraph.bench.vllm_script import parse_arguments
from vitgraph.graphs.metrics import PREFIX

NEW_TOKENS = 4
# Dummy weights may choose tokens that are not shown, which a client would wait for: always "a".
ALWAYS_SHOWN = {"allowed_token_ids": [64], "temperature": 0}
KEYS = ("mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "request_throughput")
SERVED = re.compile(r"vitgraph serves the vision tower of")
DECLINED = re.compile(r"vLLM's own (vision )?tower serves")  # perhaps only after loading


def main() -> int:
    """Run both servers; the exit status is 1 if one failed or was not run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=30, help="with 20 images; of others 4x")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], help="requests")
    args = parse_arguments(
        parser,
        run_server,
        backends=("FLASH_ATTN",),
        seconds=440,
        engine_seconds=420,  # one waits while the other is measured
        modes=("graph",),
    )
    return run_units(args, __file__, markdown, concurrency=args.concurrency)


def run_server(spec: dict) -> None:
    """In the engine's process: the server beside it, and vLLM's client."""
    record = Recorder(spec["output"])
    import vllm
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vitgraph.bench.report import header

    started = time.perf_counter()
    server, address = start(spec, runner_environment(vllm.__version__))
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    await_health(server, address)
    record(engine_up_s=time.perf_counter() - started, header=header())
    record(**describe(Path(spec["output"]).with_suffix(".log")))
    found: dict[str, dict] = {}
    with alone(spec["output"]) as quiet:
        record(quiet=quiet)
        for mix, (multiple, arguments) in MIXES.items():
            for concurrency in spec["concurrency"]:
                requests = multiple * spec["requests"]
                output = serve.main(
                    parser.parse_args(
                        [
                            *("--base-url", address, "--endpoint", "/v1/chat/completions"),
                            *("--backend", "openai-chat", "--model", spec["model"]),
                            *(*request_arguments(requests), *arguments),
                            *("--random-output-len", str(NEW_TOKENS)),
                            *("--max-concurrency", str(concurrency), "--seed", str(concurrency)),
                            *("--extra-body", json.dumps(ALWAYS_SHOWN)),
                            *("--percentile-metrics", "ttft", "--metric-percentiles", "99"),
                            "--disable-tqdm",
                        ]
                    )
                )
                found[f"{mix}, {concurrency} at once"] = {
                    key: output[key] for key in (*KEYS, "completed", "failed")
                }
                record(mixes=found, metrics=encoder_metrics(address))
    record(**describe(Path(spec["output"]).with_suffix(".log")))
    server.kill()
    if failed := sum(one["failed"] for one in found.values()):
        raise RuntimeError(f"{failed} requests failed")
    record(complete=True)


def start(spec: dict, environment: dict[str, str]) -> tuple[subprocess.Popen, str]:
    """The server, in this process's group, and its address."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    environment = os.environ | environment
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    if not plugin_is_installed():
        folder = Path(spec["output"]).with_suffix(".plugin")
        advertise_plugin(folder)
        path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", spec["model"]),
        *("--host", "127.0.0.1", "--port", str(port), *server_arguments(spec)),
        # Every request is encoded: the client repeats some to warm up.
        *("--mm-processor-cache-gb", "0", "--no-enable-prefix-caching"),
    ]
    return subprocess.Popen(command, env=environment), f"http://127.0.0.1:{port}"


def advertise_plugin(folder: Path) -> None:
    """What an installed vitgraph has, in a folder: for the processes that find it on their path."""
    about = folder / "vitgraph-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vitgraph\nVersion: 0\n")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nvitgraph = vitgraph.graphs.vllm_plugin:register\n"
    )


def await_health(server: subprocess.Popen, address: str) -> None:
    """Return when the server answers.

    Raises:
        RuntimeError: it ended instead.
    """
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"vllm serve ended with status {server.returncode}")


def encoder_metrics(address: str) -> dict[str, float]:
    """The plugin's counters, as the server's `/metrics` has them."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    samples = [line.rsplit(" ", 1) for line in lines if line.startswith(PREFIX)]
    return {name: float(value) for name, value in samples}


def describe(log: Path) -> dict[str, str]:
    """Which tower and which model runner serve, by the server's own lines, which this process's
    log has, too."""
    text = log.read_text(errors="replace")
    return {
        "runner": "V2" if "Using V2 Model Runner" in text else "V1",
        "tower": "Vitgraph" if SERVED.search(text) and not DECLINED.search(text) else "vLLM's",
    }


def markdown(result: dict) -> str:
    """The table, one row a kind of requests and tower."""
    head = ["mean", "P50", "P99", "requests/s"]
    lines = [
        f"Time to first token of `vllm bench serve`, ms; {where(result)}",
        "",
        f"| requests | attention | mode | tower | {' | '.join(head)} |",
        "|---|---|---|---|" + "---:|" * len(head),
    ]
    engines = result["engines"]
    pairs = dict.fromkeys(name.rpartition(" ")[0] for name in engines)
    mixes = dict.fromkeys(mix for one in engines.values() for mix in one.get("mixes", {}))
    for mix in mixes:
        for pair in pairs:
            for tower in TOWERS:
                one = engines.get(f"{pair} {tower}", {}).get("mixes", {}).get(mix)
                cells = [f"{one[key]:.2f}" if one else "-" for key in KEYS]
                lines.append(f"| {' | '.join([mix, *pair.split(), tower, *cells])} |")
    return "\n".join(lines + remarks(result)) + "\n"


if __name__ == "__main__":
    sys.exit(main())

"""vLLM's own `vllm bench mm-processor` with its tower and with ours: the encoder's time a request.

    python -m vitgraph.bench.vllm_mm_processor [--gpus 2] [--requests 40] [--save FILE]

Two kinds of requests: 20 images of 336x336, and vLLM's default mix, one image of 256x256 or
1280x720. `encoder_forward_ms` is what the engine measures around the encoder of a scheduling step,
synchronised before and after, divided by the requests of that step. All requests are submitted at
once. Budgets and items are those of vLLM's published experiment. JSON, and Markdown beside it.
"""

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from vitgraph.bench.vllm_alone import alone
from vitgraph.bench.vllm_lanes import (
    TOWERS,
    Recorder,
    compilation_options,
    memory_options,
    prepare_vllm,
    run_lanes,
)
from vitgraph.bench.vllm_script import parse_arguments, work_folder
from vitgraph.bench.workloads import SERVING_BUDGETS, SERVING_ITEMS

BACKENDS = ("FLASH_ATTN", "FLASHINFER")
LIMITS = json.dumps({"image": 20, "video": 0})
# name -> (requests for each of --requests, arguments of the tool)
MIXES = {
    "20 x 336x336": (
        1,
        [
            *("--random-mm-base-items-per-request", "20"),
            *("--random-mm-num-mm-items-range-ratio", "0"),
            *("--random-mm-bucket-config", "{(336, 336, 1): 1.0}"),
        ],
    ),
    "default mix": (4, ["--random-mm-base-items-per-request", "1"]),
}
COLUMNS = {"mean": "mean", "P50": "median", "P99": "p99.0"}


def main() -> int:
    """Run all engines; the exit status is 1 if one failed or was not run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=40, help="with 20 images; of others 4x")
    args = parse_arguments(parser, run_tool, backends=BACKENDS, seconds=440)
    return run_units(args, __file__, markdown)


def run_units(
    args: argparse.Namespace, script: str, table: Callable[[dict], str], **more: object
) -> int:
    """Run a script's engines with both towers, save after each, print the table.

    Args:
        more: what the engines are told beside `units`.

    Returns:
        1 if an engine failed, was not run or not alone, or vLLM's tower served in place of ours.
    """
    started = time.monotonic()
    result: dict = {"requests": args.requests, **more, "engines": {}, "not_run": []}

    def save(spec: dict | None = None, outcome: dict | None = None) -> None:
        if spec is not None:
            result["engines"][spec["name"]] = outcome
            result["header"] = outcome.pop("header", result.get("header"))
        if not args.save:
            return
        args.save.write_text(json.dumps(result, indent=1) + "\n")
        args.save.with_suffix(".md").write_text(table(result))

    with work_folder(args) as (work, model):
        result["not_run"] = run_lanes(
            script,
            units(args, model, **more),
            lanes=args.gpus,
            at_once=args.at_once,
            only=args.only,
            work=work,
            seconds=args.seconds - (time.monotonic() - started),
            engine_seconds=args.engine_seconds,
            save=save,
        )
    save()
    print(table(result))
    void = any("error" in o or not o.get("quiet", True) for o in result["engines"].values())
    return int(void or bool(declined(result["engines"])) or bool(result["not_run"]))


def units(args: argparse.Namespace, model: str, **more: object) -> list[list[dict]]:
    """vLLM's tower and ours, for every mode and backend."""
    return [
        [
            {
                "name": f"{backend} {mode} {tower}",
                "backend": backend,
                "graphs": mode == "graph",
                "tower": tower,
                "model": model,
                "requests": args.requests,
                "budgets": SERVING_BUDGETS,
                "items": SERVING_ITEMS,
                **more,
            }
            for tower in TOWERS
        ]
        for mode, backend in itertools.product(args.modes, args.backends)
    ]


def server_arguments(spec: dict) -> list[str]:
    """Of `vllm serve` and of the tool, which builds the same engine."""
    memory = memory_options(spec["at_once"]).items()
    return [
        *("--load-format", "dummy", "--max-model-len", "16384"),
        *("--max-num-batched-tokens", "8192", "--limit-mm-per-prompt", LIMITS),
        *(word for k, v in memory for word in (f"--{k.replace('_', '-')}", str(v))),
        *("--mm-encoder-attn-backend", spec["backend"]),
        *("--compilation-config", json.dumps(compilation_options(spec))),
    ]


def request_arguments(requests: int) -> list[str]:
    """Of vLLM's benchmarks: so many random requests after some to warm up."""
    return [
        *("--dataset-name", "random-mm", "--random-mm-limit-mm-per-prompt", LIMITS),
        *("--random-input-len", "32", "--num-prompts", str(requests)),
        *("--num-warmups", str(max(2, requests // 8))),
    ]


def run_tool(spec: dict) -> None:
    """In the engine's process: the tool's `main` for every mix, on one engine."""
    record = Recorder(spec["output"])
    record(registered_by=prepare_vllm())
    import vllm
    from vllm.benchmarks import mm_processor
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vitgraph.bench.vllm_inside import describe

    if not hasattr(mm_processor.pd, "__version__"):  # its table is printed with pandas
        rows = SimpleNamespace(to_string=lambda **_: "")
        mm_processor.pd = SimpleNamespace(DataFrame=lambda *_: rows)
    parser = FlexibleArgumentParser()
    mm_processor.add_cli_args(parser)
    engines: list = []
    timing = contextlib.ExitStack()
    build = vllm.LLM.from_engine_args

    def build_once(engine_args: object) -> object:
        if not engines:
            started = time.perf_counter()
            engines.append(build(engine_args))
            engine_up_s = time.perf_counter() - started
            record(engine_up_s=engine_up_s, **engines[0].collective_rpc(describe)[0])
            record(quiet=timing.enter_context(alone(spec["output"])))
        return engines[0]

    vllm.LLM.from_engine_args = build_once
    milliseconds = {}
    for mix, (multiple, arguments) in MIXES.items():
        tool_output = Path(spec["output"]).with_suffix(".tool.json")
        requests = multiple * spec["requests"]
        mm_processor.main(
            parser.parse_args(
                [
                    *("--model", spec["model"], *server_arguments(spec)),
                    *(*request_arguments(requests), "--random-output-len", "1", *arguments),
                    *("--metric-percentiles", "50,90,99", "--output-json", str(tool_output)),
                    "--disable-tqdm",
                ]
            )
        )
        output = json.loads(tool_output.read_text())
        statistics = output["mm_processor_stats"]
        milliseconds[mix] = {
            "encoder_forward_ms": statistics["encoder_forward_ms"],
            "preprocessor_total_ms": statistics.get("preprocessor_total_ms"),
            "completed": output["completed"],
            "failed": output["failed"],
        }
        record(mixes=milliseconds)
    timing.close()
    record(complete=True)


def markdown(result: dict) -> str:
    """The table, one row a kind of requests, backend and mode; ms, and vLLM's over ours."""
    head = [f"vLLM {c}" for c in COLUMNS] + [f"ours {c}" for c in COLUMNS] + ["mean ratio"]
    lines = [
        f"`encoder_forward_ms` of `vllm bench mm-processor`; {where(result)}",
        "",
        f"| requests | attention | mode | {' | '.join(head)} |",
        "|---|---|---|" + "---:|" * len(head),
    ]
    engines = result["engines"]
    pairs = dict.fromkeys(name.rpartition(" ")[0] for name in engines)
    for mix, pair in itertools.product(MIXES, pairs):
        towers = [engines.get(f"{pair} {t}", {}).get("mixes", {}).get(mix) for t in TOWERS]
        times = [t["encoder_forward_ms"] if t else None for t in towers]
        cells = [f"{t[key]:.2f}" if t else "-" for t in times for key in COLUMNS.values()]
        ratio = f"{times[0]['mean'] / times[1]['mean']:.2f}" if all(times) else "-"
        lines.append(f"| {mix} | {' | '.join([*pair.split(), *cells, ratio])} |")
    return "\n".join(lines + remarks(result)) + "\n"


def where(result: dict) -> str:
    """Hardware, versions and vLLM's model runner in one line."""
    about = dict(result.get("header") or {})
    if runners := sorted({o["runner"] for o in result["engines"].values() if "runner" in o}):
        about["model runner"] = " and ".join(runners)
    return ", ".join(f"{key} {value}" for key, value in about.items())


def declined(engines: dict[str, dict]) -> dict[str, str]:
    """Engines that our tower was to serve and did not, and what served."""
    return {
        name: outcome["tower"]
        for name, outcome in engines.items()
        if name.endswith("vitgraph") and not outcome.get("tower", "Vitgraph").startswith("Vit")
    }


def remarks(result: dict) -> list[str]:
    """What is not in the table, and why."""
    lines = []
    for name, tower in declined(result["engines"]).items():
        lines += ["", f"{name}: served by {tower}, not by our tower"]
    for name, outcome in result["engines"].items():
        if not outcome.get("quiet", True):
            lines += ["", f"{name}: something else ran on the GPU, its times mean nothing"]
        if "error" in outcome:
            lines += ["", f"{name}: {outcome['error']}", *outcome.get("faults", [])]
    if result["not_run"]:
        lines += ["", f"no time for: {', '.join(result['not_run'])}"]
    return lines


if __name__ == "__main__":
    sys.exit(main())

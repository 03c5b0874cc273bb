"""vLLM's own vision tower against ours inside a real engine: same embeddings, same tokens, times.

    python -m vitgraph.bench.vllm_engine [--gpus 2] [--seconds 460] [--save bench/results/NAME.json]
    python -m vitgraph.bench.vllm_engine --gpus 2 --ranks 2 --backends FLASH_ATTN --modes graph

One engine for each attention backend, graphs on and off, vLLM's tower and ours; with --ranks, each
engine is tensor parallel, with every mm_encoder_tp_mode, and is also compared with one rank; with
--one-gpu the ranks share one GPU and exchange through the host (gloo), for which vLLM's own tower
has no graphs.
Weights, random and large enough to matter, and inputs are the same in all. What is compared with
vLLM's tower:

embeddings   relative error over the nine workloads of `vitgraph bench encoder`
tokens       greedy, 30 prompts that differ in their pictures only: 1 to 20 images, video, both.
             Two towers that round differently may swap two tokens that the language model finds
             equally likely: such a prompt is counted as a tie, not as the same, if each engine
             finds the other's token less likely than its own by less than TIE. vLLM's own backends
             are compared with each other in the same way, to say how often that happens to them.
hits         of the graphs, by vLLM's own statistics
milliseconds the encoder's call to its synchronised result, median of up to 20, as the model runner
             calls it: through the graph manager, or eagerly

The result is saved after every engine. vLLM 0.26 to 0.33; vLLM's CPU build runs the same with
--geometry tiny --backends TORCH_SDPA --modes eager. Qwen3.5 with --geometry qwen3.5-9b --family
Qwen3_5ForConditionalGeneration.
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

from vitgraph.bench.console import make_console
from vitgraph.bench.vllm_inside import measure_engine
from vitgraph.bench.vllm_lanes import TOWERS, run_lanes
from vitgraph.bench.vllm_script import parse_arguments, work_folder
from vitgraph.bench.workloads import WORKLOADS

BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
TP_MODES = ("data", "weights")
# Two bf16 evaluations of 27 layers that round in different places differ by about 1 %.
EMBEDDING_TOLERANCE = 0.03
# Nats: two tokens, each known to 0.19 (the largest difference that was seen between two engines'
# logprobs of one token). Logits have a standard deviation of about 2, in steps of 0.03 to 0.06.
TIE = 0.4


def units(args: argparse.Namespace) -> list[list[dict]]:
    """Engines that are compared stay together; the most telling come first. On one GPU vLLM's own
    Triton attention comes last: what it has launched runs for seconds after it was stopped."""
    tp_modes = args.tp_modes if args.ranks > 1 else ["weights"]
    found = [
        [
            _spec(backend, mode, args.ranks, tp_mode, tower, args.one_gpu)
            for tp_mode in tp_modes
            for tower in args.towers
        ]
        for mode in args.modes
        for backend in args.backends
    ]
    if args.ranks > 1:  # the tokens of many ranks are to be those of one
        found[0].append(_spec(args.backends[0], args.modes[0], 1, "weights", "vitgraph", False))
    elif args.gpus == 1:  # all are on one GPU, in any order
        slow = [[spec] for unit in found for spec in unit if _is_slow(spec)]
        return [[spec for spec in unit if not _is_slow(spec)] for unit in found] + slow
    return found


def _is_slow(spec: dict) -> bool:
    return (spec["backend"], spec["tower"]) == ("TRITON_ATTN", "vllm")


def _spec(backend: str, mode: str, ranks: int, tp_mode: str, tower: str, one_gpu: bool) -> dict:
    parallel = f"{ranks} ranks {tp_mode} " if ranks > 1 else ""
    return {
        "name": f"{backend} {mode} {parallel}{tower}",
        "backend": backend,
        "graphs": mode == "graph",
        "ranks": ranks,
        "tp_mode": tp_mode,
        "tower": tower,
        "one_gpu": one_gpu,
    }


def main() -> int:
    """Run all engines; the exit status is 1 if a comparison failed or an engine did."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of one engine")
    parser.add_argument("--one-gpu", action="store_true", help="which all its ranks share")
    parser.add_argument("--tp-modes", nargs="+", choices=TP_MODES, default=list(TP_MODES))
    parser.add_argument("--towers", nargs="+", choices=TOWERS, default=list(TOWERS))
    args = parse_arguments(parser, measure_engine, backends=BACKENDS, seconds=460)
    result: dict = {"engines": {}, "comparisons": {}, "others": {}, "not_run": []}

    def save(spec: dict | None = None, outcome: dict | None = None) -> None:
        if spec is not None:
            result["engines"][spec["name"]] = outcome
            result["header"] = outcome.pop("header", result.get("header"))
            result["comparisons"] = compare_towers(result["engines"], work)
        if args.save:
            args.save.write_text(json.dumps(without_logprobs(result), indent=1) + "\n")

    with work_folder(args) as (work, model):
        gpus_per_engine = 1 if args.one_gpu else args.ranks
        engines = units(args)
        for spec in itertools.chain(*engines):
            spec["model"] = model
        result["not_run"] = run_lanes(
            __file__,
            engines,
            lanes=max(1, args.gpus // gpus_per_engine),
            gpus_per_lane=gpus_per_engine,
            at_once=args.at_once,
            only=args.only,
            work=work,
            seconds=args.seconds - (time.monotonic() - started),
            engine_seconds=args.engine_seconds,
            save=save,
        )
        result["others"] = compare_others(result["engines"], work)
    save()
    print_result(result)
    failed = any("error" in outcome for outcome in result["engines"].values())
    wrong = any(pair["problems"] for pair in result["comparisons"].values())
    return int(failed or wrong or bool(result["not_run"]))


def compare_towers(engines: dict[str, dict], work: Path) -> dict[str, dict]:
    """Ours with vLLM's, for every backend and mode that both have results of."""
    pairs = {}
    measured = _measured(engines, work)
    for name in measured:
        other = name.replace("vitgraph", "vllm")
        if name != other and other in measured:
            pair = compare(name, other, engines, work)
            pair["problems"] = problems(pair, engines[name], engines[other])
            pairs[name.removesuffix(" vitgraph")] = pair
    return pairs


def compare_others(engines: dict[str, dict], work: Path) -> dict[str, dict]:
    """vLLM's own towers with each other, and many ranks with one."""
    pairs = {}
    names = sorted(_measured(engines, work), key=lambda name: "ranks" not in name)
    for first, second in itertools.combinations(names, 2):
        both_vllms = first.endswith("vllm") and second.endswith("vllm")
        if both_vllms or ("ranks" in first and "ranks" not in second):
            pairs[f"{first} - {second}"] = compare(first, second, engines, work)
    return pairs


def without_logprobs(result: dict) -> dict:
    """What is saved: of every prompt the tokens, in one line; the comparisons have the rest."""
    engines = {
        name: outcome
        | {"tokens": [" ".join(str(step[0][0]) for step in a) for a in outcome.get("tokens", [])]}
        for name, outcome in result["engines"].items()
    }
    return result | {"engines": engines}


def _measured(engines: dict[str, dict], work: Path) -> list[str]:
    return [name for name in engines if _embeddings(name, work, 0).exists()]


def _embeddings(name: str, work: Path, rank: int) -> Path:
    return work / f"{name.replace(' ', '-')}.rank{rank}.pt"


def compare(first: str, second: str, engines: dict[str, dict], work: Path) -> dict:
    """Embeddings (of every rank), tokens and times of two engines."""
    import torch

    from vitgraph.bench.exactness import relative_error

    reference = torch.load(_embeddings(second, work, 0))
    errors: dict[str, float] = {}
    for rank in itertools.takewhile(lambda r: _embeddings(first, work, r).exists(), range(64)):
        for workload, rows in torch.load(_embeddings(first, work, rank)).items():
            if workload in reference:
                error = relative_error(rows, reference[workload])
                errors[workload] = max(error, errors.get(workload, 0.0))
    one, other = engines[first], engines[second]
    prompts = [
        compare_prompt(*answers)
        for answers in zip(one.get("tokens", []), other.get("tokens", []), strict=False)
    ]
    times, theirs = one.get("milliseconds", {}), other.get("milliseconds", {})
    return {
        "embedding_error": errors,
        "prompts": len(prompts),
        "same": sum(p == "same" for p in prompts),
        "ties": [p for p in prompts if p.startswith("tie")],
        "different": [p for p in prompts if p.startswith("different")],
        "logprob_noise": max(map(noise, one.get("tokens", []), other.get("tokens", [])), default=0),
        "speedup": {w: theirs[w] / ms for w, ms in times.items() if w in theirs},
    }


def compare_prompt(mine: list, theirs: list) -> str:
    """Tokens of one prompt; each step is [[token, logprob], ...], the chosen one first."""
    for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if a[0][0] == b[0][0]:
            continue
        chosen = a[0][0], b[0][0]
        gaps = [
            steps[0][1] - dict(steps).get(other, float("-inf"))
            for steps, other in ((a, chosen[1]), (b, chosen[0]))
        ]
        kind = "tie" if max(gaps) < TIE else "different"
        return f"{kind} at token {step}, gaps {gaps[0]:.3f} and {gaps[1]:.3f}"
    return "same"


def noise(mine: list, theirs: list) -> float:
    """Largest difference of the chosen token's logprob, as long as the tokens are the same."""
    same = itertools.takewhile(
        lambda ab: ab[0][0][0] == ab[1][0][0], zip(mine, theirs, strict=True)
    )
    return max((abs(a[0][1] - b[0][1]) for a, b in same), default=0.0)


def problems(pair: dict, ours: dict, theirs: dict) -> list[str]:
    """What contradicts that both towers do the same; empty if nothing does."""
    found = []
    for whose, outcome in (("ours", ours), ("vLLM's", theirs)):
        if "error" in outcome:
            found.append(f"{whose}: {outcome['error']}")
        elif outcome.get("asked_for_graphs", outcome["captured"]) != outcome["captured"]:
            found.append(f"{whose}: graphs were asked for, none captured")
        elif not outcome.get("quiet", True):
            found.append(f"{whose}: something else ran on the GPU while it was timed")
        elif outcome["distinct_answers"] < pair["prompts"] / 2:
            found.append(f"{whose}: {outcome['distinct_answers']} answers to all prompts")
        elif outcome["captured"]:
            counted = outcome["statistics_prompts"]  # of every rank: hits, misses
            ranks = counted if outcome["tower_is_replicated"] else counted[:1]
            if [sum(n) for n in zip(*ranks, strict=True)] != [outcome["items"], 0]:
                found.append(f"{whose}: hits and misses {counted}, items {outcome['items']}")
    if not ours.get("tower", "").startswith("Vitgraph"):
        found.append(f"not our tower: {ours.get('tower')}")
    if ours.get("captured") != theirs.get("captured"):
        found.append("graphs in one of them only")
    worst = max(pair["embedding_error"].values(), default=float("inf"))
    if worst > EMBEDDING_TOLERANCE:
        found.append(f"embeddings differ by {worst:.3f}")
    if len(pair["embedding_error"]) < len(WORKLOADS):
        found.append(f"{len(pair['embedding_error'])} of {len(WORKLOADS)} workloads compared")
    if len(pair["ties"]) > pair["prompts"] / 2:
        found.append(f"{len(pair['ties'])} of {pair['prompts']} prompts are ties")
    if pair["different"] or not pair["prompts"]:
        found.append(f"tokens of {len(pair['different'])} of {pair['prompts']} prompts differ")
    return found


def print_result(result: dict) -> None:
    """A table of times, then a line a comparison."""
    from rich.table import Table

    console = make_console()
    engines = result["engines"]
    names = list(dict.fromkeys(w for o in engines.values() for w in o.get("milliseconds", {})))
    view = Table(title="encoder, ms", box=None, title_justify="left")
    view.add_column("engine", no_wrap=True)
    for name in [*names, "up, s"]:
        view.add_column(name, justify="right")
    for name, outcome in engines.items():
        times = outcome.get("milliseconds", {})
        row = [f"{times[n]:.2f}" if n in times else "-" for n in names]
        view.add_row(name, *row, f"{outcome.get('engine_up_s', float('nan')):.0f}")
    console.print(view)
    for name, outcome in engines.items():
        if "error" in outcome:
            lines = [f"{name}: {outcome['error']}", *outcome.get("faults", [])]
            console.print("\n  ".join(lines), markup=False)
    for name, pair in [*result["comparisons"].items(), *result["others"].items()]:
        found = pair.get("problems")
        verdict = "for comparison" if found is None else "; ".join(found) or "equal"
        ratios = pair["speedup"].values()
        console.print(
            f"{name}: {verdict}; largest embedding error "
            f"{max(pair['embedding_error'].values(), default=float('nan')):.1e}; prompts "
            f"{pair['prompts']}, same {pair['same']}, ties {len(pair['ties'])}, logprobs within "
            f"{pair['logprob_noise']:.3f}; speedup "
            f"{min(ratios, default=0):.2f} to {max(ratios, default=0):.2f}",
            markup=False,
        )
    if result["not_run"]:
        console.print("no time for:", ", ".join(result["not_run"]))


if __name__ == "__main__":
    sys.exit(main())

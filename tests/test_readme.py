"""Every number in the documentation comes from a checked-in result."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import torch

from vitgraph.bench.workloads import WORKLOADS, image_grid
from vitgraph.encoder import Qwen3VLVisionEncoder, config
from vitgraph.graphs.linears import SAME, Linears
from vitgraph.graphs.metrics import FAMILIES
from vitgraph.graphs.vllm_plugin.names import ARCHITECTURES
from vitgraph.graphs.vllm_plugin.report import V2_SINCE
from vitgraph.graphs.vllm_plugin.tower import SharedEncoder
from vitgraph.kernels.launch import GLUON_RELEASES
from vitgraph.kernels.linear import PixelNormalization

TOWERS = ("vllm", "vitgraph")
FP8_MIN_PATCHES = Qwen3VLVisionEncoder.fp8_min_patches  # tests have another
ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BENCH = (ROOT / "bench" / "README.md").read_text()
GRAPHS = (ROOT / "graphs" / "README.md").read_text()
PLUGIN = (ROOT / "graphs" / "vllm_plugin" / "README.md").read_text()
COUNTS = {"a": 1, "one": 1, "seven": 7, "eight": 8, "twenty": 20}


def says(page: str, words: str) -> bool:
    """Whether a page has these words, wherever its lines break."""
    return words in " ".join(page.split())


def word(count: int) -> str:
    """A small number as the pages write it."""
    return next(name for name, number in COUNTS.items() if number == count)


def result(link: str, page: str = BENCH) -> dict:
    """The result file behind a link of a page."""
    return read(Path(re.search(rf"\[{link}\]\(([^)]+)\)", page).group(1)).stem)


def read(name: str) -> dict:
    """A result file."""
    return json.loads((ROOT / f"bench/results/{name}.json").read_text())


def table(header: str, page: str = BENCH) -> list[list[str]]:
    """Cells of the table that starts with `header`, without its two head lines."""
    lines = page[page.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_first_table() -> None:
    """The README's: a few systems of the file, and what the batches are."""
    workloads = result("encoder", README)["workloads"]
    rows = table("| batch | named below", README)
    assert [row[1] for row in rows] == list(WORKLOADS)
    for what, name, tokens, graph, *others in rows:
        measured, grids = workloads[name], WORKLOADS[name]
        assert tokens == str(measured["tokens"]) and graph == f"{measured['graph_ms']:.2f}"
        systems = ("vllm FLASH_ATTN graph", "vllm FLASH_ATTN eager", "transformers eager")
        for cell, system in zip(others, systems, strict=True):
            assert cell == "{p50_ms:.2f} ({ratio:.2f}x)".format(**measured["systems"][system])
        assert COUNTS[what.split()[0]] == len(grids)
        if size := re.search(r"(\d+)x(\d+)", what):
            frames = re.search(r"(\d+) frames", what)
            _, *sides = image_grid(*map(int, size.groups()))
            assert set(grids) == {(int(frames[1]) // 2 if frames else 1, *sides)}


def test_the_readme_is_short_and_shows_the_picture_of_its_table() -> None:
    assert len(README.splitlines()) < 120
    (picture,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert f"({picture.replace('.png', '.json')})" in README


def test_encoder_times() -> None:
    workloads = result("encoder")["workloads"]
    rows = table("| workload (patch grids)")
    assert [row[0] for row in rows] == list(workloads)
    for name, tokens, eager, graph, *vllm, transformers, floor in rows:
        measured, systems = workloads[name], workloads[name]["systems"]
        assert tokens == str(measured["tokens"])
        assert eager == f"{measured['eager_ms']:.1f}"
        assert graph == f"{measured['graph_ms']:.2f}"
        others = ("FLASH_ATTN eager", "FLASH_ATTN graph", "FLASHINFER graph")
        for cell, other in zip(vllm, others, strict=True):
            theirs = systems[f"vllm {other}"]
            timed = "-" if theirs.get("wrong") else "{p50_ms:.2f} ({ratio:.2f}x)".format(**theirs)
            assert cell == timed
        assert transformers == f"{systems['transformers eager']['p50_ms']:.1f}"
        assert floor == f"{measured['floor_ms']:.2f}"


def test_portable_times() -> None:
    workloads = result("portable")["workloads"]
    rows = table("| portable kernels")
    assert [row[0] for row in rows] == list(workloads)
    for name, tokens, graph, *vllm in rows:
        measured = workloads[name]
        assert (tokens, graph) == (str(measured["tokens"]), f"{measured['graph_ms']:.2f}")
        for cell, mode in zip(vllm, ("eager", "graph"), strict=True):
            theirs = measured["systems"][f"vllm FLASH_ATTN {mode}"]
            assert cell == "{p50_ms:.2f} ({ratio:.2f}x)".format(**theirs)


def test_triton_releases() -> None:
    runs = {run["triton"]: run["workloads"] for run in result("releases")["runs"][:4]}
    rows = table("| our graph under triton")
    for name, *cells in rows:
        measured = [run.get(name, {}).get("graph_ms") for run in runs.values()]
        assert cells == ["-" if ms is None else f"{ms:.2f}" for ms in measured]
    assert list(runs) == ["3.6.0", "3.7.1", "3.8.0", "3.9.0"]


def test_packing() -> None:
    found = result("packing")["mixes"]["one photograph"]
    greedy15, greedy29, cost8, cost29 = (
        f"{found[name]['ratio']:.3f}" for name in ("greedy15", "greedy29", "cost8", "cost29")
    )
    assert says(BENCH, f"15 budgets {greedy15}, 29 budgets {greedy29}, packing")
    assert says(BENCH, f"time {cost8} with 8 budgets and {cost29} with 29")


def test_ptxas() -> None:
    found = result("ptxas")
    assert found["same_bits"] and list(found["results"]) == ["12.8", "12.9", "13.4"]
    batches = found["rounds"] * len(found["results"]["12.8"]["variants"])
    assert says(BENCH, f"the same bits in {batches} random batches")


def test_engine() -> None:
    """What bench/README.md says of vLLM's engines."""
    found = result("engine")
    backends = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
    comparisons = found["comparisons"]
    assert set(comparisons) == {f"{b} {mode}" for b in backends for mode in ("graph", "eager")}
    for name, comparison in comparisons.items():
        assert comparison["problems"] == []
        assert max(comparison["embedding_error"].values()) < 0.0145
        assert len(comparison["speedup"]) == 9
        if name == "FLASHINFER graph":  # three of these times are void: measured again
            comparison = read("2026-11-30-h200-vllm-engine-flashinfer")["comparisons"][name]
            assert comparison["problems"] == []
        assert min(comparison["speedup"].values()) > 1 or name.endswith("eager")
    for name, engine in found["engines"].items():
        assert engine["statistics_prompts"] == ([[250, 0]] if " graph " in name else [[0, 0]])

    same, ties = (comparisons["FLASH_ATTN graph"][key] for key in ("same", "ties"))
    words = f"{same} of 30 prompts got the same greedy tokens, {len(ties)} were near-ties"
    assert says(BENCH, words)


def test_plugin_page() -> None:
    found = result("engine")
    columns = ("FLASH_ATTN graph vllm", "FLASH_ATTN graph vitgraph", "TRITON_ATTN graph vitgraph")
    columns += ("FLASH_ATTN eager vllm", "FLASH_ATTN eager vitgraph")
    rows = table("| encoder in the engine, ms", PLUGIN)
    assert len(rows) == 9
    for name, *cells in rows:
        measured = [found["engines"][c]["milliseconds"][name] for c in columns]
        assert cells == [f"{ms:.2f}" for ms in measured]
    same = [comparison["same"] for comparison in found["comparisons"].values()]
    assert says(PLUGIN, f"{min(same)} to {max(same)} got the same greedy tokens")
    # the same backend eagerly and in graphs is no other backend
    others = {n: pair for n, pair in found["others"].items() if len(set(n.split()[::4])) > 1}
    same = [pair["same"] for pair in others.values()]
    assert says(PLUGIN, f"among themselves: {min(same)} to {max(same)})")
    triton = found["comparisons"]["TRITON_ATTN graph"]["speedup"].values()
    assert says(PLUGIN, f"{min(triton):.1f} to {max(triton):.1f} times slower")
    flashinfer = read("2026-11-30-h200-vllm-engine-flashinfer")["comparisons"]["FLASHINFER graph"]
    low, high = (limit(flashinfer["speedup"].values()) for limit in (min, max))
    assert says(PLUGIN, f"the plugin is {low:.2f} to {high:.2f} times as fast as vLLM")


def test_plugin_page_two_gpus() -> None:
    found = read("2026-11-30-h200x2-vllm-engine")
    assert found["not_run"] == []
    columns = ("2 ranks weights vllm", "2 ranks data vllm", "2 ranks data vitgraph", "vitgraph")
    rows = table("| encoder in the engine |", PLUGIN)
    assert len(rows) == 9
    for name, *cells in rows:
        engines = [found["engines"][f"FLASH_ATTN graph {column}"] for column in columns]
        assert cells == [f"{engine['milliseconds'][name]:.2f}" for engine in engines]
    same = {}
    for mode in ("data", "weights"):
        comparison = found["comparisons"][f"FLASH_ATTN graph 2 ranks {mode}"]
        assert comparison["problems"] == []
        same[mode] = comparison["same"]
    assert says(PLUGIN, "On two GPUs {data} of 30 with `data` and {weights} with".format(**same))
    for name, engine in found["engines"].items():
        assert sum(hits for hits, _ in engine["statistics_prompts"]) in (250, 500), name
        assert all(misses == 0 for _, misses in engine["statistics_prompts"])


def test_serving() -> None:
    images = result("serving")["experiments"]["images"]
    ranks = [result("two GPUs")["experiments"][f"parallel {n}"]["systems"] for n in (1, 2)]
    rows = table("| system | one image: mean")
    assert [row[0] for row in rows] == list(images["systems"]) == list(ranks[0])
    for name, *cells in rows:
        one = images["systems"][name]
        times = [one[key] for key in ("mean_ms", "p50_ms", "p99_ms")]
        assert cells == [f"{ms:.2f}" for ms in times + [r[name]["mean_ms"] for r in ranks]]
    assert says(BENCH, f"a stream of {images['requests']} single images")
    one, two = (result("two GPUs")["experiments"][f"parallel {n}"]["requests"] for n in (1, 2))
    assert says(BENCH, f"{one} requests on one, then the time was up, and {two} on two")


def test_mm_processor() -> None:
    engines = result("mm-processor", BENCH)["engines"]
    assert all(engine["quiet"] for engine in engines.values())
    rows = table("| requests | attention | vLLM, graphs", BENCH)
    assert len(rows) == 6
    for mix, attention, *cells in rows:
        mixes = [
            engines.get(f"{attention} graph {t}", {}).get("mixes", {}).get(mix) for t in TOWERS
        ]
        means = [f"{one['encoder_forward_ms']['mean']:.2f}" if one else "-" for one in mixes]
        assert cells == means


def test_large_job() -> None:
    (run,) = result("large job")["runs"]
    share = re.search(r"encoding (\d+%), writing (\d+%)", run["where"])
    assert says(
        BENCH, f"at {run['images_per_second']:.0f} a second, {share[1]} of the time encoding"
    )
    assert says(BENCH, f"{share[2]} writing, and {run['peak_mib'] / 1024:.1f} GiB of memory")


def test_fp8_times() -> None:
    workloads = result("FP8")["workloads"]
    rows = table("| FP8 layers | tokens")
    assert [row[0] for row in rows] == list(workloads)
    for name, tokens, bf16, fp8, ratio, *vllm in rows:
        measured, systems = workloads[name], workloads[name]["systems"]
        ours = systems["vitgraph fp8 graph"]
        assert (tokens, bf16) == (str(measured["tokens"]), f"{measured['graph_ms']:.2f}")
        first, *_, last = ours["ratio_quartiles"]
        assert fp8 == f"{ours['p50_ms']:.2f}"
        assert ratio == f"{ours['ratio']:.2f} ({first:.2f}-{last:.2f})"
        assert vllm == [
            f"{systems[f'vllm FLASH_ATTN {mode}']['p50_ms']:.2f}" for mode in ("graph", "eager")
        ]
    large = [float(row[4].split()[0]) for row in rows[2:]]
    words = f"{min(large):.2f} to {max(large):.2f} of the time of bfloat16"
    assert says(GRAPHS, words) and says(PLUGIN, words)
    assert all(float(row[4].split()[0]) > 1 for row in rows[:2])
    for page in (GRAPHS, BENCH):
        assert f"{FP8_MIN_PATCHES - 1:,} patches" in page
    ours, theirs = (
        [100 * one["systems"][name]["error"] for one in workloads.values()]
        for name in ("vitgraph fp8 graph", "vllm FLASH_ATTN graph")
    )
    assert says(BENCH, f"our bfloat16 by {min(ours):.1f} to {max(ours):.1f} %")
    assert says(BENCH, f"bfloat16 differs by {min(theirs):.1f} to {max(theirs):.1f} %")


def test_portable_with_flash_attention() -> None:
    (path,) = re.findall(r"\[portable, with it\]\(([^)]+)\)", BENCH)
    rows = table("| workload | tokens", (ROOT / "bench" / path).read_text())
    eager, graph = ([float(row[column].split()[0]) for row in rows] for column in (4, 5))
    assert says(
        BENCH, f"take {min(graph):.2f} to {max(graph):.2f} times as long on {word(len(rows))}"
    )
    assert says(BENCH, f"its eager forward {min(eager):.2f} times on the largest image")


def test_small_graphs() -> None:
    found = result("small graphs")
    assert found["wrong"] == []
    rows = [found["gpu_ms"][name] for name in ("1x(1,20,20)", "1x(1,32,32)")]
    norms, everything, alone = (
        " and ".join(f"{row[name] / row['base']:.3f}" for row in rows)
        for name in ("norms", "all", "pdl")
    )
    assert says(BENCH, f"leaves {norms} of the time")
    assert says(BENCH, f"dependent launches, {everything}. Dependent launches alone leave {alone}:")


def test_attention_times() -> None:
    rows = {row["name"]: row for row in result("kernels", BENCH)["rows"]}
    spreads = []
    for case, ours, *others in table("| sequences x patches", BENCH):
        assert ours == f"{rows[f'attention {case}, vllm']['median_us']:.1f}"
        libraries = ("vllm", "flashinfer", "sdpa_cudnn", "sdpa_flash")
        for cell, library in zip(others, libraries, strict=True):
            assert cell == f"{rows[f'attention {case}, {library}']['baseline_us']:.1f}"
        own = [rows[f"attention {case}, {library}"]["median_us"] for library in libraries]
        spreads.append(max(own) / min(own) - 1)
    assert says(BENCH, f"depends by up to {max(spreads):.0%}")


def test_replay_cost() -> None:
    measured = result("replay cost", BENCH)
    ratio = {name: row["ratio"] for name, row in measured["batches"].items()}
    full = f"3,136 of 6,144 tokens take {measured['fill_ratio']:.0%} of a full replay"
    assert says(BENCH, full)
    words = f"1,000 tokens take {ratio['10 x (1,20,20)']:.2f} times what they take"
    assert says(BENCH, words)
    assert says(BENCH, f"launches count, {ratio['1 x (1,20,20)']:.2f} times")


def test_fp8_products() -> None:
    fastest: dict[str, float] = {}
    for one in result("tiles", GRAPHS)["results"]:
        if one["rows"] == 8160:
            fastest[one["layer"]] = min(one["us"], fastest.get(one["layer"], one["us"]))
    rows = {row["name"]: row["median_us"] for row in result("kernels", GRAPHS)["rows"]}
    numbers = [f"{fastest[layer]:.1f}" for layer in ("qkv", "fc1", "fc2")]
    numbers += [f"{rows[f'{layer} 8160']:.1f}" for layer in ("qkv", "fc1", "fc2")]
    words = "take {}, {} and {} us (qkv, fc1, fc2; ".format(*numbers[:3])
    assert says(GRAPHS, words)
    assert says(GRAPHS, "where bf16 takes {}, {} and {}".format(*numbers[3:]))


def test_plans() -> None:
    measured = result("plans", BENCH)
    rows = {row["workload"]: row for row in measured["rows"]}
    cells = table("| our graph | measured plans", BENCH)
    assert [name for name, *_ in cells] == list(rows)
    for name, *numbers in cells:
        row = rows[name]
        expected = [f"{row[key]:.2f}" for key in ("measured", "table")]
        expected += [f"{row['table ratio']:.3f}", f"{row['batch-invariant']:.2f}"]
        assert numbers == [*expected, f"{row['batch-invariant ratio']:.2f}"]
    loss = max(row["table ratio"] for row in rows.values()) - 1
    prices = [100 * (row["batch-invariant ratio"] - 1) for row in rows.values()]
    seconds = measured["capture_s"]
    assert loss < 0.02  # or the table has to go
    for words in (
        f"the table loses {100 * loss:.1f}% at most",
        f"takes {seconds['table']:.1f} s instead of {seconds['measured']:.1f} s",
        f"costs {min(prices):.0f} to {max(prices):.0f}% of the time",
    ):
        assert says(BENCH, words)


def test_data_parallel() -> None:
    measured = result("data parallel", GRAPHS)["batches"]["20 x (1,20,20)"]
    words = f"images take {measured['all_ms']:.2f} ms instead of {measured['one_ms']:.2f}"
    assert says(GRAPHS, words)


def test_capture() -> None:
    ours, theirs = (
        result("encoder")["systems"][name] for name in ("vitgraph graph", "vllm FLASH_ATTN graph")
    )
    for words in (
        f"take {ours['memory_mib']:.0f} MiB, vLLM's {theirs['memory_mib']:.0f};",
        f"took {ours['capture_s']:.1f} s, most",
        f"vLLM's {theirs['capture_s']:.1f} s.",
    ):
        assert says(BENCH, words)


def test_the_triton_releases_of_the_hopper_tier() -> None:
    first, *_, last = (release.rstrip(".") for release in GLUON_RELEASES)
    words = f"tested with triton {first} to {last}"
    assert says(README, words) and says(PLUGIN, words)


def test_models() -> None:
    """Every tower and every class of vLLM's is in the table; vllm_contract.py checks releases."""
    rows = table("| model | deepstack | checkpoint |", GRAPHS)
    towers = [name for row in rows for name in re.findall(r"`(\w+)`", row[3])]
    classes = [name for row in rows for name in re.findall(r"`(\w+)` 0\.\d\d", row[4])]
    assert sorted(towers) == sorted(config.TOWERS) and sorted(classes) == sorted(ARCHITECTURES)
    supported = " ".join(config.TOWERS.values())
    for model, *_ in (row for row in rows if row[3].startswith("`")):
        assert re.match(r"[\w-]+", model)[0] in supported


def test_model_runners_of_vllm_releases() -> None:
    """The table of releases, against what doctor goes by; vllm_modes.py asks vLLM itself."""
    rows, seen = table("| vLLM | torch | triton |", PLUGIN), []
    for releases, _, triton, tier, *runners, typed in rows:
        first, last = (int(release[2:]) for release in (releases.split(" - ") * 2)[:2])
        seen += range(first, last + 1)
        assert (tier == "tested") == f"{triton}.0".startswith(GLUON_RELEASES)
        dense, moe, hybrid = V2_SINCE.values()
        assert moe == hybrid  # one column
        for runner, since in zip(runners, (dense, moe), strict=True):
            for minor in (first, last):
                v2 = "V2" if minor >= 28 else "V2, no encoder graphs"
                assert runner == (v2 if (0, minor) >= since else "V1")
        needed = "dense: `VLLM_USE_V2_MODEL_RUNNER=0`" if "no encoder" in runners[0] else "nothing"
        assert typed == needed
    assert seen == list(range(20, 34))


def test_the_line_of_the_log() -> None:
    """As the wrapper writes it; the README has its beginning."""
    source = (ROOT / "graphs" / "vllm_plugin" / "wrapper.py").read_text()
    assert '"vitgraph serves the vision tower of %s: %s, %d rank' in source
    encoder = SimpleNamespace(
        tower=SimpleNamespace(
            attn_backend=SimpleNamespace(name="TRITON_ATTN"), dtype=torch.bfloat16
        ),
        attention="triton",
        pixel_normalization=PixelNormalization((0.5,) * 3, (0.5,) * 3),
        graphs_off=False,
        batch_invariant=False,
        linears=SAME,
    )
    said = SharedEncoder.describe(encoder)
    begun = f"vitgraph serves the vision tower of Qwen3VLForConditionalGeneration: {said}"
    assert says(PLUGIN, f"{begun}, 1 rank")
    assert says(README, begun[: begun.index(", uint8")]) and "graphs on" in README
    encoder.linears = Linears("fp8", 3)
    assert says(PLUGIN, SharedEncoder.describe(encoder).partition("graphs on, ")[2])


def test_metrics_of_the_plugin() -> None:
    rows = table("| `vitgraph_encoder_...`", PLUGIN)
    named = {name: row[1] for row in rows for name in re.findall(r"`(\w+)_total`", row[0])}
    expected = {name: labels[1] for name, (_, labels) in FAMILIES.items() if len(labels) > 1}
    assert {name: re.search(r"`(\w+)`", by).group(1) for name, by in named.items()} == expected
    for name in re.findall(r"vitgraph_encoder_(\w+)_total", PLUGIN):
        assert name in FAMILIES

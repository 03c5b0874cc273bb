"""Every number in the README's tables comes from a checked-in result."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def result(link: str) -> dict:
    """The result file behind a link of the README."""
    return json.loads((ROOT / re.search(rf"\[{link}\]\(([^)]+)\)", README).group(1)).read_text())


def table(header: str) -> list[list[str]]:
    """Cells of the table that starts with `header`, without its two head lines."""
    lines = README[README.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_encoder_times() -> None:
    workloads = result("encoder")["workloads"]
    rows = table("| workload (patch grids)")
    assert [row[0] for row in rows] == list(workloads)
    for name, tokens, eager, graph, replay, floor in rows:
        measured = workloads[name]
        assert tokens == str(measured["tokens"])
        assert eager == f"{measured['eager_ms']:.1f}"
        assert graph == f"{measured['graph_ms']:.2f}"
        assert replay == f"{measured['replay_ms']:.2f}"
        assert floor == f"{measured['floor_ms']:.2f}"


def test_attention_times() -> None:
    rows = {row["name"]: row for row in result("kernels")["rows"]}
    for case, ours, cudnn, flash in table("| sequences x patches"):
        against_cudnn = rows[f"attention {case}, sdpa_cudnn"]
        assert ours == f"{against_cudnn['median_us']:.1f}"
        assert cudnn == f"{against_cudnn['baseline_us']:.1f}"
        assert flash == f"{rows[f'attention {case}, sdpa_flash']['baseline_us']:.1f}"


def test_fill() -> None:
    ratio = result("replay cost")["fill_ratio"]
    assert f"3,136 of 6,144 tokens take {ratio:.0%} of a full" in README


def test_tree_matches_the_repository() -> None:
    for folder in re.findall(r"^    (\w+)/ ", README, flags=re.MULTILINE):
        assert (ROOT / folder).is_dir()

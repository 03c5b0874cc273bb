"""Who encodes what: items shared out evenly, and when all ranks take every item together."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitgraph.bench.workloads import WORKLOADS
from vitgraph.encoder import GEOMETRIES
from vitgraph.graphs.parallel.assignment import Rates, assign, together_pays, work

sizes = st.lists(st.integers(0, 5000) | st.sampled_from([100, 256]), max_size=40)
# An H200's: 440 TFLOP/s; 300 GB/s and 30 us a collective over NVLink, 20 GB/s without.
NVLINK = Rates(1 / 440e12, 1 / 300e9, 30e-6)
PCIE = Rates(1 / 440e12, 1 / 20e9, 50e-6)


@given(sizes, st.integers(1, 9))
def test_every_item_exactly_once_in_order(sizes, world) -> None:
    ranks = assign(sizes, world)
    assert len(ranks) == world
    assert sorted(index for rank in ranks for index in rank) == list(range(len(sizes)))
    assert all(rank == sorted(rank) for rank in ranks)
    assert ranks == assign(sizes, world)


@given(sizes.filter(any), st.integers(1, 9))
def test_balance(sizes, world) -> None:
    """Largest first keeps every load within a mean and one item, and leaves no rank idle that
    could help."""
    ranks = assign(sizes, world)
    loads = [sum(max(sizes[index], 1) for index in rank) for rank in ranks]
    weights = [max(size, 1) for size in sizes]
    busiest = max(range(world), key=loads.__getitem__)
    smallest = min(max(sizes[index], 1) for index in ranks[busiest])
    # times `world`, in integers: a quotient would be rounded
    assert world * loads[busiest] <= sum(weights) + max(weights) * (world - 1)
    assert loads[busiest] - smallest <= min(loads)
    assert sum(map(bool, ranks)) == min(world, len(sizes))


def test_equal_items_stay_neighbours() -> None:
    assert assign([7] * 6, 3) == [[0, 1], [2, 3], [4, 5]]
    assert assign([1, 9, 1, 1, 1], 2) == [[1], [0, 2, 3, 4]]


def test_no_world() -> None:
    with pytest.raises(ValueError, match="world size 0"):
        assign([1], 0)


def test_work_counts_the_products_and_the_squares() -> None:
    """By hand for the 8B tower: 27 layers of 1152 and 4304 columns; a video's frames apart."""
    config = GEOMETRIES["8b"]
    products = 2 * (1152 * 3456 + 1152 * 1152 + 2 * 1152 * 4304)
    assert work(config, (1, 2, 2)) == 27 * 4 * (products + 4 * 4 * 1152)
    assert work(config, (3, 20, 20)) == 3 * work(config, (1, 20, 20))


@pytest.mark.parametrize(
    ("workload", "rates", "together"),
    [
        ("1 x (1,20,20)", NVLINK, False),
        ("1 x (1,32,32)", NVLINK, False),
        ("1 x (1,68,120)", NVLINK, True),
        ("1 x (1,128,180)", NVLINK, True),
        ("20 x (1,20,20)", NVLINK, False),
        ("8 x (1,32,32)", NVLINK, False),
        ("1 video (8,24,40)", NVLINK, True),
        ("1 x (1,48,64)", PCIE, False),
        ("1 x (1,68,120)", PCIE, False),
    ],
    ids=str,
)
def test_large_images_alone_are_encoded_together(workload, rates, together) -> None:
    """Whole images where they balance; links that are slow are left alone."""
    grids, model = WORKLOADS[workload], SimpleNamespace(config=GEOMETRIES["8b"], dtype=torch.half)
    ranks = assign([work(model.config, grid) for grid in grids], 2)
    assert together_pays(model, grids, ranks, rates) == together

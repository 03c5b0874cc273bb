"""Every form of input, and every mistake by name (KNOWN_FAILURES 30)."""

import numpy as np
import pytest
import torch

from vitgraph.encoder.inputs import Grids, check_grids, check_pixels

FORMS = {
    "list": lambda g: g,
    "tuples": lambda g: tuple(tuple(x) for x in g),
    "array_int64": lambda g: np.array(g),
    "array_uint8": lambda g: np.array(g, dtype=np.uint8),
    "list_of_arrays": lambda g: [np.array(x) for x in g],
    "tensor_int32": lambda g: torch.tensor(g, dtype=torch.int32),
    "tensor_int64": lambda g: torch.tensor(g),
    "tensor_int16": lambda g: torch.tensor(g, dtype=torch.int16),
    "list_of_tensors": lambda g: [torch.tensor(x) for x in g],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_grids_in_every_form(form) -> None:
    grids = check_grids(form([[1, 4, 6], [3, 2, 2]]))
    assert grids == [(1, 4, 6), (3, 2, 2)]
    assert grids.num_patches == [24, 12]
    assert grids.seqlens == (24, 4, 4, 4)
    assert check_grids(grids) is grids


def test_no_grids() -> None:
    assert check_grids([]) == []
    assert check_grids(torch.empty(0, 3, dtype=torch.int64)) == []


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ((1, 3, 4), "item 1: h 3 and w 4 must be multiples of the merge size 2"),
        ((1, 4, 7), "item 1: h 4 and w 7 must be multiples of the merge size 2"),
        ((0, 4, 4), "item 1: grid (0, 4, 4) must be positive"),
        ((1, -4, 4), "item 1: grid (1, -4, 4) must be positive"),
        ((1, 4), "item 1: a grid has 3 values (t, h, w), got (1, 4)"),
        ((1, 4.0, 4), "item 1: grid values must be integers, got 4.0"),
        ((True, 4, 4), "item 1: grid values must be integers, got True"),
        ((torch.tensor(True), 4, 4), "item 1: grid values must be integers, got tensor(True)"),
        (b"\x01\x04\x04", "item 1: a grid has 3 values (t, h, w), got b'\\x01\\x04\\x04'"),
        (4, "item 1: a grid has 3 values (t, h, w), got 4"),
    ],
)
def test_bad_grids_name_the_item(grid, message) -> None:
    with pytest.raises(ValueError) as error:
        check_grids([(1, 2, 2), grid])
    assert str(error.value) == message


@pytest.mark.parametrize(
    "value",
    [torch.tensor(3), torch.tensor([1, 4, 4]), torch.ones(1, 3).int().to_sparse(), "abc", None, 7],
)
def test_grids_of_the_wrong_rank(value) -> None:
    with pytest.raises(ValueError):
        check_grids(value)


def test_float_grids_are_refused() -> None:
    with pytest.raises(ValueError, match=r"item 0: grid values must be integers, got 1\.0"):
        check_grids(torch.tensor([[1.0, 4.0, 4.0]]))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (23, "item 0 with grid (1, 4, 6) needs rows 0..23 of pixel_values, which has 23"),
        (27, "item 1 with grid (1, 2, 2) needs rows 24..27 of pixel_values, which has 27"),
        (
            29,
            "pixel_values has 29 rows, the grids of 2 items (the last is item 1) describe 28",
        ),
    ],
)
def test_pixel_rows_must_match_the_grids(rows, message) -> None:
    with pytest.raises(ValueError) as error:
        check_pixels(torch.zeros(rows, 1536), Grids([(1, 4, 6), (1, 2, 2)]), 1536)
    assert str(error.value) == message


@pytest.mark.parametrize("shape", [(4, 1535), (4, 3, 512), (6144,)])
def test_pixels_of_the_wrong_shape(shape) -> None:
    with pytest.raises(ValueError, match=r"expected \[patches, 1536\]"):
        check_pixels(torch.zeros(shape), Grids([(1, 2, 2)]), 1536)


def test_integer_pixels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.int32"):
        check_pixels(torch.zeros(4, 1536, dtype=torch.int32), Grids([(1, 2, 2)]), 1536)


def test_pixels_may_be_strided_and_of_any_float(encoder) -> None:
    grids = [(1, 4, 4)]
    pixels = torch.randn(16, 1536)
    expected = encoder(pixels, grids)
    assert torch.equal(encoder(torch.stack([pixels, pixels], dim=2)[:, :, 0], grids), expected)
    assert torch.equal(encoder(pixels.double(), grids), expected)
    assert torch.equal(encoder(pixels.numpy(), grids), expected)

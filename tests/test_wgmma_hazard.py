"""The search for registers that a wgmma may still read, on listings written by hand."""

import importlib.util
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location(
    "wgmma_hazard", Path(__file__).parent / "wgmma_hazard.py"
)
wgmma_hazard = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(wgmma_hazard)

MMA = "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR16].tnspB, R24, gsb0"
SHARED = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], gdesc[UR16], R24, gsb0"
WAIT, WAIT_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"


def listing(*lines: str | tuple[str, int]) -> str:
    """Labels, instructions, and instructions with the register that they write."""
    rows = ["   // |   # 01234567890123456789  |"]
    for address, line in enumerate(lines):
        text, register = line if isinstance(line, tuple) else (line, None)
        marks = "".join("^" if i == register else ":" for i in range(20))
        if text.startswith(".L"):
            rows.append(f"{text}:")
        else:
            rows.append(f"  /*{16 * address:04x}*/   {text} ;  // |   9 {marks}  |")
    width = max(row.find("//") for row in rows)
    padded = [row.replace("//", " " * (width - row.find("//")) + "//", 1) for row in rows]
    return "\n".join(padded)


@pytest.mark.parametrize(
    ("lines", "writes"),
    [
        ([MMA, ("MOV R5, R1", 5), WAIT], ["R5"]),
        ([MMA, WAIT, ("MOV R5, R1", 5)], []),
        ([MMA, ("MOV R9, R1", 9), WAIT], []),
        ([SHARED, ("MOV R5, R1", 5), WAIT], []),
        ([MMA, SHARED, WAIT_BUT_ONE, ("MOV R7, R1", 7)], []),
        ([SHARED, MMA, WAIT_BUT_ONE, ("MOV R7, R1", 7)], ["R7"]),
        # around a loop
        ([".L_x_1", ("MOV R4, R1", 4), MMA, "@P0 BRA `(.L_x_1)", "EXIT"], ["R4"]),
        ([".L_x_1", ("MOV R4, R1", 4), MMA, WAIT, "@P0 BRA `(.L_x_1)", "EXIT"], []),
        # past a branch that is always taken
        ([MMA, "BRA `(.L_x_2)", ("MOV R6, R1", 6), ".L_x_2", WAIT, "EXIT"], []),
        # one group, two wgmmas
        ([MMA.removesuffix(", gsb0"), SHARED, ("MOV R6, R1", 6)], ["R6"]),
    ],
    ids=[
        "overwritten", "waited", "another", "operand_in_shared_memory", "older_group_waited",
        "newer_group_pending", "next_turn", "next_turn_waited", "not_reached", "same_group",
    ],
)  # fmt: skip
def test_finds_writes_before_the_wait(lines, writes):
    hazards = wgmma_hazard.find_hazards(listing(*lines))
    assert [hazard.split("writes ")[1] for hazard in hazards] == writes


def test_refuses_a_listing_without_registers():
    with pytest.raises(ValueError, match="life ranges"):
        wgmma_hazard.find_hazards("  /*0000*/   EXIT ;")

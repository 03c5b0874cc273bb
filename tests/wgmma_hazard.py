"""Looks in machine code of sm_90 for writes to registers that a wgmma may still be reading.

    python tests/wgmma_hazard.py NVDISASM CUBIN...

A wgmma whose operand A is in registers reads them until its group has been waited for. ptxas 12.9
was seen to use such registers again before that (Triton 11781, fixed in CUDA 13.3): results are
then wrong now and then. HGMMA is that instruction, `gsb0` on one ends a group, and
WARPGROUP.DEPBAR.LE gsb0, N waits until at most N groups are left. All paths through the branches
are followed. Which registers an instruction writes is what nvdisasm says of their life ranges.
"""

import re
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

Registers = frozenset[int]
# Operands A of the wgmmas since the last group, then of each group, the newest first.
Pending = tuple[Registers, ...]
NOTHING: Pending = (frozenset(),)


@dataclass
class Instruction:
    """One line of a disassembly: its text, the registers it writes, what may come next."""

    text: str
    written: Registers
    successors: list[int] = field(default_factory=list)


def disassemble(nvdisasm: str | Path, cubin: str | Path) -> str:
    """The listing that `find_hazards` reads."""
    command = [str(nvdisasm), "-c", "-plr", "-lrm", "narrow", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def parse(listing: str) -> list[Instruction]:
    """The instructions of a listing.

    Raises:
        ValueError: it has no table of life ranges, or no instructions.
    """
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    columns: slice | None = None
    for line in listing.splitlines():
        if columns is None and (header := re.search(r"\|\s+# (0123456789\d*)", line)):
            columns = slice(*header.span(1))
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif columns is not None and (found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?) ;", line)):
            marks = enumerate(line[columns])
            written = frozenset(register for register, mark in marks if mark in "^x")
            instructions.append(Instruction(found[1], written))
    if not instructions:
        raise ValueError("the listing has no instructions with life ranges")
    for index, instruction in enumerate(instructions):
        text = instruction.text
        if target := re.search(r"`\((\.L\w+)\)", text):
            instruction.successors.append(labels[target[1]])
        if text.startswith("BRX"):  # a jump table: any label
            instruction.successors += labels.values()
        elif not re.match(r"(BRA|EXIT|RET)\b", text) and index + 1 < len(instructions):
            instruction.successors.append(index + 1)
    return instructions


def reading_wgmmas(instructions: list[Instruction]) -> int:
    """How many wgmmas read operand A from registers."""
    return sum(bool(_operand_a(instruction.text)) for instruction in instructions)


def find_hazards(listing: str) -> list[str]:
    """Instructions that write a register which a wgmma may still be reading."""
    instructions = parse(listing)
    before: list[Pending | None] = [None] * len(instructions)
    before[0], work = NOTHING, [0]
    while work:
        index = work.pop()
        after = _step(before[index], instructions[index].text)
        for successor in instructions[index].successors:
            merged = _merge(before[successor], after)
            if merged != before[successor]:
                before[successor] = merged
                work.append(successor)
    hazards = []
    for pending, instruction in zip(before, instructions, strict=True):
        if pending is not None and (hit := frozenset().union(*pending) & instruction.written):
            hazards.append(f"{instruction.text} writes R{', R'.join(map(str, sorted(hit)))}")
    return hazards


def _operand_a(text: str) -> Registers:
    """Registers of operand A, which may be a descriptor instead: four of 16-bit values, by k=16."""
    found = re.match(r"(?:@!?U?P\w+ )?HGMMA\.\S+ R\d+, R(\d+)", text)
    return frozenset(range(int(found[1]), int(found[1]) + 4)) if found else frozenset()


def _step(pending: Pending, text: str) -> Pending:
    if waited := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)", text):
        pending = pending[: 1 + int(waited[1], 16)]
    elif "HGMMA" in text:
        pending = (pending[0] | _operand_a(text), *pending[1:])
        if "gsb0" in text:
            pending = (frozenset(), *pending[:8])
    return pending


def _merge(one: Pending | None, other: Pending) -> Pending:
    if one is None:
        return other
    return tuple(a | b for a, b in zip_longest(one, other, fillvalue=frozenset()))


def main(nvdisasm: str, *cubins: str) -> int:
    """Print what is found; the exit status is 1 if that is anything."""
    found = 0
    for cubin in cubins:
        listing = disassemble(nvdisasm, cubin)
        hazards = find_hazards(listing)
        found += len(hazards)
        count = reading_wgmmas(parse(listing))
        print(f"{Path(cubin).name}: {len(hazards)} hazards, {count} wgmmas with A in registers")
        print(*(f"  {hazard}" for hazard in hazards[:20]), sep="\n", end="\n" if hazards else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""KNOWN_FAILURES.md and the tests that keep its failures out."""

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_failure_has_a_test_and_every_number_a_failure() -> None:
    table = (TESTS / "KNOWN_FAILURES.md").read_text()
    failures = {int(number) for number in re.findall(r"^\| (\d+) \|", table, flags=re.MULTILINE)}
    named = {
        int(number)
        for path in TESTS.glob("*.py")
        for numbers in re.findall(r"KNOWN_FAILURES ((?:\d+(?:, | and )?)+)", path.read_text())
        for number in re.findall(r"\d+", numbers)
    }
    assert named == failures == set(range(1, len(failures) + 1))

"""Docstrings name their subject: none begins with a word that only points at it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
POINTING = re.compile(r'"""(What|Whether|Of|Which|Where|Said|So far)\b')


@pytest.mark.parametrize("package", ["runner", "tui"])
def test_no_docstring_begins_with_a_pointing_word(package: str) -> None:
    pointing = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if POINTING.search(line)
    ]
    assert pointing == []

"""The pages of docs/ name only files that exist; the table of what was deleted may name others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
ROOTS = (TOP, *(TOP / package for package in ("runner/trainfast_runner", "tui/trainfast_tui")))
DELETED = "What was deleted"


@pytest.mark.parametrize("page", sorted((TOP / "docs").glob("*.md")), ids=lambda page: page.name)
def test_a_file_of_ours_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text().partition(f"## {DELETED}")[0]
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py|(?:search|running|worker|door|tui|runner)/[a-z_/]+/)`", text)
    missing = [name for name in named if not any((root / name).exists() or _below(root, name) for root in ROOTS)]
    assert missing == []


def _below(root: Path, name: str) -> bool:
    """True if a folder somewhere below `root` has the file."""
    return any(root.glob(f"**/{name.rstrip('/')}"))

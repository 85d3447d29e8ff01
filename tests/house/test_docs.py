"""The pages name only files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
RUNNER, TUI = TOP / "runner/trainfast_runner", TOP / "tui/trainfast_tui"
PATHS = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.py|(?:search|running|worker|door|tui|runner)/[a-z_/]+/)`")
FOLDERS = re.compile(r"`([a-z_/]+/)`")
BRACKETED_FILES = re.compile(r"[(,]\s*`([\w/]+\.py)`(?=[,)])")
SHORT_PATHS = re.compile(r"`([RT])/([^`]+)`")


@pytest.mark.parametrize("page", sorted((TOP / "docs").glob("*.md")), ids=lambda page: page.name)
def test_a_file_of_ours_that_a_page_names_exists(page: Path) -> None:
    missing = [name for name in PATHS.findall(page.read_text()) if not _exists(name)]
    assert missing == []


def test_the_bracketed_files_of_the_decisions_are_in_the_folders_of_their_heading() -> None:
    missing = []
    for section in re.split(r"^#+ ", (TOP / "docs/decisions.md").read_text(), flags=re.MULTILINE):
        heading = section.partition("\n")[0]
        folders = [root / folder for root in (TOP, RUNNER, TUI) for folder in ("", *FOLDERS.findall(heading))]
        for name in BRACKETED_FILES.findall(section):
            if not any((folder / name).is_file() for folder in folders):
                missing.append((heading, name))
    assert missing == []


def test_the_paths_of_the_contributors_table_exist() -> None:
    named = SHORT_PATHS.findall((TOP / "CONTRIBUTING.md").read_text())
    missing = [
        f"{letter}/{path}"
        for letter, path in named
        # NAME stands for any file of its folder.
        if not any((RUNNER if letter == "R" else TUI).glob(path.rstrip("/").replace("NAME", "*")))
    ]
    assert named
    assert missing == []


def _exists(name: str) -> bool:
    """True if a file or folder of this path stands at the top, or below one of the packages."""
    return (TOP / name).exists() or any(any(root.glob(f"**/{name.rstrip('/')}")) for root in (RUNNER, TUI))

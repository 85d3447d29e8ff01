"""The pages name only files that exist; the hooks in a user's own script load in any Python from 3.8; no docstring
begins with a word that only points at its subject."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNNER, TUI = ROOT / "runner" / "trainfast_runner", ROOT / "tui" / "trainfast_tui"
HOOKS = [*(RUNNER / "door" / "trainfast_door").glob("*.py"), RUNNER / "worker" / "shared" / "process.py"]
POINTING = re.compile(r'"""(What|Whether|Of|Which|Where|Said|So far)\b.*')
PATHS = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.py|(?:search|running|worker|door|tui|runner)/[a-z_/]+/)`")
FOLDERS = re.compile(r"`([a-z_/]+/)`")
BRACKETED_FILES = re.compile(r"[(,]\s*`([\w/]+\.py)`(?=[,)])")
SHORT_PATHS = re.compile(r"`([RT])/([^`]+)`")


@pytest.mark.parametrize("package", ["runner", "tui"])
def test_no_docstring_begins_with_a_pointing_word(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert [(str(path), found[0]) for path in files for found in POINTING.finditer(path.read_text("utf-8"))] == []


@pytest.mark.parametrize("path", sorted(HOOKS), ids=lambda path: path.name)
def test_a_module_of_the_hooks_has_the_syntax_of_python_3_8(path):
    source = path.read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 8))
    assert "from __future__ import annotations" in source, "X | Y in an annotation is evaluated without it"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_a_file_of_ours_that_a_page_names_exists(page):
    missing = [name for name in PATHS.findall(page.read_text()) if not _exists(name)]
    assert missing == []


def test_the_bracketed_files_of_the_decisions_are_in_the_folders_of_their_heading():
    missing = []
    for section in re.split(r"^#+ ", (ROOT / "docs/decisions.md").read_text(), flags=re.MULTILINE):
        heading = section.partition("\n")[0]
        folders = [root / folder for root in (ROOT, RUNNER, TUI) for folder in ("", *FOLDERS.findall(heading))]
        for name in BRACKETED_FILES.findall(section):
            if not any((folder / name).is_file() for folder in folders):
                missing.append((heading, name))
    assert missing == []


def test_the_paths_of_the_contributors_table_exist():
    named = SHORT_PATHS.findall((ROOT / "CONTRIBUTING.md").read_text())
    missing = [
        f"{letter}/{path}"
        for letter, path in named
        # NAME stands for any file of its folder.
        if not any((RUNNER if letter == "R" else TUI).glob(path.rstrip("/").replace("NAME", "*")))
    ]
    assert named
    assert missing == []


def _exists(name):
    """True if a file or folder of this path stands at the top, or below one of the packages."""
    return (ROOT / name).exists() or any(any(root.glob(f"**/{name.rstrip('/')}")) for root in (RUNNER, TUI))

"""The roles of a search's runs, the file of a warm process's orders, and the lock of a search."""

from __future__ import annotations

from pathlib import Path

from .lock_files import SEARCH_LOCK_FILE

CONTROL_FILE = "control.jsonl"
"""The parent's orders to a warm process, in the run directory."""
PROBE, CONFIRMATION = "probe", "proof"
"""Roles of a batch search's runs: the process in which it tries batch sizes, and the run that confirms one."""
TRIAL = "trial"
"""Role of a best-fit search's warm process, which tries many candidates, or of a script's run, which tries one."""


def search_lock(run_directory: Path, search_id: str) -> Path:
    """The lock that a search's conductor holds; the searches' folder is next to that of the runs."""
    return run_directory.parent.parent / "searches" / search_id / SEARCH_LOCK_FILE

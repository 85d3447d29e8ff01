"""The files that a process keeps locked while it lives."""

from __future__ import annotations

from pathlib import Path

ALIVE_LOCK_FILE = "alive.lock"
"""In the run directory: held shared by each process of the run."""
SEARCH_LOCK_FILE = "search.lock"
"""In the search's directory: held by the process that conducts the search."""


def search_lock(run_directory: Path, search_id: str) -> Path:
    """The lock that a search's conductor holds; the searches' folder is next to that of the runs."""
    return run_directory.parent.parent / "searches" / search_id / SEARCH_LOCK_FILE

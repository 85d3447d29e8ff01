"""The names of the files that a process keeps locked while it lives."""

from __future__ import annotations

ALIVE_LOCK_FILE = "alive.lock"
"""In the run directory: held shared by each process of the run."""
SEARCH_LOCK_FILE = "search.lock"
"""In the search's directory: held by the process that conducts the search."""

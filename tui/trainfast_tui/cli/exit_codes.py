"""Exit codes that no state of a run gives."""

INTERRUPTED = 130
"""Ctrl-C: 128 + SIGINT, as shells have it."""
SEARCH_EXIT_CODES = {"answered": 0, "nothing_fits": 3, "failed": 4, "cancelled": INTERRUPTED}
"""Exit code by the state of a search that has ended."""

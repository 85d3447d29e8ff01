"""Exit codes of commands that no UserError gives; the entry point of the command line needs no more than these."""

from __future__ import annotations

EXIT_FAILED = 4
EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_CUT_OFF = 129, 130, 141
"""128 and the signal, as shells have it: SIGHUP, SIGINT (Ctrl-C), and SIGPIPE for a reader that has gone."""
SEARCH_EXIT_CODES = {"answered": 0, "nothing_fits": 3, "failed": EXIT_FAILED, "cancelled": EXIT_INTERRUPTED}
"""Exit code by the state of a search that has ended."""

"""Exit codes of failures, signals and searches; `run_states.exit_code_of` has those of runs."""

FAILED = 4
HUNG_UP, INTERRUPTED, CUT_OFF = 129, 130, 141
"""128 and the signal, as shells have it: SIGHUP, SIGINT (Ctrl-C), and SIGPIPE for a reader that has gone."""
SEARCH_EXIT_CODES = {"answered": 0, "nothing_fits": 3, "failed": FAILED, "cancelled": INTERRUPTED}
"""Exit code by the state of a search that has ended."""

"""The end of a training as its output reports it: torchrun's report of its ranks, and the last line."""

from __future__ import annotations

import os
import re
import signal

from trainfast_runner.records.output_log import last_line

# The report torchrun prints: the ranks it saw fail, each with its exit code.
_REPORTED = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+) \(pid: \d+\)")


def reported_codes(output: str) -> dict[int, int]:
    """The exit code of each rank in torchrun's report; empty without one."""
    return {int(rank): int(code) for rank, code in _REPORTED.findall(output)}


def reported_end(output: str) -> str:
    """The end of the first rank in torchrun's report that torchrun itself did not end; empty without one."""
    codes = reported_codes(output).items()
    return next((f"rank {rank} {exit_text(code)}" for rank, code in codes if code != -signal.SIGTERM), "")


def exit_text(code: int) -> str:
    """An exit code in words; a negative one is a signal's."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"


def error_location(output: str) -> str:
    """The file and line, ` (train.py:3)`, where the output ends in an error of Python's grammar; empty elsewhere."""
    if not last_line(output.splitlines()).startswith(("SyntaxError", "IndentationError", "TabError")):
        return ""
    locations = re.findall(r'^ *File "(.+)", line (\d+)', output, re.MULTILINE)
    return f" ({os.path.basename(locations[-1][0])}:{locations[-1][1]})" if locations else ""

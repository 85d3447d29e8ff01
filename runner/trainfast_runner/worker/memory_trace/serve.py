"""Answer trace requests until standard input ends. The first batch imports the libraries; each is traced in a fork.

A line of stdin is JSON: `{"batch": N, "requests": [...], "devices": {...}}` with the fields of `TraceRequest`s and
the variables that choose the GPUs, one batch at a time, or `{"cancel": N}`. The first line of stdout is
`{"imported": true}`. Answers carry `batch`; `{"done": N}` follows when nothing of the batch runs any more. The end of
stdin, which comes with the end of the parent, ends this process and its forks.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import runpy
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .step_timeline import TraceRequest

POLL_S = 0.1
"""Seconds between checks that stdin has not ended."""
READ_BYTES = 1 << 16
"""Most bytes of stdin read at once."""
STDIN, STDOUT = 0, 1
"""File descriptors of standard input and output."""


class RequestLines:
    """The lines of stdin, read only when there is input."""

    def __init__(self) -> None:
        self._partial_line = b""
        self._waiting: list[dict[str, Any]] = []
        self.is_over = False

    def read(self) -> None:
        """Read the lines in the pipe; block while it is empty."""
        chunk = os.read(STDIN, READ_BYTES)
        self.is_over = not chunk
        *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
        self._waiting += [json.loads(line) for line in lines]

    def next(self) -> dict[str, Any] | None:
        """Wait for the next batch; None when stdin has ended."""
        while not self.is_over:
            while self._waiting:
                line = self._waiting.pop(0)
                if "requests" in line:
                    return line
            self.read()
        return None

    def cancels(self, batch: int) -> bool:
        """True if a line read before cancels this batch."""
        return {"cancel": batch} in self._waiting


def main() -> None:
    """Import the libraries that the first batch needs, then trace batch after batch."""
    logging.disable(logging.WARNING)
    from .answers import import_for
    from .step_timeline import read_request

    lines = RequestLines()
    is_first = True
    while (batch := lines.next()) is not None:
        requests = [read_request(fields) for fields in batch["requests"]]
        if is_first:
            with _ended_with_stdin():
                import_for(requests)
            _print({"imported": True})
            is_first = False
        _trace(int(batch["batch"]), requests, batch["devices"], lines)


@contextmanager
def _ended_with_stdin() -> Iterator[None]:
    """End this process when stdin ends. The thread is gone at the end of the block, before anything is forked."""
    over = threading.Event()

    def watch() -> None:
        poll = select.poll()
        poll.register(STDIN, 0)
        while not over.wait(POLL_S):
            if poll.poll(0):  # POLLHUP, which is reported without being asked for
                os._exit(1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _trace(batch: int, requests: list[TraceRequest], devices: dict[str, str | None], lines: RequestLines) -> None:
    """Trace a batch in a fork, and return when the fork and its own forks have ended."""
    alive_pipe, child_end = os.pipe()
    server, child = os.getpid(), os.fork()
    if child == 0:
        os.close(alive_pipe)
        _choose_gpus(devices)
        _answer(batch, requests, server)
    os.close(child_end)
    with suppress(OSError):  # the child has set its own group
        os.setpgid(child, child)
    try:
        # The cancel may have been read together with its batch.
        while not lines.is_over and not lines.cancels(batch):
            # The pipe ends when neither the child nor its forks have it open.
            if alive_pipe in select.select([STDIN, alive_pipe], [], [])[0]:
                break
            lines.read()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(alive_pipe)
    _print({"done": batch})


def _choose_gpus(devices: dict[str, str | None]) -> None:
    """Set the variables that choose the GPUs, and remove those that are None. CUDA reads them in each fork again."""
    for name, value in devices.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _answer(batch: int, requests: list[TraceRequest], server: int) -> None:
    """Trace and answer in the child, as a process group of its own, so that one signal ends the child and its forks."""
    from ..exit_now import die_with_parent
    from .answers import answers

    try:
        os.setpgid(0, 0)
        die_with_parent()
        if os.getppid() == server:
            os.dup2(os.open(os.devnull, os.O_RDONLY), STDIN)
            for answer in answers(requests):
                _print({"batch": batch, **answer})
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(0)


def _print(line: dict[str, Any]) -> None:
    # A child that was killed may have left half a line.
    text = b"\n" + json.dumps(line).encode() + b"\n"
    while text:
        text = text[os.write(STDOUT, text) :]


if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[1] / "bootstrap.py"))
    importlib.import_module("trainfast_worker.memory_trace.serve").main()
    os._exit(0)

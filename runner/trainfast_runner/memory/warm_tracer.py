"""A process of the training Python that has imported the training stack and makes one batch of traces after another.

The first trace starts the process. It reads a pipe that the kernel closes when this program ends, and then exits.
One process serves runs on any GPUs: each batch of traces names its own.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import closing, suppress
from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.machine import training_python
from trainfast_runner.machine.devices import visible_to
from trainfast_runner.machine.training_python import (
    ANSWER_TIMEOUT_S,
    WORKER_FOLDER,
    ProgramCancelled,
    json_objects,
    last_error_line,
    open_temporary_file,
    own_environment,
    start_worker_program,
    timeout_error,
    whole_text,
)

POLL_S = 0.1
"""Seconds between two polls for an answer or a cancellation."""
CANCELLED_WITHIN_S = 2.0
"""A cancelled trace that does not end within this time is ended with its process."""
CHUNK_BYTES = 1 << 20
"""The most bytes read from the process at once."""
DEVICE_VARIABLES = tuple(visible_to(()))


class WarmTracer:
    """Answers from one process that stays until `close`. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: _Server | None = None

    def is_warm(self, executable: str) -> bool:
        """True if a trace by this Python would begin at once."""
        server = self._server
        return server is not None and server.imported and server.executable == executable and server.is_alive()

    def ask_each(
        self,
        executable: str,
        requests: list[dict[str, Any]],
        cancelled: threading.Event,
        environment: Mapping[str, str] | None = None,
    ) -> Generator[dict[str, Any]]:
        """Yield the answer to each request of the worker's memory_trace/serve.py, as soon as it arrives.

        A new process first yields `{"imported": true}`. Closing the iterator or setting `cancelled` ends the trace, not
        the process. Raises UserError when an answer fails to come, ProgramCancelled.
        """
        while not self._lock.acquire(timeout=POLL_S):
            if cancelled.is_set():
                raise ProgramCancelled
        variables = own_environment() if environment is None else dict(environment)
        devices = {name: variables.pop(name, None) for name in DEVICE_VARIABLES}
        try:
            server = self._server_for(executable, variables)
            with closing(server.answers(requests, devices, cancelled)) as answers:
                yield from answers
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the process. The next trace starts a new one."""
        if not self._lock.acquire(timeout=CANCELLED_WITHIN_S):
            return  # the tracing thread was told to give up; the process ends with us at the latest
        try:
            self._end_server()
        finally:
            self._lock.release()

    def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.end()

    def _server_for(self, executable: str, variables: Mapping[str, str]) -> _Server:
        """The live process, or a new one if it died or the packages it imported have changed."""
        key = (executable, variables, training_python.install_stamps(executable))
        if self._server is not None and self._server.key == key and self._server.is_alive():
            return self._server
        self._end_server()
        self._server = _Server(executable, variables, key)
        return self._server


class _Server:
    """One process and the lines it has written so far."""

    def __init__(self, executable: str, variables: Mapping[str, str], key: tuple[Any, ...]) -> None:
        self.key = key
        self.executable = executable
        self.imported = False
        self._batch = 0
        self._partial_line, self._unsent = b"", b""
        self._finished_batch = 0
        """Number of the newest batch that is over."""
        self._stderr = open_temporary_file()
        try:
            command = [executable, str(WORKER_FOLDER / "memory_trace" / "serve.py")]
            self._process = start_worker_program(executable, command, self._stderr, variables, stdin=subprocess.PIPE)
        except UserError:
            self._stderr.close()
            raise
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)

    def is_alive(self) -> bool:
        """True if the process runs."""
        return self._process.poll() is None

    def answers(
        self, requests: list[dict[str, Any]], devices: Mapping[str, str | None], cancelled: threading.Event
    ) -> Generator[dict[str, Any]]:
        """Yield the answers for `ask_each`; `devices` sets DEVICE_VARIABLES. Closing cancels the missing answers."""
        self._batch += 1
        batch, unanswered = self._batch, len(requests)
        self._unsent += _json_line({"batch": batch, "requests": requests, "devices": devices})
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        try:
            while unanswered:
                lines = self._new_lines()
                answers = [line for line in lines or () if "imported" in line or line.pop("batch", None) == batch]
                if not answers and (lines is None or self._finished_batch == batch):
                    reason = last_error_line(whole_text(self._stderr))
                    raise UserError(f"{self.executable} cannot describe the model: {reason}", key="python")
                for answer in answers:
                    unanswered -= "imported" not in answer
                    yield answer
                    deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
                if unanswered and cancelled.is_set():
                    raise ProgramCancelled
                if unanswered and time.monotonic() > deadline_s:
                    raise timeout_error(self.executable)
        finally:
            if unanswered:
                self._cancel(batch)

    def end(self) -> None:
        """End the process and its forks: by the end of its stdin, or by SIGKILL while it imports or is stuck."""
        with suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(CANCELLED_WITHIN_S if self.imported else 0.0)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._stdout.close()
        self._stderr.close()

    def _cancel(self, batch: int) -> None:
        """End the batch's traces. A running import can only be ended with the process."""
        if not self.imported or not self.is_alive():
            self.end()
            return
        deadline_s = time.monotonic() + CANCELLED_WITHIN_S
        self._unsent += _json_line({"cancel": batch})
        while self._finished_batch != batch:
            if time.monotonic() > deadline_s or self._new_lines() is None:
                self.end()
                return

    def _new_lines(self) -> list[dict[str, Any]] | None:
        """Send the waiting requests as far as the pipe takes them and return the lines read within POLL_S.

        None once the process has ended.
        """
        readable, writable, _ = select.select([self._stdout], [self._stdin] if self._unsent else [], [], POLL_S)
        if writable:
            with suppress(BlockingIOError, BrokenPipeError):
                self._unsent = self._unsent[os.write(self._stdin.fileno(), self._unsent) :]
        if not readable:
            return []
        chunk = os.read(self._stdout.fileno(), CHUNK_BYTES)
        if not chunk:
            return None
        *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
        answers = list(json_objects(lines))
        self.imported = self.imported or {"imported": True} in answers
        finished_batches = [answer["done"] for answer in answers if "done" in answer]
        self._finished_batch = finished_batches[-1] if finished_batches else self._finished_batch
        return answers


def _json_line(order: Mapping[str, Any]) -> bytes:
    return json.dumps(order).encode() + b"\n"

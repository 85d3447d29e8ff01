"""A process of the training Python that has imported the training stack, and traces one batch after another.

It is started by the first trace and ends with us: it reads our end of a pipe, which the kernel closes however we end.
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
from tempfile import TemporaryFile
from typing import Any

from trainfast_runner import training_python
from trainfast_runner.problem import Problem
from trainfast_runner.training_python import LOOK_EVERY_S, PATIENCE_S, WORKER, GivenUp

CANCELLED_WITHIN_S = 2.0
"""A trace that does not end within this time after it was cancelled is ended with its process."""
CHUNK = 1 << 20


class WarmTracer:
    """Answers as `training_python.ask_each` does, from one process that stays. For use by several threads."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._server: _Server | None = None

    def is_warm(self, executable: str) -> bool:
        """True if a trace by this Python would begin at once."""
        server = self._server
        return server is not None and server.imported and server.key[0] == executable and server.is_alive()

    def ask_each(
        self,
        executable: str,
        script: str,
        arguments: list[str],
        given_up: threading.Event,
        environment: Mapping[str, str] | None = None,
    ) -> Generator[dict[str, Any]]:
        """The answer to each of `arguments`, JSON for trace_memory.py, as soon as it is there.

        Before the first answer of a new process comes `{"imported": true}`. Closing the iterator or setting `given_up`
        ends the trace, not the process. Raises Problem where an answer fails to come, GivenUp.
        """
        while not self._turn.acquire(timeout=LOOK_EVERY_S):
            if given_up.is_set():
                raise _given_up()
        try:
            server = self._server_for(executable, environment)
            with closing(server.answers([json.loads(one) for one in arguments], given_up)) as answers:
                yield from answers
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the process. The next trace starts a new one."""
        if not self._turn.acquire(timeout=CANCELLED_WITHIN_S):
            return  # whoever traces was told to give up; at the latest the process ends with us
        try:
            self._end_server()
        finally:
            self._turn.release()

    def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.end()

    def _server_for(self, executable: str, environment: Mapping[str, str] | None) -> _Server:
        """The process that is there, or a new one where it died or what it has imported has been changed."""
        variables = training_python.own_environment() if environment is None else dict(environment)
        key = (executable, variables, training_python.installed(executable))
        if self._server is not None and self._server.key == key and self._server.is_alive():
            return self._server
        self._end_server()
        self._server = _Server(executable, variables, key)
        return self._server


class _Server:
    """One process and the lines it has written so far."""

    def __init__(self, executable: str, variables: Mapping[str, str], key: tuple[Any, ...]) -> None:
        self.key = key
        self.imported = False
        self._executable = executable
        self._batch = 0
        self._begun = b""
        self._lines: list[dict[str, Any]] = []
        self._complaints = TemporaryFile()  # noqa: SIM115 - open as long as the process
        try:
            self._process = subprocess.Popen(
                [executable, str(WORKER / "serve_traces.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                env={**variables, "TOKENIZERS_PARALLELISM": "false"},
                cwd=training_python.working_directory() or None,
                start_new_session=True,
            )
        except OSError as error:
            self._complaints.close()
            raise Problem(f"{executable} does not start: {error.strerror}", key="python") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def is_alive(self) -> bool:
        """True if the process runs."""
        return self._process.poll() is None

    def answers(self, requests: list[dict[str, Any]], given_up: threading.Event) -> Generator[dict[str, Any]]:
        """As `WarmTracer.ask_each`. What is owed when this ends is cancelled."""
        self._batch += 1
        batch, owed = self._batch, len(requests)
        try:
            self._send({"batch": batch, "requests": requests})
            deadline = time.monotonic() + PATIENCE_S
            while owed:
                line = self._line()
                if line is None and given_up.is_set():
                    raise _given_up()
                if line is None and time.monotonic() > deadline:
                    raise Problem(f"{self._executable} did not answer within {PATIENCE_S} s", key="python")
                if line is None:
                    continue
                if line.get("done") == batch:
                    raise Problem(f"{self._executable} cannot describe the model: {self._last_words()}", key="python")
                if "imported" in line or line.pop("batch", None) == batch:
                    owed -= "imported" not in line
                    deadline = time.monotonic() + PATIENCE_S
                    yield line
        finally:
            if owed:
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
        self._complaints.close()

    def _cancel(self, batch: int) -> None:
        """Return when nothing is traced any more. An import that is under way can only be ended with the process."""
        if not self.imported or not self.is_alive():
            return self.end()
        deadline = time.monotonic() + CANCELLED_WITHIN_S
        try:
            self._send({"cancel": batch})
            while time.monotonic() < deadline:
                line = self._line()
                if line is not None and line.get("done") == batch:
                    return None
        except Problem:
            pass
        return self.end()

    def _send(self, order: dict[str, Any]) -> None:
        try:
            self._stdin.write(json.dumps(order).encode() + b"\n")
            self._stdin.flush()
        except OSError:
            raise Problem(f"{self._executable} cannot describe the model: {self._last_words()}", key="python") from None

    def _line(self) -> dict[str, Any] | None:
        """The next line, or None where none comes within LOOK_EVERY_S. Raises Problem when the process has ended."""
        if not self._lines and select.select([self._stdout], [], [], LOOK_EVERY_S)[0]:
            found = os.read(self._stdout.fileno(), CHUNK)
            if not found:
                raise Problem(f"{self._executable} cannot describe the model: {self._last_words()}", key="python")
            *lines, self._begun = (self._begun + found).split(b"\n")
            self._lines += training_python.json_objects(lines)
        if not self._lines:
            return None
        line = self._lines.pop(0)
        self.imported = self.imported or "imported" in line
        return line

    def _last_words(self) -> str:
        said = os.pread(self._complaints.fileno(), CHUNK, 0).decode(errors="replace").strip().splitlines()
        return said[-1] if said else "it said nothing"


def _given_up() -> GivenUp:
    return GivenUp("nobody waits for it any more", key="python")

"""The warm Pythons of this program: processes of the training Python that answer questions and may become a run.

`WarmPython` is such a process, and the worker's standby.py its other half. `WARM` holds those of this program: the
standby, made by `keep` as the child of a supervisor that waits with it, and a process that only answers, made when a
question comes and no standby is there. Both end with this program: the kernel closes their sockets.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine import training_python
from trainfast_runner.machine.devices import DEVICE_VARIABLES
from trainfast_runner.machine.resource_limits import read_host_free_bytes
from trainfast_runner.machine.training_python import ProgramCancelled
from trainfast_runner.records.home import cache_directory
from trainfast_runner.records.json_lines import read_cached, write_cached
from trainfast_runner.worker.shared.host import wait_policy

POLL_S = 0.1
"""Seconds between two polls for an answer or a cancellation."""
CANCELLED_WITHIN_S = 2.0
"""A cancelled answer that does not end within this time is ended with its process."""
CHUNK_BYTES = 1 << 20
"""The most bytes read from the process at once."""
BOOTSTRAP = training_python.WORKER_FOLDER / "bootstrap.py"


@dataclass(frozen=True)
class StandbyKey:
    """Everything that a training process fixes when it imports; a run with another key starts cold."""

    python: str
    device: str
    """`cpu` or `cuda`; empty for a process that only answers."""
    ranks: int
    """Processes under torchrun; 0 for one process alone."""
    variables: tuple[tuple[str, str], ...]
    """Variables of the launch that libraries read when they are imported."""
    packages: tuple[str, ...]
    """`install_stamps` of the Python."""

    def difference(self, wanted: StandbyKey) -> str:
        """Return the reason that a run with the key `wanted` cannot take the standby; empty if it can."""
        if wanted.python != self.python:
            return f"the standby is of {self.python}"
        if wanted.packages != self.packages:
            return "packages of the training Python have changed"
        if (wanted.device, wanted.ranks) != (self.device, self.ranks):
            return "the standby is for another device or number of ranks"
        changed = sorted(name for name, _ in {*wanted.variables} ^ {*self.variables})
        return f"{', '.join(dict.fromkeys(changed))} changed" if changed else ""


class WarmPython:
    """One process that answers; a standby if its key has a device. Safe for several threads."""

    def __init__(
        self, key: StandbyKey, words: Sequence[str], order: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        """Start the command of these words with the order of the worker's standby.py. Raises UserError."""
        self.key, self.is_gone = key, False
        """True once it was ended or has become a run: it gives no further answer."""
        self.is_imported = self._is_standby = bool(key.device)
        """True if an answer that needs the training stack would begin at once."""
        self._lock = threading.Lock()
        self._batch = self._finished_batch = 0
        """The numbers of the newest batch, and of the newest one that is over."""
        self._partial_line, self._unsent = b"", b""
        self._errors = training_python.open_temporary_file()
        self._questions, asked = socket.socketpair()
        self._go, waiting = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with asked, waiting:
            order = {**order, "questions": None if key.ranks else asked.fileno()}
            command, fd = [*words, json.dumps(order)], asked.fileno()
            self._process = training_python.start_worker_program(
                key.python, command, self._errors, environment, fd, stdin=waiting.fileno()
            )
        self._questions.setblocking(False)

    @property
    def is_alive(self) -> bool:
        """True until the process has ended or become a run."""
        return not self.is_gone and self._process.poll() is None

    @property
    def is_idle(self) -> bool:
        """True while it answers nothing."""
        return not self._lock.locked()

    def ask_each(
        self,
        requests: Sequence[Mapping[str, Any]],
        cancelled: threading.Event,
        devices: Mapping[str, str | None],
        task: str = "describe the model",
    ) -> Generator[dict[str, Any]]:
        """Yield the answer to each request of the worker's standby.py, as soon as it arrives.

        A process that imports for them first yields `{"imported": true}`. Closing the iterator or setting `cancelled`
        ends the answers, not the process; one that becomes a run or is ended gives no more. Raises UserError when an
        answer fails to come, ProgramCancelled.
        """
        while not self._lock.acquire(timeout=POLL_S):
            if cancelled.is_set():
                raise ProgramCancelled
        unanswered = 0 if self.is_gone else len(requests)
        try:
            self._batch += 1
            self._send({"batch": self._batch, "requests": requests, "devices": devices})
            deadline_s = time.monotonic() + training_python.ANSWER_TIMEOUT_S
            while unanswered:
                lines = self._new_lines()
                answers = [line for line in lines or () if "imported" in line or line.get("batch") == self._batch]
                if not answers and (lines is None or self._finished_batch == self._batch):
                    if self.is_gone:
                        return
                    if lines is None:
                        self._process.wait()
                    raise training_python.no_answer_error(
                        self.key.python, str(BOOTSTRAP), training_python.whole_text(self._errors), task
                    )
                for answer in answers:
                    unanswered -= "request" in answer
                    yield answer
                    deadline_s = time.monotonic() + training_python.ANSWER_TIMEOUT_S
                if unanswered and cancelled.is_set():
                    raise ProgramCancelled
                if unanswered and time.monotonic() > deadline_s:
                    raise training_python.timeout_error(self.key.python)
        finally:
            if unanswered:
                self._cancel()
            self._lock.release()

    def give(self, run_directory: Path) -> subprocess.Popen[bytes]:
        """Give the standby its run, whose supervisor it now is; an answer under way is given up.

        Raises OSError where the process is gone.
        """
        self.is_gone = True
        self._go.send(os.fsencode(run_directory))
        return self._process

    def end(self, within_s: float = CANCELLED_WITHIN_S, *, waits: bool = True) -> None:
        """End the process, once an answer under way has ended, or at once after `within_s` seconds.

        Return when it has ended, or at once where nobody `waits` for that.
        """
        self.is_gone = True
        is_idle = self._lock.acquire(timeout=within_s)
        if is_idle:
            self._go.close()
            self._questions.close()
            self._lock.release()
        if waits:
            self._wait_for_end(is_idle)
        else:
            threading.Thread(target=self._wait_for_end, args=(is_idle,), daemon=True).start()

    def _wait_for_end(self, ends_itself: bool) -> None:
        """Wait until the process has ended: it gets SIGKILL if it imports, answers or is stuck."""
        try:
            self._process.wait(CANCELLED_WITHIN_S if ends_itself and self.is_imported else 0.0)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        if ends_itself:
            self._errors.close()

    def _cancel(self) -> None:
        """End the batch's answers; a running import only ends with the process, and a standby's goes on."""
        deadline_s = time.monotonic() + CANCELLED_WITHIN_S
        self._send({"cancel": self._batch})
        if self._is_standby and not self.is_gone:
            self._new_lines()
        while not self._is_standby and self.is_alive and self._finished_batch != self._batch:
            if not self.is_imported or time.monotonic() > deadline_s:
                self._kill()
                return
            self._new_lines()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _send(self, order: Mapping[str, Any]) -> None:
        """Add a line to those that `_new_lines` sends."""
        self._unsent += json.dumps(order).encode() + b"\n"

    def _new_lines(self) -> list[dict[str, Any]] | None:
        """Send the waiting orders as far as the socket takes them and return the lines read within POLL_S.

        None once the process has ended or become a run.
        """
        questions = self._questions
        readable, writable, _ = select.select([questions], [questions] if self._unsent else [], [], POLL_S)
        if writable:
            with suppress(BlockingIOError, BrokenPipeError):
                self._unsent = self._unsent[questions.send(self._unsent) :]
        if not readable:
            return []
        chunk = b""
        with suppress(ConnectionResetError):
            chunk = questions.recv(CHUNK_BYTES)
        if not chunk:
            return None
        *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
        answers = list(training_python.json_objects(lines))
        self.is_imported = self.is_imported or {"imported": True} in answers
        self._finished_batch = next((line["done"] for line in answers if "done" in line), self._finished_batch)
        return answers


STANDBY_NEEDS_BYTES = 4 << 30
"""No standby is kept below this much available memory of the host: it takes about 0.7 GiB of it."""


class WarmPythons:
    """The warm Pythons of this program: at most one standby, and one process that only answers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._standby: WarmPython | None = None
        self._asked: WarmPython | None = None

    def is_warm(self, executable: str) -> bool:
        """True if an answer of this Python would begin at once."""
        asked = self._asked
        is_ready = asked is not None and asked.key.python == executable and asked.is_alive and asked.is_imported
        return is_ready or self._standby_that_answers(executable) is not None

    def ask_each(
        self,
        executable: str,
        requests: Sequence[Mapping[str, Any]],
        cancelled: threading.Event | None = None,
        environment: Mapping[str, str] | None = None,
        task: str = "describe the model",
    ) -> Generator[dict[str, Any]]:
        """Yield the answers as `WarmPython.ask_each`, of the standby if there is one, else of a process for them."""
        environment = training_python.own_environment() if environment is None else environment
        cancelled = cancelled or threading.Event()
        devices = {name: environment.get(name) for name in DEVICE_VARIABLES}
        variables = {name: value for name, value in environment.items() if name not in DEVICE_VARIABLES}
        answered: set[int] = set()
        standby = self._standby_that_answers(executable)
        if standby is not None and requests[0]["part"] == "inspect" and not standby.is_idle:
            standby = None  # a short question does not wait for a trace
        while len(answered) < len(requests):
            python = standby or self._answering(executable, variables)
            try:
                for answer in python.ask_each(requests, cancelled, devices, task):
                    number = answer.get("request")
                    if number not in answered:
                        answered |= set() if number is None else {number}
                        yield answer
            except UserError:
                if python is not standby:
                    raise
            standby = None  # it has become a run, was ended, or died

    def ask(self, executable: str, request: Mapping[str, Any], task: str = "describe the model") -> dict[str, Any]:
        """Return the one answer to a request. Raises UserError, which says that the Python cannot do the `task`."""
        with closing(self.ask_each(executable, [request], task=task)) as answers:
            return next(answer for answer in answers if "request" in answer)

    @property
    def wait_policy(self) -> str | None:
        """The wait policy of the standby's threads; None without a standby."""
        standby = self._standby
        return None if standby is None else wait_policy(dict(standby.key.variables))

    def keep(self, key: StandbyKey, order: Mapping[str, Any]) -> None:
        """Make the standby of this key, in place of one with another; `order` is that of the supervisor.

        Makes none where memory is short. Raises UserError if it does not start.
        """
        with self._lock:
            if (standby := self._standby) is not None:
                if standby.is_alive and standby.key == key:
                    return
                self._standby = None
                standby.end()
            if read_host_free_bytes() < STANDBY_NEEDS_BYTES:
                return
            self._end_asked()
            words = (sys.executable, "-P", "-m", "trainfast_runner.running.supervisor", "--standby")
            self._standby = WarmPython(key, words, order, os.environ)

    def take(self, wanted: StandbyKey | None, *, waits: bool = True) -> tuple[WarmPython | None, str]:
        """Return the standby for a run with this key, or None with the reason, which is empty where none was kept.

        Either way no warm Python is left: a run has the machine to itself.
        """
        with self._lock:
            standby, self._standby = self._standby, None
            self._end_asked()
            if standby is None:
                return None, ""
            reason = "the standby died" if not standby.is_alive else standby.key.difference(wanted) if wanted else ""
            if wanted is not None and not reason:
                return standby, ""
            standby.end(waits=waits)
            return None, reason

    def close(self, *, waits: bool = True) -> None:
        """End all, and return at once where nobody `waits` for a standby. The next question starts a new process."""
        self.take(None, waits=waits)
        with self._lock:
            self._end_asked(CANCELLED_WITHIN_S)

    def _standby_that_answers(self, executable: str) -> WarmPython | None:
        """Return the standby if it is of this Python as it is now, and one process alone."""
        standby = self._standby
        if standby is None or not standby.is_alive or standby.key.python != executable or standby.key.ranks:
            return None
        return standby if standby.key.packages == tuple(training_python.install_stamps(executable)) else None

    def _end_asked(self, within_s: float | None = None) -> None:
        """End the process that only answers; one that answers now stays, but for `within_s` seconds at most."""
        if self._asked is not None and (within_s is not None or self._asked.is_idle):
            self._asked.end(within_s or 0.0)
            self._asked = None

    def _answering(self, executable: str, variables: Mapping[str, str]) -> WarmPython:
        """Return the process that only answers, made anew for other variables or packages."""
        installed = tuple(training_python.install_stamps(executable))
        key = StandbyKey(executable, "", 0, tuple(sorted(variables.items())), installed)
        with self._lock:
            if self._asked is None or not self._asked.is_alive or self._asked.key != key:
                self._end_asked()
                # An option would have `ls` tell of it alone, and not that it is no Python.
                self._asked = WarmPython(key, (executable, str(BOOTSTRAP), "standby"), {"imports": None}, variables)
            return self._asked


WARM = WarmPythons()
"""Those of this program."""


INSPECTION_FORMAT = "4"
"""Format of the cached inspections."""


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `inspect`."""

    executable: str
    python: str = ""
    """Its version."""
    versions: dict[str, str | None] = {}
    config: dict[str, Any] = {}
    """The model's whole configuration."""
    parameters: int | None = None
    """None unless asked for."""
    attentions: tuple[str, ...] | None = None
    """Values of `attention` that the model has; None unless asked for."""
    families: dict[str, tuple[str, ...]] = {}
    """Model types that a package has code for, by package."""


def inspect(
    python: str | None,
    model: dict[str, Any],
    training_objective: str,
    *,
    count: bool = False,
    attention: bool = False,
    lora_targets: str = "",
) -> Inspection:
    """Inspect the training Python's packages, and the model's configuration by its transformers.

    Takes about a second the first time and is remembered until something is installed there. With `count` torch is
    imported and the parameters are counted without memory, with `attention` to ask the model's class, and with
    `lora_targets` to look for the layers of these names. Raises UserError.
    """
    executable = training_python.find_python(python)
    asked = {"model": model, "objective": training_objective, "count": count, "attention": attention}
    request = {"part": "inspect", **asked, "lora_targets": lora_targets}
    name = training_python.request_hash(executable, json.dumps(request, sort_keys=True), INSPECTION_FORMAT)
    cache_file = cache_directory() / "inspected" / f"{name}.json"
    error, inspection = None, read_cached(cache_file, Inspection)
    if inspection is None:
        answer = WARM.ask(executable, request)
        error, inspection = answer.get("error"), msgspec.convert({**answer, "executable": executable}, Inspection)
        if not error:
            write_cached(cache_file, inspection)
    missing = [name for name in training_python.NEEDED_PACKAGES if inspection.versions.get(name, "") is None]
    if missing:
        install = f"{executable} -m pip install {' '.join(missing)}"
        raise UserError(f"{executable} has no {', '.join(missing)}; install with: {install}", key="python")
    if error:
        raise training_python.model_error(error)
    return inspection


def packages(executable: str, task: str = "report its torch") -> dict[str, Any]:
    """`python` and `versions` of a Python. Raises UserError, about the `task`, for what is not a Python."""
    request = {"part": "inspect", "model": {}, "objective": "", "count": False, "attention": False}
    return WARM.ask(executable, request, task)


def torch_build(executable: str) -> dict[str, str | None]:
    """`torch`, `torch.version.cuda` and `torch.version.hip` of a Python, as `Inspection.versions` has them.

    Raises UserError for what is not a Python.
    """
    versions = packages(executable)["versions"]
    return {name: versions.get(name) for name in ("torch", "torch.version.cuda", "torch.version.hip")}

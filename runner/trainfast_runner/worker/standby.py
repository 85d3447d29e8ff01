"""The standby: a training process with its imports done that waits for its run, and answers questions in forks.

`PY bootstrap.py standby ORDER`, alone or as each rank of `torch.distributed.run`. The fields of ORDER, in JSON:
`imports` is `[device, model, objective]` of the runs to come, null for a process that only answers; `questions` is the
descriptor of the asker's socket, or null.

Standard input is a socket of packets, the same for all ranks. This process sends `ready` once its imports are done,
takes one packet, the go, with the fields `run` (its directory), `variables` and `cwd`, sends `gone`, and trains. It
starts no device, no thread and no model before. Once the other end of the socket is closed it ends within `LOOK_S`.

A line of the asker is JSON: `{"batch": N, "requests": [...], "devices": {...}}` with the fields of `TraceRequest`s or
of one inspection and the variables that choose the GPUs, one batch at a time, or `{"cancel": N}`. Answers carry
`batch`, and `request`, the index of their request: they may come in another order. `{"imported": true}` precedes the
first answers of a process that imported for them, and `{"done": N}` follows when nothing of the batch runs any more.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .model.inspection import HIDDEN_PACKAGES, hide_packages, import_stack, inspect
from .shared.process import die_with_parent

STDIN = 0
READ_BYTES = 1 << 16
"""Most bytes of a socket read at once; a go has a tenth of that."""
LOOK_S = 0.5
"""Chosen, not measured: seconds between two looks for the end of the parent while this process imports."""
BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def wait(order: dict[str, Any]) -> str:
    """Import, answer and wait; return the directory of the run. Ends the process where no run comes."""
    go = socket.socket(fileno=STDIN)
    asker = None if order["questions"] is None else Asker(socket.socket(fileno=order["questions"]))
    if order["imports"] is not None:
        with _ending_with(go):
            _import_for_run(*order["imports"])
        go.send(b"ready")
    while True:
        # One may have been read during the batch before.
        while asker is not None and (batch := asker.next_batch()) is not None:
            _answer_batch(batch, asker, go)
        if asker is not None and asker.is_over:
            asker = None
        readable = select.select([go, *([asker.socket] if asker is not None else [])], [], [])[0]
        if go in readable:
            return _take(go, asker)
        assert asker is not None
        asker.read()


@contextmanager
def _ending_with(go: socket.socket) -> Iterator[None]:
    """Imports in which this process still ends within `LOOK_S` once the other end of `go` is closed."""
    poll = select.poll()
    poll.register(go, 0)

    def look(_number: int, _frame: Any) -> None:
        if poll.poll(0):
            os._exit(0)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _take(go: socket.socket, asker: Asker | None) -> str:
    """Take the go: become the run's process as a cold one begins. Ends this process where there is no go."""
    packet = go.recv(READ_BYTES)
    if not packet:
        os._exit(0)
    order = json.loads(packet)
    set_variables(order["variables"])
    if order["cwd"]:
        os.chdir(order["cwd"])
    go.send(b"gone")
    if asker is not None:
        asker.socket.close()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), go.detach())
    return str(order["run"])


def set_variables(variables: dict[str, str | None]) -> None:
    """Set environment variables, and remove those that are None. CUDA reads its own when it starts."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _import_for_run(device: str, model: dict[str, Any], objective: str) -> None:
    """Import what a run of this model imports before its memory is counted. The run reports a missing package."""
    from .memory.allocator import Allocator

    if device == "cpu":
        # As in a run: large blocks freed on the heap would take tensors later.
        Allocator().set_strict()
    gc.disable()
    # As a run hides it.
    hide_packages(("torchao",))
    # numpy's OpenBLAS starts its threads when it is imported, and a process with threads is no good to fork.
    own = os.environ.get(BLAS_THREADS)
    set_variables({BLAS_THREADS: "1"})
    with suppress(ImportError):
        importlib.import_module("numpy")
    set_variables({BLAS_THREADS: own})
    with suppress(ImportError):
        importlib.import_module(".training", __package__)
        import_stack([(model, objective)])
    gc.freeze()


class Asker:
    """The other end of the questions: its lines, read only when there is input, and the answers to it."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._partial_line = b""
        self._waiting: list[dict[str, Any]] = []
        self.is_over = False

    def read(self) -> None:
        """Read the lines in the socket; block while it is empty."""
        chunk = b""
        with suppress(ConnectionResetError):  # closed before it had read the last answer
            chunk = self.socket.recv(READ_BYTES)
        self.is_over = not chunk
        *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
        self._waiting += [json.loads(line) for line in lines]

    def next_batch(self) -> dict[str, Any] | None:
        """Return the next batch that was read; None if there is none."""
        while self._waiting:
            line = self._waiting.pop(0)
            if "requests" in line:
                return line
        return None

    def cancels(self, batch: int) -> bool:
        """True if a line read before cancels this batch."""
        return {"cancel": batch} in self._waiting

    def send(self, line: dict[str, Any]) -> None:
        """Send a line, from here or from a fork."""
        # A fork that was killed may have left half a line.
        with suppress(OSError):  # the asker is gone
            self.socket.sendall(b"\n" + json.dumps(line, default=str).encode() + b"\n")


def _answer_batch(batch: dict[str, Any], asker: Asker, go: socket.socket) -> None:
    """Answer a batch in a fork, and return when the fork and its own forks have ended."""
    with _ending_with(go):
        _import_for_answers(batch["requests"], asker)
    alive_pipe, child_end = os.pipe()
    server, child = os.getpid(), os.fork()
    if child == 0:
        os.close(alive_pipe)
        go.close()
        set_variables(batch["devices"])
        _answer(batch, asker, server)
    os.close(child_end)
    with suppress(OSError):  # the child has set its own group
        os.setpgid(child, child)
    try:
        # The cancel may have been read together with its batch.
        while not asker.is_over and not asker.cancels(batch["batch"]):
            readable = select.select([go.fileno(), asker.socket.fileno(), alive_pipe], [], [])[0]
            # The pipe ends when neither the child nor its forks have it open. A run, or the end, goes first.
            if {alive_pipe, go.fileno()} & {*readable}:
                break
            asker.read()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(alive_pipe)
    asker.send({"done": batch["batch"]})


def _import_for_answers(requests: list[dict[str, Any]], asker: Asker) -> None:
    """Import the stack here, once for all forks, where a request needs it: an inspection may do without torch."""
    asking = ("count", "attention", "lora_targets")
    needing = [one for one in requests if one["part"] != "inspect" or any(one.get(name) for name in asking)]
    if not needing or "torch" in sys.modules:
        return
    logging.disable(logging.WARNING)
    # Before anything imports transformers, which looks for each package once.
    hide_packages(HIDDEN_PACKAGES)
    gc.disable()
    with suppress(Exception):  # the fork meets the same error, and answers with it
        import_stack([(request["model"], request["objective"]) for request in needing])
    # Imported modules stay: no collection looks at them, and no fork copies them.
    gc.freeze()
    asker.send({"imported": True})


def _answer(batch: dict[str, Any], asker: Asker, server: int) -> None:
    """Answer in the child, as a process group of its own, so that one signal ends the child and its forks."""
    requests = batch["requests"]
    try:
        os.setpgid(0, 0)
        die_with_parent()
        if os.getppid() != server:
            return
        gc.enable()
        for answer in _answers(requests):
            asker.send({"batch": batch["batch"], **answer})
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(0)


def _answers(requests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the answers, all of inspections or all of traces."""
    if requests[0]["part"] == "inspect":
        yield from ({"request": number, **inspect(**request)} for number, request in enumerate(requests))
    else:
        from .memory_trace.answers import traced

        yield from traced(requests)

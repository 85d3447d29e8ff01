"""A program in a pseudo-terminal: its output is read and counted, and its questions are answered."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FRAME_SILENCE_S = 0.020
"""Two bursts of output with a longer silence between them are two frames."""
PAINTED_CHARACTERS = 200
"""A frame with more printable characters than this counts as the screen's content."""
GRACE_S = 5.0
"""Seconds that the program may take to leave after SIGTERM."""


_CONTROL = re.compile(
    r"\x1b[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-~]|[\x00-\x1f\x7f]"
)
_QUERY = re.compile(rb"\x1b\[(?:\?(\d+)\$p|(\?u)|(>?)c|(6n)|(1[468])t)|\x1b\](1[01]);\?(?:\x07|\x1b\\)")
# A query or a character may be cut in two by the reads; no query is longer than this.
_LONGEST_QUERY = 16


class Ended(RuntimeError):
    """The program ended before it was measured. The message carries its status and last output."""


@dataclass(slots=True)
class Output:
    """The output of the program so far; times are of the monotonic clock in seconds."""

    started_s: float
    until: str | None
    first_byte_s: float | None = None
    painted_s: float | None = None
    painted_frame: int | None = None
    frames: list[tuple[float, int]] = field(default_factory=list)
    tail: bytes = b""
    _frame_text: bytes = b""
    _last_s: float = 0.0
    _queries: bytes = b""

    def take(self, chunk: bytes, now_s: float) -> bytes:
        """Account for a chunk; returns the terminal's answers to the queries in it."""
        if self.first_byte_s is None:
            self.first_byte_s = now_s
        if not self.frames or now_s - self._last_s > FRAME_SILENCE_S:
            self.frames.append((now_s, 0))
            self._frame_text = b""
        self._last_s = now_s
        self.frames[-1] = (self.frames[-1][0], self.frames[-1][1] + len(chunk))
        self.tail = (self.tail + chunk)[-65536:]
        if self.painted_s is None:
            self._frame_text += chunk
            source = self.tail if self.until else self._frame_text
            text = _CONTROL.sub("", source.decode("utf-8", "replace"))
            if self.until in text if self.until else len(text) > PAINTED_CHARACTERS:
                self.painted_s, self.painted_frame = now_s, len(self.frames) - 1
        return self._answers(chunk)

    def _answers(self, chunk: bytes) -> bytes:
        pending = self._queries + chunk
        answers = b""
        end = 0
        for query in _QUERY.finditer(pending):
            end = query.end()
            mode, keyboard, secondary, position, window, colour = query.groups()
            if mode is not None:
                # Synchronized output is offered, as current terminals do; nothing else is.
                answers += b"\x1b[?%s;%d$y" % (mode, 2 if mode == b"2026" else 0)
            elif keyboard is not None:
                answers += b"\x1b[?0u"
            elif position is not None:
                answers += b"\x1b[1;1R"
            elif colour is not None:
                level = b"ffff" if colour == b"10" else b"0000"
                answers += b"\x1b]%s;rgb:%s\x07" % (colour, b"/".join([level] * 3))
            elif window is None:
                answers += b"\x1b[>0;276;0c" if secondary else b"\x1b[?62;22c"
        rest = pending[end:]
        start = rest.rfind(b"\x1b", max(0, len(rest) - _LONGEST_QUERY))
        self._queries = rest[start:] if start >= 0 else b""
        return answers


@contextlib.contextmanager
def started(
    command: Sequence[str],
    *,
    columns: int = 160,
    rows: int = 48,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    until: str | None = None,
) -> Iterator["Program"]:
    """`command` in a terminal of its own, ended at the end; arguments as of `pty_meter.measure`."""
    environment = {**os.environ, "TERM": "xterm-256color", **(env or {})}
    for name in ("COLUMNS", "LINES"):
        if name not in (env or {}):
            # They would overrule the size of the terminal.
            environment.pop(name, None)
    started_s = time.monotonic()
    pid, terminal = _spawn(command, columns, rows, environment, cwd)
    try:
        process = os.pidfd_open(pid)
        try:
            yield Program(pid, process, terminal, Output(started_s, until))
        finally:
            _end(process, terminal)
            os.close(process)
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


@dataclass(frozen=True)
class Program:
    """A program in its terminal."""

    pid: int
    process: int
    """A file descriptor of the process."""
    terminal: int
    output: Output

    @property
    def cpu_s(self) -> float:
        """The processor time that it has used, in seconds."""
        return _cpu_seconds(self.pid)

    def read(
        self, end_s: float, typed: list[tuple[float, str]] | None = None, *, until_painted: bool = False
    ) -> list[tuple[float, str]]:
        """Take its output until this moment of the monotonic clock, typing what is due; what is still to be typed.

        Raises `Ended`.
        """
        return _drain(self.pid, self.terminal, self.output, end_s, typed, until_painted=until_painted)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        signal.pidfd_send_signal(self.process, number)


def _spawn(
    command: Sequence[str], columns: int, rows: int, environment: Mapping[str, str], cwd: str | Path | None
) -> tuple[int, int]:
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            # Before the program starts, or it would read a size of 0x0.
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            if cwd is not None:
                os.chdir(cwd)
            os.execvpe(command[0], list(command), environment)
        except OSError as error:
            os.write(2, f"cannot start {command[0]}: {error}\n".encode())
        os._exit(127)
    return pid, terminal


def _drain(
    pid: int,
    terminal: int,
    output: Output,
    end_s: float,
    typed: list[tuple[float, str]] | None = None,
    *,
    until_painted: bool = False,
) -> list[tuple[float, str]]:
    """Read output until `end_s`, typing what is due; returns what is still to be typed."""
    waiting = list(typed or [])
    while (now_s := time.monotonic()) < end_s and not (until_painted and output.painted_s is not None):
        while waiting and waiting[0][0] <= now_s:
            os.write(terminal, waiting.pop(0)[1].encode())
        wake_s = min(end_s, waiting[0][0]) if waiting else end_s
        readable, _, _ = select.select([terminal], [], [], max(0.0, wake_s - now_s))
        if not readable:
            continue
        try:
            chunk = os.read(terminal, 1 << 16)
        except OSError:
            chunk = b""
        if not chunk:
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            code = status.si_status if status is not None else "unknown"
            shown = _CONTROL.sub(" ", output.tail.decode("utf-8", "replace"))[-2000:].strip()
            raise Ended(f"the program ended with status {code} before it was measured: {shown}")
        if answers := output.take(chunk, time.monotonic()):
            os.write(terminal, answers)
    return waiting


def _end(process: int, terminal: int) -> None:
    """Ask the program to leave, reading on so that it is not stuck in a write; then insist."""
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
        # To one that was stopped, a signal comes only when it goes on.
        signal.pidfd_send_signal(process, signal.SIGCONT)
    except ProcessLookupError:
        return
    end_s = time.monotonic() + GRACE_S
    sources = [process, terminal]
    while (now_s := time.monotonic()) < end_s:
        readable, _, _ = select.select(sources, [], [], end_s - now_s)
        if process in readable:
            return
        if terminal in readable:
            try:
                chunk = os.read(terminal, 1 << 16)
            except OSError:
                chunk = b""
            if not chunk:
                sources = [process]
    signal.pidfd_send_signal(process, signal.SIGKILL)


def _cpu_seconds(pid: int) -> float:
    # The name in field 2 may hold spaces and brackets; utime and stime are fields 14 and 15 (proc_pid_stat(5)).
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

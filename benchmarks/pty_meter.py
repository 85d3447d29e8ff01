"""What a terminal program costs: it runs in a pseudo-terminal, and what it sends and uses is measured.

    python -m benchmarks.pty_meter --seconds 10 -- trainfast-tui monitor
    python -m benchmarks.pty_meter --size 80x24 --until Presets --key 2:q --json -- trainfast-tui

Linux only: the figures come from `/proc`. CPU counts the program itself and not its children.
"""

import argparse
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

FRAME_SILENCE_S = 0.020
"""Two bursts of output with a longer silence between them are two frames."""
PAINTED_CHARACTERS = 200
"""A frame with more printable characters than this counts as the screen's content."""
GRACE_S = 5.0
"""How long the program may take to leave after SIGTERM."""

_CONTROL = re.compile(
    r"\x1b[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-~]|[\x00-\x1f\x7f]"
)
_QUERY = re.compile(rb"\x1b\[(?:\?(\d+)\$p|(\?u)|(>?)c|(6n)|(1[468])t)|\x1b\](1[01]);\?(?:\x07|\x1b\\)")
# A query or a character may be cut in two by the reads; no query is longer than this.
_LONGEST_QUERY = 16


class Ended(RuntimeError):
    """The program ended before it was measured. The message carries its status and last output."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of one program. Absent ones are None."""

    command: tuple[str, ...]
    columns: int
    rows: int
    seconds: float
    """The length of the window in which CPU and output were measured."""
    first_byte_ms: float | None
    """From the start of the program to its first output."""
    first_paint_ms: float | None
    """From the start to the awaited text, or to the first frame with the screen's content."""
    first_frame_bytes: int | None
    """The frame with the first paint."""
    cpu_percent: float
    """Of one core, user and system time, over the window."""
    bytes_per_s: float
    frames: int
    largest_frame_bytes: int
    """Over the window, the first paint not included."""
    rss_mib: float | None
    pss_mib: float | None


@dataclass(slots=True)
class _Output:
    """What came from the program so far; times are of the monotonic clock in seconds."""

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


def measure(
    command: Sequence[str],
    *,
    columns: int = 160,
    rows: int = 48,
    seconds: float = 10.0,
    settle: float = 2.0,
    until: str | None = None,
    paint_timeout: float = 30.0,
    keys: Sequence[tuple[float, str]] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> Measurement:
    """Run `command` in a terminal of `columns` x `rows` and measure it for `seconds`.

    The window begins `settle` seconds after the first paint. First paint is when `until` stands in the output
    (control sequences removed; a text that crosses a line or a colour is not found as one), or without it when
    the first frame exceeds `PAINTED_CHARACTERS`; it is waited for `paint_timeout` seconds, then given up.
    `keys` are (seconds after first paint, text) to type. `env` is added to the environment.

    Raises `Ended` when the program ends before the window does.
    """
    environment = {**os.environ, "TERM": "xterm-256color", **(env or {})}
    for name in ("COLUMNS", "LINES"):
        if name not in (env or {}):
            # They would overrule the size of the terminal.
            environment.pop(name, None)
    started_s = time.monotonic()
    pid, terminal = _spawn(command, columns, rows, environment, cwd)
    output = _Output(started_s, until)
    try:
        process = os.pidfd_open(pid)
        try:
            _drain(pid, terminal, output, started_s + paint_timeout, until_painted=True)
            origin_s = time.monotonic() if output.painted_s is None else output.painted_s
            typed = sorted((origin_s + at, text) for at, text in keys)
            begin_s = origin_s + settle
            typed = _drain(pid, terminal, output, begin_s, typed)
            cpu_before, window_start = _cpu_seconds(pid), time.monotonic()
            _drain(pid, terminal, output, window_start + seconds, typed)
            cpu_after, window_end = _cpu_seconds(pid), time.monotonic()
            rss_mib, pss_mib = _memory_mib(pid)
        finally:
            _end(process, terminal)
            os.close(process)
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    length = window_end - window_start
    sizes = [
        size
        for index, (at, size) in enumerate(output.frames)
        if window_start <= at < window_end and index != output.painted_frame
    ]
    return Measurement(
        command=tuple(command),
        columns=columns,
        rows=rows,
        seconds=length,
        first_byte_ms=_since(output.first_byte_s, started_s),
        first_paint_ms=_since(output.painted_s, started_s),
        first_frame_bytes=None if output.painted_frame is None else output.frames[output.painted_frame][1],
        cpu_percent=100 * (cpu_after - cpu_before) / length,
        bytes_per_s=sum(sizes) / length,
        frames=len(sizes),
        largest_frame_bytes=max(sizes, default=0),
        rss_mib=rss_mib,
        pss_mib=pss_mib,
    )


def _since(at_s: float | None, started_s: float) -> float | None:
    return None if at_s is None else (at_s - started_s) * 1e3


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
    output: _Output,
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


def _memory_mib(pid: int) -> tuple[float | None, float | None]:
    """Resident and proportional set size in MiB; None where the kernel does not tell."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None, None
    found = dict(re.findall(r"^(Rss|Pss):\s+(\d+) kB", text, re.MULTILINE))
    rss, pss = found.get("Rss"), found.get("Pss")
    return (None if rss is None else int(rss) / 1024), (None if pss is None else int(pss) / 1024)


def table(measurements: Mapping[str, Measurement]) -> str:
    """One aligned line for each named measurement."""
    head = ("", "first paint", "CPU", "output", "largest frame", "frames", "RSS", "PSS")
    lines = [head]
    for name, m in measurements.items():
        lines.append(
            (
                name,
                _figure(m.first_paint_ms, "ms", 0),
                _figure(m.cpu_percent, "%", 2),
                _figure(m.bytes_per_s / 1e3, "kB/s", 2),
                _figure(m.largest_frame_bytes / 1e3, "kB", 2),
                str(m.frames),
                _figure(m.rss_mib, "MiB", 1),
                _figure(m.pss_mib, "MiB", 1),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if column else text.ljust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _figure(value: float | None, unit: str, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f} {unit}"


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,4})x(\d{1,4})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not COLUMNSxROWS, for example 160x48")
    return int(match[1]), int(match[2])


def _timed_key(text: str) -> tuple[float, str]:
    at, separator, key = text.partition(":")
    try:
        return float(at), key.encode().decode("unicode_escape") if separator else ""
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not SECONDS:TEXT, for example 1.5:q") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Measure what a terminal program costs.")
    parser.add_argument("--size", type=_size, default=(160, 48), metavar="COLUMNSxROWS")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the window (default 10)")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds before the window (default 2)")
    parser.add_argument("--until", metavar="TEXT", help="the text whose appearance is the first paint")
    parser.add_argument(
        "--key",
        type=_timed_key,
        action="append",
        default=[],
        metavar="SECONDS:TEXT",
        help="type TEXT that long after the first paint; escapes such as \\x1b are understood",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("command", nargs="+", help="the program and its arguments, after --")
    options = parser.parse_args(arguments)
    columns, rows = options.size
    try:
        result = measure(
            options.command,
            columns=columns,
            rows=rows,
            seconds=options.seconds,
            settle=options.settle,
            until=options.until,
            keys=options.key,
        )
    except Ended as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(asdict(result)))
    else:
        print(table({Path(options.command[0]).name: result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

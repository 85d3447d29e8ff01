"""The cost of a terminal program: it runs in a pseudo-terminal, where its output and its CPU time are measured.

    python -m benchmarks.pty_meter --seconds 10 -- trainfast-tui monitor
    python -m benchmarks.pty_meter --size 80x24 --until Presets --key 2:q --json -- trainfast-tui

Linux only: the figures come from `/proc`. CPU counts the program itself and not its children.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.in_terminal import Ended, started


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
    """The share of one core, user and system time, over the window."""
    bytes_per_s: float
    frames: int
    largest_frame_bytes: int
    """Over the window, the first paint not included."""
    rss_mib: float | None
    pss_mib: float | None


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
    with started(command, columns=columns, rows=rows, env=env, cwd=cwd, until=until) as program:
        output = program.output
        program.read(output.started_s + paint_timeout, until_painted=True)
        origin_s = time.monotonic() if output.painted_s is None else output.painted_s
        typed = sorted((origin_s + at, text) for at, text in keys)
        typed = program.read(origin_s + settle, typed)
        cpu_before, window_start = program.cpu_s, time.monotonic()
        program.read(window_start + seconds, typed)
        cpu_after, window_end = program.cpu_s, time.monotonic()
        rss_mib, pss_mib = _memory_mib(program.pid)
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
        first_byte_ms=_since(output.first_byte_s, output.started_s),
        first_paint_ms=_since(output.painted_s, output.started_s),
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


def _memory_mib(pid: int) -> tuple[float | None, float | None]:
    """Resident and proportional set size in MiB; None where the kernel does not tell."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None, None
    sizes_kb = dict(re.findall(r"^(Rss|Pss):\s+(\d+) kB", text, re.MULTILINE))
    rss, pss = sizes_kb.get("Rss"), sizes_kb.get("Pss")
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

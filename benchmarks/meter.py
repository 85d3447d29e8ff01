"""Measure a program in a pseudo-terminal, and what every benchmark shares: the product's command, budgets, options.

    python -m benchmarks.meter [--seconds 10] [--settle 2] [--key 1:m] [--json] -- trainfast-tui

Linux only: the figures come from `/proc`. CPU counts the program itself and not its children.
"""

import argparse
import compileall
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import statistics
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Row = tuple[str, str, str, bool]
"""Subject, measured, budget, True if it is held."""
Json = dict[str, Any]

SIZE = (48, 160)
"""Rows and columns."""
CPU_PERCENT, KB_PER_S, FRAME_KB, RSS_MIB = 5.0, 20.0, 10.0, 90.0
"""Budgets of a screen with a live run at 160x48."""
FRAME_SILENCE_S = 0.020
"""Two bursts of output with a longer silence between them are two frames."""
PAINTED_CHARACTERS = 200
"""A frame with more printable characters than this counts as the screen's content."""
PAINT_WITHIN_S, GRACE_S, STEPS_WITHIN_S = 30.0, 5.0, 180.0
"""How long to wait for the first paint, for the end after SIGTERM, and for the steps of a live run."""

_CONTROL = re.compile(
    r"\x1b[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-~]|[\x00-\x1f\x7f]"
)
_MODE_QUERY = re.compile(rb"\x1b\[\?(\d+)\$p")
SYNCHRONIZED_OUTPUT = b"2026"
# A query or a character may be cut in two by the reads; no query is longer than this.
_LONGEST_QUERY = 16


def at_most(what: str, measured: float, most: float, unit: str, *, digits: int = 0, more: str = "") -> Row:
    """A figure that must not exceed `most`, both in `unit`; `more` stands behind the measured one."""
    return what, f"{measured:,.{digits}f} {unit}{more}", f"<= {most:,g} {unit}", measured <= most


def print_table(rows: Sequence[Row]) -> int:
    """Print the rows in columns; the exit status, 1 when a budget is not held."""
    print_columns([(*texts, "held" if held else "NOT HELD") for *texts, held in rows])
    return 0 if all(held for *_, held in rows) else 1


def print_columns(lines: Sequence[Sequence[str]]) -> None:
    """Print lines of as many cells each, aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def options(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser of one option for each default, in its type; a list takes several values."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, list):
            parser.add_argument(flag, nargs="+", action="extend", default=[])
        else:
            parser.add_argument(flag, type=type(default), default=default, help=f"default {default}")
    return parser


@cache
def app() -> tuple[str, ...]:
    """The command `trainfast-tui` with every file compiled, as pip leaves it: else a read-only tree compiles each time.

    The module that it calls where no script is beside the interpreter.
    """
    for package in ("trainfast_runner", "trainfast_tui"):
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            compileall.compile_dir(folder, quiet=1)
    script = Path(sys.executable).with_name("trainfast-tui")
    return (str(script),) if script.exists() else (sys.executable, "-m", "trainfast_tui.cli")


def settings_of(settings: Sequence[str]) -> list[str]:
    """`--set` before each setting."""
    return [word for setting in settings for word in ("--set", setting)]


def cli(*words: str, env: Mapping[str, str] | None = None) -> Json:
    """The JSON object that a command of the product prints last, whatever its exit code."""
    command = [sys.executable, "-m", "trainfast_tui.cli", *words, "--json"]
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    answer: Json = json.loads(done.stdout.splitlines()[-1])
    return answer


class Ended(RuntimeError):
    """The program ended before it was measured. The message carries its status and last output."""


class Program:
    """A program in a terminal of its own, whose output is counted and whose questions are answered.

    Times are seconds of the monotonic clock. The first paint is a frame of `PAINTED_CHARACTERS`.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: str | Path | None = None) -> None:
        environment = {**os.environ, **env, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES"):
            # They would overrule the size of the terminal.
            environment.pop(name, None)
        self.started_s = time.monotonic()
        self.painted_s: float | None = None
        self.painted_frame: int | None = None
        self.frames: list[tuple[float, int]] = []
        """The begin of each frame and its bytes."""
        self.tail = b""
        self._frame_text, self._last_s, self._queries = b"", 0.0, b""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            try:
                # Before the program starts, or it would read a size of 0x0.
                fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", *SIZE, 0, 0))
                os.chdir(cwd or ".")
                os.execvpe(command[0], list(command), environment)
            except OSError as error:
                os.write(2, f"cannot start {command[0]}: {error}\n".encode())
            os._exit(127)
        self._process = os.pidfd_open(self.pid)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        """Ask the program to leave, reading on so that it is not stuck in a write; then insist."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGTERM)
            # A stopped program gets a signal only when it goes on.
            self.signal(signal.SIGCONT)
            end_s = time.monotonic() + GRACE_S
            sources = [self._process, self._terminal]
            while self._process not in (ready := select.select(sources, [], [], max(0, end_s - time.monotonic()))[0]):
                if not ready:
                    self.signal(signal.SIGKILL)
                    break
                if not self._read():
                    sources = [self._process]
        os.close(self._process)
        os.close(self._terminal)
        os.waitpid(self.pid, 0)

    @property
    def cpu_s(self) -> float:
        """The processor time that the program has used, in seconds."""
        # The name in field 2 may hold spaces and brackets; utime and stime are fields 14 and 15 (proc_pid_stat(5)).
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def rss_mib(self) -> float | None:
        """Resident set size; None where the kernel does not tell."""
        try:
            text = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        except OSError:
            return None
        found = re.search(r"^Rss:\s+(\d+) kB", text, re.MULTILINE)
        return int(found[1]) / 1024 if found else None

    def signal(self, number: signal.Signals) -> None:
        """Send the program a signal."""
        signal.pidfd_send_signal(self._process, number)

    def read(
        self, end_s: float, typed: Sequence[tuple[float, str]] = (), *, until_painted: bool = False
    ) -> list[tuple[float, str]]:
        """Take output until this moment, typing what is due; returns what is still to be typed. Raises `Ended`."""
        waiting = list(typed)
        while (now_s := time.monotonic()) < end_s and not (until_painted and self.painted_s is not None):
            while waiting and waiting[0][0] <= now_s:
                os.write(self._terminal, waiting.pop(0)[1].encode())
            wake_s = min(end_s, waiting[0][0]) if waiting else end_s
            if not select.select([self._terminal], [], [], max(0.0, wake_s - now_s))[0]:
                continue
            if not (chunk := self._read()):
                status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
                shown = _CONTROL.sub(" ", self.tail.decode("utf-8", "replace"))[-2000:].strip()
                raise Ended(f"the program ended with status {status and status.si_status}: {shown}")
            self._count(chunk, time.monotonic())
            if answers := self._answers(chunk):
                os.write(self._terminal, answers)
        return waiting

    def _read(self) -> bytes:
        try:
            return os.read(self._terminal, 1 << 16)
        except OSError:
            return b""

    def _count(self, chunk: bytes, now_s: float) -> None:
        if not self.frames or now_s - self._last_s > FRAME_SILENCE_S:
            self.frames.append((now_s, 0))
            self._frame_text = b""
        self._last_s = now_s
        self.frames[-1] = (self.frames[-1][0], self.frames[-1][1] + len(chunk))
        self.tail = (self.tail + chunk)[-65536:]
        if self.painted_s is None:
            self._frame_text += chunk
            if len(_CONTROL.sub("", self._frame_text.decode("utf-8", "replace"))) > PAINTED_CHARACTERS:
                self.painted_s, self.painted_frame = now_s, len(self.frames) - 1

    def _answers(self, chunk: bytes) -> bytes:
        """The terminal's answers to the modes asked for in a chunk: as current terminals do, it has but one of them."""
        pending, end = self._queries + chunk, 0
        answers = b""
        for query in _MODE_QUERY.finditer(pending):
            end = query.end()
            answers += b"\x1b[?%s;%d$y" % (query[1], 2 if query[1] == SYNCHRONIZED_OUTPUT else 0)
        self._queries = pending[end:][-_LONGEST_QUERY:]
        return answers


@dataclass(frozen=True)
class Measurement:
    """The figures of one program over a window; absent ones are None."""

    first_paint_ms: float | None
    """From the start of the program; this frame is not counted in what follows."""
    cpu_percent: float
    """The share of one core, user and system time."""
    bytes_per_s: float
    largest_frame_bytes: int
    rss_mib: float | None

    def budgets(self, where: str, cpu_percent: float = CPU_PERCENT) -> list[Row]:
        """The budgets of a screen."""
        return [
            at_most(f"CPU, {where}", self.cpu_percent, cpu_percent, "%", digits=1, more=" of a core"),
            at_most(f"to the terminal, {where}", self.bytes_per_s / 1e3, KB_PER_S, "kB/s", digits=1),
            at_most(f"largest frame, {where}", self.largest_frame_bytes / 1e3, FRAME_KB, "kB", digits=1),
            at_most(f"RSS, {where}", self.rss_mib or float("inf"), RSS_MIB, "MiB"),
        ]


def measure(
    command: Sequence[str],
    *,
    seconds: float = 10.0,
    settle: float = 2.0,
    keys: Sequence[tuple[float, str]] = (),
    env: Mapping[str, str] | None = None,
) -> Measurement:
    """Run a program in a terminal and measure it for `seconds`, from `settle` seconds after its first paint on.

    `keys` are (seconds after the first paint, text) to type; `env` is added to the environment. Raises `Ended`.
    """
    with Program(command, env or {}) as program:
        program.read(program.started_s + PAINT_WITHIN_S, until_painted=True)
        origin_s = program.painted_s or time.monotonic()
        typed = program.read(origin_s + settle, sorted((origin_s + at, text) for at, text in keys))
        cpu_s, begin_s = program.cpu_s, time.monotonic()
        program.read(begin_s + seconds, typed)
        cpu_s, end_s = program.cpu_s - cpu_s, time.monotonic()
        rss_mib, length_s = program.rss_mib, end_s - begin_s
    frames = [frame for place, frame in enumerate(program.frames) if place != program.painted_frame]
    sizes = [size for at_s, size in frames if begin_s <= at_s < end_s]
    return Measurement(
        first_paint_ms=None if program.painted_s is None else 1e3 * (program.painted_s - program.started_s),
        cpu_percent=100 * cpu_s / length_s,
        bytes_per_s=sum(sizes) / length_s,
        largest_frame_bytes=max(sizes, default=0),
        rss_mib=rss_mib,
    )


def first_paints_ms(*commands: Sequence[str], env: Mapping[str, str], times: int = 7) -> list[float]:
    """The median first paint of each program, in turn, so that a machine that grows slower does so for all."""
    paints = [
        [measure(each, seconds=0.3, settle=0.3, env=env).first_paint_ms or float("inf") for each in commands]
        for _ in range(times)
    ]
    return [statistics.median(column) for column in zip(*paints, strict=True)]


@contextlib.contextmanager
def live_run(environment: Mapping[str, str], settings: Sequence[str], steps: int) -> Iterator[Path]:
    """The directory of a run of `tiny-llama` that has taken so many `steps`.

    `environment` names a TRAINFAST_HOME of the benchmark's own, of which every run is stopped at the end, and when a
    signal ends the benchmark. Raises RuntimeError when the run takes no steps.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    runs = Path(environment["TRAINFAST_HOME"]) / "runs"
    try:
        directory = runs / cli("run", "tiny-llama", *settings_of(settings), "--detach", env=environment)["run_id"]
        deadline_s, path = time.monotonic() + STEPS_WITHIN_S, directory / "steps.jsonl"
        while not path.exists() or path.read_bytes().count(b"\n") < steps:
            if time.monotonic() > deadline_s or (directory / "result.json").exists():
                raise RuntimeError(f"the run takes no steps: see {directory}")
            time.sleep(0.2)
        yield directory
    finally:
        # By the home and not by its id: a signal may come before the id is known.
        for directory in runs.glob("*"):
            subprocess.run([*app(), "stop", directory.name, "--now"], env=environment, capture_output=True, check=False)


def main() -> int:
    """The command line; the exit status."""
    parser = options(__doc__, seconds=10.0, settle=2.0, key=[], json=False)
    parser.add_argument("command", nargs="+", help="the program and its arguments, after --")
    asked = parser.parse_args()
    timed = (text.partition(":") for text in asked.key)
    keys = [(float(at), key.encode().decode("unicode_escape")) for at, _, key in timed]
    try:
        seen = measure(asked.command, seconds=asked.seconds, settle=asked.settle, keys=keys)
    except Ended as error:
        print(error, file=sys.stderr)
        return 1
    if asked.json:
        print(json.dumps(asdict(seen)))
        return 0
    paint_ms = seen.first_paint_ms or float("inf")
    return print_table([at_most("first paint", paint_ms, 300, "ms"), *seen.budgets(Path(asked.command[0]).name)])


if __name__ == "__main__":
    sys.exit(main())

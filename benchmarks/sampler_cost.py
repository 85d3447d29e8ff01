"""The cost of the sampler at 1 Hz with eight GPUs and eight ranks, beyond the time of the NVML library itself.

    python -m benchmarks.sampler_cost [--seconds 20]

A tick is all that a supervisor does for one: the GPUs, the host, the run's processes, events and the line in
`telemetry.jsonl`. The library is the tests' compiled stand-in, unless this machine has a driver and `--real` is given.
Every call through `pynvml` is timed at the border to the library, so its own time can be taken off.

The budget is held to the mean of all ticks, since every third one looks for new processes and every fifth one at the
sensors. It is of wall time, in which other load shows: beside it stands the time that the sampler was ready and waited
for a processor.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.budget import Row, at_most, print_table

from trainfast_runner.machine.telemetry.host import HostReader
from trainfast_runner.machine.telemetry.sampler import Sampler
from trainfast_runner.records.telemetry_lines import TELEMETRY_CAP_BYTES
from trainfast_runner.records.tick import Tick
from trainfast_runner.running.supervision.telemetry_log import TelemetryLog

CPU_PERCENT = 1.0
TICK_MS = 2.0
LINE_BYTES = 14_000
"""64 MiB, from where on the file is thinned, then hold more than an hour of eight GPUs at 1 Hz."""
GPUS = 8
RANKS = 8
WARM_UP_TICKS = 3
"""They open the driver and import."""

Ramp = tuple[tuple[float, float, int, float, int], ...]
"""Lines of the stand-in scenario: second, degrees Celsius, throttle reasons, watts, SM clock in MHz."""
HEATING: Ramp = ((0, 60, 0, 300, 1980), (20, 88, 0x20, 220, 1200), (40, 60, 0, 320, 1980))
ON_AND_OFF: Ramp = ((0, 88, 0, 300, 1980), (3, 90, 0x20, 220, 1200))


@dataclass(frozen=True)
class Cost:
    """Over the measured ticks: means of a tick's wall time in ms, and CPU of the whole process."""

    ticks: int
    gpus: int
    tick_ms: float
    """A tick without what the library took: the three parts below."""
    median_tick_ms: float
    gpus_ms: float
    host_ms: float
    """The host and the run's processes."""
    record_ms: float
    """Events and the line in the file."""
    library_ms: float
    waited_ms: float | None
    """The part of `tick_ms` spent waiting for a processor; None where the kernel does not tell."""
    cpu_percent: float
    """The share of one core, user and system time, with the library's."""
    line_bytes: float
    """The median bytes of a tick in `telemetry.jsonl`."""


def rows(cost: Cost | None = None) -> list[Row]:
    """The budgets: what, measured, budget, held."""
    cost = cost or measure()
    waited = "" if cost.waited_ms is None else f"{cost.waited_ms:.2f} of it waiting for a processor, "
    return [
        at_most(
            f"sampler, {cost.gpus} GPUs and {RANKS} ranks at 1 Hz, library included: CPU",
            cost.cpu_percent,
            CPU_PERCENT,
            "%",
            digits=2,
            more=" of a core",
        ),
        at_most(
            f"sampler, {cost.gpus} GPUs and {RANKS} ranks, beyond the library: a tick, mean of {cost.ticks}",
            cost.tick_ms,
            TICK_MS,
            "ms",
            digits=2,
            more=f" (GPUs {cost.gpus_ms:.2f}, host {cost.host_ms:.2f}, record {cost.record_ms:.2f}; "
            f"{waited}median {cost.median_tick_ms:.2f} ms; library {cost.library_ms:.2f} ms)",
        ),
        at_most(
            f"telemetry.jsonl, {cost.gpus} busy GPUs: a tick, median",
            cost.line_bytes,
            LINE_BYTES,
            "bytes",
            more=f" ({cost.line_bytes * 3600 / 1e6:.1f} MB an hour at 1 Hz, thinned over"
            f" {TELEMETRY_CAP_BYTES / 1e6:.0f} MB)",
        ),
    ]


def measure(seconds: float = 20.0, *, real: bool = False, environment: Mapping[str, str] | None = None) -> Cost:
    """The sampler in a process of its own, for so long."""
    with tempfile.TemporaryDirectory() as folder:
        variables = dict(os.environ if real else environment or stand_in(Path(folder)))
        command = [sys.executable, "-m", "benchmarks.sampler_cost", "--child", "--seconds", str(seconds)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def stand_in(folder: Path, gpus: int = GPUS, ramp: Ramp = HEATING, period_s: float = 40.0) -> dict[str, str]:
    """An environment with so many GPUs whose readings change all the time, `ramp` again and again."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "nvml"))
    import shared_object
    from scenario import Moment, Scenario

    ramps = {gpu: [Moment(*line) for line in ramp] for gpu in range(gpus)}
    text = Scenario(time.monotonic_ns(), period_s, ramps).text()
    path = folder / "scenario"
    path.write_text(text + "memory * 20000\nprocess * 1 30000 0 1000000\ntraffic * 2e8 3e6\n")
    variables: dict[str, str] = shared_object.environment(shared_object.build(folder), gpus=gpus, scenario=path)
    return variables


def throttled_on_and_off(folder: Path, gpus: int = GPUS) -> dict[str, str]:
    """An environment in which every GPU is slowed down by heat for three seconds of every six."""
    return stand_in(folder, gpus, ON_AND_OFF, period_s=6.0)


class TimedLibrary:
    """The loaded library, with the time that is spent in it."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.wall_ns = 0

    def take_ns(self) -> int:
        """The time since the last call of this method."""
        taken, self.wall_ns = self.wall_ns, 0
        return taken

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        # The wait for Xid events takes no time of a tick: it is in a thread of its own.
        return function if name.startswith("nvmlEventSetWait") else TimedFunction(self, function)


class TimedFunction:
    """One function of the library."""

    def __init__(self, owner: TimedLibrary, function: Any) -> None:
        self._owner = owner
        self._function = function

    @property
    def restype(self) -> Any:
        """The type that the function returns to ctypes; pynvml sets it on some."""
        return self._function.restype

    @restype.setter
    def restype(self, value: Any) -> None:
        self._function.restype = value

    def __call__(self, *arguments: Any) -> Any:
        began_ns = time.perf_counter_ns()
        try:
            return self._function(*arguments)
        finally:
            self._owner.wall_ns += time.perf_counter_ns() - began_ns


@dataclass(frozen=True)
class Taken:
    """A tick, and what it cost."""

    tick: Tick
    library_ns: int
    record_ns: int
    waited_ns: int | None

    @property
    def gpus_ms(self) -> float:
        """Wall time that the GPUs took beyond the library."""
        return (self.tick.nvml_us or 0) * 1e-3 - self.library_ns * 1e-6

    @property
    def host_ms(self) -> float:
        """Wall time of the host's readings."""
        return (self.tick.sample_us - (self.tick.nvml_us or 0)) * 1e-3

    @property
    def ms(self) -> float:
        """Wall time of it all beyond the library."""
        return self.gpus_ms + self.host_ms + self.record_ns * 1e-6


class TimedSampler(Sampler):
    """Notes how long its threads have waited for a processor before each tick."""

    waited_ns: int | None = None

    def _follow(self, host: HostReader) -> None:
        super()._follow(host)
        self.waited_ns = waited_ns()


def waited_ns() -> int | None:
    """The time that the sampling threads have waited for a processor; None where the kernel does not tell."""
    threads = [thread for thread in threading.enumerate() if thread.name in ("telemetry-sampler", "nvml-calls")]
    try:
        # The second figure of schedstat (Documentation/scheduler/sched-stats of the kernel).
        return sum(
            int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[1]) for thread in threads
        )
    except (OSError, IndexError):
        return None


class TimedLog(TelemetryLog):
    """A run's telemetry, which keeps the ticks and what each cost; after so many `wanted` it is `full`."""

    def __init__(self, directory: Path, library: TimedLibrary, wanted: int) -> None:
        super().__init__(directory, [], on_event=lambda event: None, on_failure=print)
        self.taken: list[Taken] = []
        self.is_warm, self.is_full = threading.Event(), threading.Event()
        self._library, self._wanted = library, wanted
        self._timed = self._sampler = TimedSampler(self._write_tick, on_xid=self._xid)

    def _write_tick(self, tick: Tick) -> None:
        began_ns = time.monotonic_ns()
        super()._write_tick(tick)
        record_ns = time.monotonic_ns() - began_ns
        before, now = self._timed.waited_ns, waited_ns()
        waited = None if before is None or now is None else now - before
        self.taken.append(Taken(tick, self._library.take_ns(), record_ns, waited))
        if len(self.taken) == WARM_UP_TICKS:
            self.is_warm.set()
        if len(self.taken) >= WARM_UP_TICKS + self._wanted:
            self.is_full.set()


@contextlib.contextmanager
def processes_of_a_run() -> Iterator[int]:
    """A process with as many children as there are ranks, all of them asleep; its id."""
    command = ["sh", "-c", "sleep 3600 & " * RANKS + "wait"]
    root = subprocess.Popen(command, start_new_session=True)
    try:
        yield root.pid
    finally:
        os.killpg(root.pid, signal.SIGKILL)
        root.wait()


def child(seconds: float) -> Cost:
    """Sample in this process; the first ticks, which probe and import, are left out."""
    import pynvml

    pynvml.nvmlInit()
    library = TimedLibrary(pynvml.nvmlLib)
    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()
    with tempfile.TemporaryDirectory() as folder, processes_of_a_run() as root_pid:
        log = TimedLog(Path(folder), library, max(1, round(seconds)))
        log.follow(root_pid)
        log.start()
        log.is_warm.wait()
        began_s, cpu_s = time.monotonic(), time.process_time()
        log.is_full.wait()
        wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
        log.stop()
    taken = log.taken[WARM_UP_TICKS : WARM_UP_TICKS + max(1, round(seconds))]
    lines = [len(msgspec.json.encode(tick.tick)) + 1 for tick in taken]
    waited = [tick.waited_ns for tick in taken if tick.waited_ns is not None]
    return Cost(
        ticks=len(taken),
        gpus=len(taken[-1].tick.devices),
        tick_ms=statistics.mean(tick.ms for tick in taken),
        median_tick_ms=statistics.median(tick.ms for tick in taken),
        gpus_ms=statistics.mean(tick.gpus_ms for tick in taken),
        host_ms=statistics.mean(tick.host_ms for tick in taken),
        record_ms=statistics.mean(tick.record_ns for tick in taken) * 1e-6,
        library_ms=statistics.mean(tick.library_ns for tick in taken) * 1e-6,
        waited_ms=statistics.mean(waited) * 1e-6 if len(waited) == len(taken) else None,
        cpu_percent=100 * cpu_s / wall_s,
        line_bytes=statistics.median(lines),
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="What the sampler costs.")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--real", action="store_true", help="this machine's own driver")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(asdict(child(options.seconds))))
        return 0
    return print_table(rows(measure(options.seconds, real=options.real)))


if __name__ == "__main__":
    sys.exit(main())

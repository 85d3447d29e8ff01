"""What the sampler costs at 1 Hz with eight GPUs, beyond the time that the NVML library takes itself.

    python -m benchmarks.sampler_cost [--seconds 20]

The library is the tests' compiled stand-in, unless this machine has a driver and `--real` is given. Every call through
`pynvml` is timed at the border to the library, so its own time can be taken off.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.budget import Row, at_most, print_table

from trainfast_runner.run_directory.telemetry_lines import WHOLE_EVERY, TickEncoder
from trainfast_runner.telemetry import Sampler, Tick

CPU_PERCENT = 1.0
TICK_MS = 2.0
LINE_BYTES = 3000
GPUS = 8

Ramp = tuple[tuple[float, float, int, float, int], ...]
"""Lines of the stand-in scenario: second, degrees Celsius, throttle reasons, watts, SM clock in MHz."""
HEATING: Ramp = ((0, 60, 0, 300, 1980), (20, 88, 0x20, 220, 1200), (40, 60, 0, 320, 1980))
ON_AND_OFF: Ramp = ((0, 88, 0, 300, 1980), (3, 90, 0x20, 220, 1200))


@dataclass(frozen=True)
class Cost:
    """Over the measured ticks: medians of a tick, and CPU of the whole process."""

    ticks: int
    gpus: int
    tick_ms: float
    """Wall time of a tick without what the library took."""
    library_ms: float
    nvml_part_ms: float
    """Of `tick_ms`, what went into the GPUs; the rest is the host's readings."""
    cpu_percent: float
    """Of one core, user and system time, with what the library took."""
    line_bytes: float
    """Of a tick in `telemetry.jsonl`, the median."""
    mean_line_bytes: float
    """The mean, with the whole ticks that stand in it every half minute."""


def rows(cost: Cost | None = None) -> list[Row]:
    """The budgets: what, measured, budget, held."""
    found = cost or measure()
    where = f"sampler, {found.gpus} GPUs at 1 Hz, beyond the library"
    return [
        at_most(
            f"sampler, {found.gpus} GPUs at 1 Hz, library included: CPU",
            found.cpu_percent,
            CPU_PERCENT,
            "%",
            digits=2,
            more=" of a core",
        ),
        at_most(
            f"{where}: a tick, median of {found.ticks}",
            found.tick_ms,
            TICK_MS,
            "ms",
            digits=2,
            more=f" ({found.nvml_part_ms:.2f} ms of it GPUs; library {found.library_ms:.2f} ms)",
        ),
        at_most(
            f"telemetry.jsonl, {found.gpus} busy GPUs: a tick, median",
            found.line_bytes,
            LINE_BYTES,
            "bytes",
            more=f" ({found.mean_line_bytes * 3600 / 1e6:.1f} MB an hour at 1 Hz)",
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

    def __getattr__(self, name: str) -> Any:
        return TimedFunction(self, getattr(self._library, name))


class TimedFunction:
    """One function of the library."""

    def __init__(self, owner: TimedLibrary, function: Any) -> None:
        self._owner = owner
        self._function = function

    @property
    def restype(self) -> Any:
        """What the function returns to ctypes; pynvml sets it on some."""
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


def child(seconds: float) -> Cost:
    """Sample in this process; the first ticks, which probe and import, are left out."""
    import pynvml

    pynvml.nvmlInit()
    library = TimedLibrary(pynvml.nvmlLib)
    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()
    ticks: list[tuple[Tick, int]] = []
    ready, over = threading.Event(), threading.Event()

    def take(tick: Tick) -> None:
        ticks.append((tick, library.wall_ns))
        if len(ticks) == 3:
            ready.set()
        if len(ticks) >= 3 + seconds:
            over.set()

    sampler = Sampler(take)
    sampler.start()
    ready.wait()
    began_s, cpu_s = time.monotonic(), time.process_time()
    over.wait()
    wall_s = time.monotonic() - began_s
    cpu_s = time.process_time() - cpu_s
    sampler.stop()
    inside = [after - before for (_, before), (_, after) in itertools.pairwise(ticks[2:])]
    measured = [tick for tick, _ in ticks[3:]]
    beyond = [tick.sample_us * 1e-3 - ns * 1e-6 for tick, ns in zip(measured, inside, strict=True)]
    lines = [len(msgspec.json.encode(line)) + 1 for line in encoded(measured)]
    gpus = [(tick.nvml_us or 0) * 1e-3 - ns * 1e-6 for tick, ns in zip(measured, inside, strict=True)]
    return Cost(
        ticks=len(measured),
        gpus=len(measured[-1].devices),
        tick_ms=statistics.median(beyond),
        library_ms=statistics.median(inside) * 1e-6,
        nvml_part_ms=statistics.median(gpus),
        cpu_percent=100 * cpu_s / wall_s,
        line_bytes=statistics.median(lines[1:]),
        # As over a long time, whatever the count of whole lines in a short one.
        mean_line_bytes=statistics.median(lines[1:]) + lines[0] / WHOLE_EVERY,
    )


def encoded(ticks: Sequence[Tick]) -> Iterator[msgspec.Struct]:
    """The lines of these ticks, the first of them whole."""
    encoder = TickEncoder()
    for tick in ticks:
        yield encoder.line(tick)


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

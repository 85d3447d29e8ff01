"""The cost of the sampler at 1 Hz with eight GPUs and eight ranks, beyond the time of the NVML library itself.

    python -m benchmarks.sampler_cost [--seconds 20] [--real]

A tick is all that a supervisor does for one: the GPUs, the host, the run's processes, events and the line in
`telemetry.jsonl`. The library is the tests' compiled stand-in, unless this machine has a driver and `--real` is given.
Every call through `pynvml` is timed at the border to the library, so its own time can be taken off.

The budget is held to the mean of all ticks, since every third one looks for new processes and every fifth one at the
sensors. It is of wall time, in which other load shows.
"""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.meter import Row, at_most, options, print_table

from trainfast_runner.records.capped_file import CAP_BYTES
from trainfast_runner.records.tick import Tick
from trainfast_runner.running.record_files import TelemetryLog

CPU_PERCENT = 1.0
TICK_MS = 2.0
LINE_BYTES = 14_000
"""64 MiB, the cap of the file, then hold more than an hour of eight GPUs at 1 Hz."""
GPUS = 8
RANKS = 8
WARM_UP_TICKS = 3
"""They open the driver and import."""

Ramp = tuple[tuple[float, float, int, float, int], ...]
"""Lines of the stand-in scenario: second, degrees Celsius, throttle reasons, watts, SM clock in MHz."""
HEATING: Ramp = ((0, 60, 0, 300, 1980), (20, 88, 0x20, 220, 1200), (40, 60, 0, 320, 1980))
ON_AND_OFF: Ramp = ((0, 88, 0, 300, 1980), (3, 90, 0x20, 220, 1200))


def rows(seconds: float = 20.0, *, real: bool = False) -> list[Row]:
    """The budgets, of a sampler in a process of its own: what, measured, budget, held."""
    with tempfile.TemporaryDirectory() as folder:
        variables = dict(os.environ) if real else stand_in(Path(folder))
        command = [sys.executable, "-m", "benchmarks.sampler_cost", "--child", "--seconds", str(seconds)]
        done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    cost = json.loads(done.stdout.splitlines()[-1])
    who = f"sampler, {cost['devices']:g} GPUs and {RANKS} ranks"
    parts = "GPUs {gpus:.2f}, host {host:.2f}, record {record:.2f}; median {median_tick:.2f}; library {library:.2f} ms"
    line_bytes = cost["median_line"]
    an_hour = f" ({line_bytes * 3600 / 1e6:.1f} MB an hour at 1 Hz, capped at {CAP_BYTES / 1e6:.0f} MB)"
    more = f" ({parts.format(**cost)})"
    return [
        at_most(f"{who} at 1 Hz, library included: CPU", cost["cpu_percent"], CPU_PERCENT, "%", digits=2),
        at_most(f"{who}, a tick beyond the library, mean", cost["tick"], TICK_MS, "ms", digits=2, more=more),
        at_most("telemetry.jsonl, a tick, median", line_bytes, LINE_BYTES, "bytes", more=an_hour),
    ]


def stand_in(folder: Path, gpus: int = GPUS, ramp: Ramp = HEATING, period_s: float = 40.0) -> dict[str, str]:
    """An environment with so many GPUs whose readings change all the time, `ramp` again and again."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "nvml"))
    import shared_object
    from scenario import Moment, Scenario

    ramps = {gpu: [Moment(*line) for line in ramp] for gpu in range(gpus)}
    text = Scenario(time.monotonic_ns(), period_s, ramps).text()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "scenario"
    path.write_text(text + "memory * 20000\nprocess * 1 30000 0 1000000\ntraffic * 2e8 3e6\n")
    variables: dict[str, str] = shared_object.environment(shared_object.build(folder), gpus=gpus, scenario=path)
    return variables


def throttled_on_and_off(folder: Path, gpus: int = GPUS) -> dict[str, str]:
    """An environment in which every GPU is slowed down by heat for three seconds of every six."""
    return stand_in(folder, gpus, ON_AND_OFF, period_s=6.0)


class TimedLibrary:
    """The loaded library, with the time that is spent in it since `wall_ns` was last set to 0."""

    def __init__(self, library: Any) -> None:
        self._library, self.wall_ns = library, 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        # The wait for Xid events takes no time of a tick: it is in a thread of its own.
        if name.startswith("nvmlEventSetWait"):
            return function

        def timed(*arguments: Any) -> Any:
            began_ns = time.perf_counter_ns()
            # pynvml sets the type on the attribute that it was given.
            function.restype = getattr(timed, "restype", function.restype)
            try:
                return function(*arguments)
            finally:
                self.wall_ns += time.perf_counter_ns() - began_ns

        return timed


class TimedLog(TelemetryLog):
    """A run's telemetry, which keeps each tick and its cost in ms; after so many `wanted` it is `full`."""

    def __init__(self, directory: Path, library: TimedLibrary, wanted: int) -> None:
        super().__init__(directory, [], on_event=lambda event: None, on_failure=print)
        self.costs: list[dict[str, float]] = []
        self.is_warm, self.is_full = threading.Event(), threading.Event()
        self._library, self._wanted = library, wanted

    def _write_tick(self, tick: Tick) -> None:
        began_ns = time.monotonic_ns()
        super()._write_tick(tick)
        record_ms, library_ms = (time.monotonic_ns() - began_ns) * 1e-6, self._library.wall_ns * 1e-6
        self._library.wall_ns = 0
        nvml_ms = (tick.nvml_us or 0) * 1e-3
        parts = {"gpus": nvml_ms - library_ms, "host": tick.sample_us * 1e-3 - nvml_ms, "record": record_ms}
        line = len(msgspec.json.encode(tick)) + 1
        figures = {"tick": sum(parts.values()), "library": library_ms, "line": line, "devices": len(tick.devices)}
        self.costs.append({**parts, **figures})
        if len(self.costs) == WARM_UP_TICKS:
            self.is_warm.set()
        if len(self.costs) >= WARM_UP_TICKS + self._wanted:
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


def child(seconds: float) -> dict[str, float]:
    """Sample in this process: means of the ticks after the first ones, which probe and import."""
    import pynvml

    pynvml.nvmlInit()
    library = TimedLibrary(pynvml.nvmlLib)
    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()
    wanted = max(1, round(seconds))
    with tempfile.TemporaryDirectory() as folder, processes_of_a_run() as root_pid:
        log = TimedLog(Path(folder), library, wanted)
        log.follow(root_pid)
        log.start()
        log.is_warm.wait()
        began_s, cpu_s = time.monotonic(), time.process_time()
        log.is_full.wait()
        wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
        log.stop()
    costs = log.costs[WARM_UP_TICKS : WARM_UP_TICKS + wanted]
    means = {name: statistics.mean(cost[name] for cost in costs) for name in costs[0]}
    medians = {f"median_{name}": statistics.median(cost[name] for cost in costs) for name in ("tick", "line")}
    return {**means, **medians, "cpu_percent": 100 * cpu_s / wall_s}


if __name__ == "__main__":
    asked = options(__doc__, seconds=20.0, real=False, child=False).parse_args()
    if asked.child:
        print(json.dumps(child(asked.seconds)))
    else:
        sys.exit(print_table(rows(asked.seconds, real=asked.real)))

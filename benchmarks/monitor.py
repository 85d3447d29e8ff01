"""The monitor beside nvitop and gpustat: each in a pseudo-terminal, under the same eight GPUs.

    python benchmarks/monitor.py [--seconds 20] [--pairs 30] [--no-attached]

The GPUs are the tests' compiled stand-in with readings that change all the time.
nvitop and gpustat are installed into an environment of their own, kept below the user's cache directory; where the
registry cannot be reached, their lines say that they were not run. Below stands our own CPU time by function
(`cpu_shares`); the other two tables are `sampler_cost` and `attached`. The figures are of a machine with nothing else
to do: beside other work first paints are late and CPU shares a little high.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import platformdirs
from benchmarks import as_installed, attached, cpu_shares, sampler_cost
from benchmarks.budget import Row, at_most, print_table
from benchmarks.in_terminal import Ended
from benchmarks.pty_meter import Measurement, measure, table

CPU_PERCENT = 3.0
KB_PER_S = 20.0
FRAME_KB = 10.0
FIRST_PAINT_MS = 400.0
PAINTS = 5
INTERVAL_S = 0.5
"""2 Hz, of all three."""


@dataclass(frozen=True)
class Rival:
    """A program to measure beside ours, with its arguments for the same period."""

    name: str
    package: str
    arguments: tuple[str, ...]
    paints_s: float = 10.0


RIVALS = (
    Rival("nvitop", "nvitop", ("--interval", f"{INTERVAL_S:g}", "--monitor", "full")),
    Rival("gpustat", "gpustat", ("--interval", f"{INTERVAL_S:g}", "--show-all")),
)


def rows(seconds: float = 20.0) -> list[Row]:
    """The budgets of the monitor view and of the sampler, without the pairs of `attached`, which take minutes."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**sampler_cost.stand_in(Path(folder)), "TRAINFAST_HOME": str(Path(folder) / "home")}
        return [
            *budgets(ours(environment, seconds)),
            *under_throttling(Path(folder), seconds),
            *sampler_cost.rows(),
        ]


def under_throttling(folder: Path, seconds: float) -> list[Row]:
    """The budgets of the monitor view while all eight GPUs are throttled on and off, which moves the most cells."""
    place = folder / "throttling"
    place.mkdir()
    environment = {**sampler_cost.throttled_on_and_off(place), "TRAINFAST_HOME": str(place / "home")}
    # Long enough that the charts are full of it.
    seen = measure([*as_installed.app()], seconds=seconds, settle=125, keys=[(1.0, "m")], env=environment)
    return _while_it_runs(seen, "monitor view, 8 GPUs throttled on and off every 3 s, 160x48")


def budgets(seen: Measurement) -> list[Row]:
    """The budgets of the monitor: subject, measured, budget, held."""
    where = "monitor view, 8 GPUs at 2 Hz, 160x48"
    paint_ms = seen.first_paint_ms or float("inf")
    return [
        *_while_it_runs(seen, where),
        at_most(f"first paint, {where}, median of {PAINTS}", paint_ms, FIRST_PAINT_MS, "ms"),
    ]


def _while_it_runs(seen: Measurement, where: str) -> list[Row]:
    return [
        at_most(f"CPU, {where}", seen.cpu_percent, CPU_PERCENT, "%", digits=1, more=" of a core"),
        at_most(f"to the terminal, {where}", seen.bytes_per_s / 1e3, KB_PER_S, "kB/s", digits=1),
        at_most(f"largest frame, {where}", seen.largest_frame_bytes / 1e3, FRAME_KB, "kB", digits=1),
    ]


def ours(environment: Mapping[str, str], seconds: float) -> Measurement:
    """The app with its monitor view, reached by its key; the first paint is the app's own, the median of several."""
    paints = [
        measure([*as_installed.app()], seconds=0.5, settle=0.5, env=dict(environment)).first_paint_ms or float("inf")
        for _ in range(PAINTS)
    ]
    seen = measure([*as_installed.app()], seconds=seconds, settle=4, keys=[(1.0, "m")], env=dict(environment))
    return replace(seen, first_paint_ms=statistics.median(paints))


def side_by_side(environment: Mapping[str, str], seconds: float) -> tuple[dict[str, Measurement], dict[str, str]]:
    """Every program's figures, and why a program has none."""
    measurements = {"trainfast-tui, m": ours(environment, seconds)}
    absent: dict[str, str] = {}
    for rival in RIVALS:
        try:
            measurements[rival.name] = measure(
                [*installed(rival), *rival.arguments], seconds=seconds, settle=4, env=dict(environment)
            )
        except (Ended, OSError, subprocess.SubprocessError) as error:
            absent[rival.name] = str(error).splitlines()[0][:200]
    return measurements, absent


def installed(rival: Rival) -> list[str]:
    """The program as this Python has it, else in an environment that holds nothing of ours.

    Raises SubprocessError when it cannot be had, soon where there is no registry.
    """
    if find_spec(rival.package) is not None:
        return [sys.executable, "-m", rival.package]
    place = platformdirs.user_cache_path("trainfast-tui") / "benchmarks" / rival.package
    program = place / "bin" / rival.name
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, capture_output=True, timeout=60)
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--retries", "1", "--timeout", "10"]
        subprocess.run([*pip, rival.package], check=True, capture_output=True, timeout=120)
    return [str(program)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 1 when a budget is not held."""
    parser = argparse.ArgumentParser(description="The monitor beside nvitop and gpustat.")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each window (default 20)")
    parser.add_argument("--pairs", type=int, default=attached.PAIRS, help="of windows with and without the app")
    parser.add_argument("--no-attached", action="store_true", help="leave out what an attached app costs a training")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        environment = sampler_cost.stand_in(Path(folder))
        environment["TRAINFAST_HOME"] = str(Path(folder) / "home")
        measurements, absent = side_by_side(environment, options.seconds)
        print(table(measurements))
        for name, why in absent.items():
            print(f"{name}: not run: {why}")
        print(cpu_shares.words(cpu_shares.shares(environment, options.seconds)))
        lines = budgets(measurements["trainfast-tui, m"])
        lines += under_throttling(Path(folder), options.seconds)
        lines += sampler_cost.rows(sampler_cost.measure(options.seconds, environment=environment))
    if not options.no_attached:
        lines += attached.rows(attached.measure(options.pairs))
    print()
    return print_table(lines)


if __name__ == "__main__":
    sys.exit(main())

"""The cost of the app itself: start-up, first paint, CPU and bytes with a live run, in a pseudo-terminal.

    python -m benchmarks.app

Eight GPUs come from the tests' stand-in NVML library, found by the ordinary loader; the run is a real one on the CPU.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.meter import Row, app, at_most, first_paints_ms, live_run, measure, options, print_table
from benchmarks.sampler_cost import stand_in, throttled_on_and_off

HELP_MS, FIRST_PAINT_MS, LIST_S = 150.0, 300.0, 1.0
HISTORY, LISTED = 100, 10_000
"""Earlier runs beside the first paint, and those that are listed."""


def rows() -> list[Row]:
    """Every budget of the app: what, measured, budget, held."""
    with tempfile.TemporaryDirectory() as folder:
        homes = {name: Path(folder, name) for name in ("plain", "throttled", "many")}
        calm = {**stand_in(homes["plain"]), "TRAINFAST_HOME": str(homes["plain"] / "home")}
        throttled = {**throttled_on_and_off(homes["throttled"]), "TRAINFAST_HOME": str(homes["throttled"] / "home")}
        write_history(homes["plain"] / "home", HISTORY)
        write_history(homes["many"], LISTED)
        helped, bare = _seconds([*app(), "--help"], calm), _seconds([sys.executable, "-c", ""], calm)
        many = {**calm, "TRAINFAST_HOME": str(homes["many"])}
        listed_s = _seconds([*app(), "runs", "list"], many, times=1)
        [paint_ms] = first_paints_ms(app(), env=calm)
        return [
            at_most("--help", 1e3 * helped, HELP_MS, "ms", more=f" (bare Python {1e3 * bare:.0f} ms)"),
            at_most(f"first paint with {HISTORY} runs", paint_ms, FIRST_PAINT_MS, "ms"),
            *_with_a_live_run(calm, "live run, 8 GPUs, 160x48", 6),
            # Long enough that the charts are full of it.
            *_with_a_live_run(throttled, "live run, 8 GPUs throttled on and off every 3 s, 160x48", 100),
            at_most(f"runs list, {LISTED:,} runs", listed_s, LIST_S, "s", digits=2),
        ]


def write_history(home: Path, count: int) -> None:
    """`count` finished runs as the tests lay them on disk, the last one with its start."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from on_disk import ended, started

    for number in range(count):
        run_id = f"20260101-{number:06d}-tiny-llama-{number % 65536:04x}"
        ended(home, run_id, samples_per_s=100.0 + number)
    started(home, run_id)


def _seconds(command: Sequence[str], environment: Mapping[str, str], times: int = 15) -> float:
    """The median time of a whole process."""
    took = []
    for _ in range(times):
        began_s = time.perf_counter()
        subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, check=True)
        took.append(time.perf_counter() - began_s)
    return statistics.median(took)


def _with_a_live_run(environment: Mapping[str, str], where: str, settle_s: float) -> list[Row]:
    """The app beside a training that keeps both its own core and the machine busy."""
    with live_run(environment, ("steps=1000000", "watch=0"), steps=1):
        return measure(app(), seconds=20, settle=settle_s, env=environment).budgets(where)


if __name__ == "__main__":
    options(__doc__).parse_args()
    sys.exit(print_table(rows()))

"""The monitor beside nvitop, each in a pseudo-terminal at 2 Hz under the same eight GPUs.

    python -m benchmarks.monitor [--seconds 20]

The GPUs are the tests' compiled stand-in with readings that change all the time. nvitop is installed into an
environment of its own below the user's cache directory; without a registry its bounds are left out.
"""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import platformdirs
from benchmarks.app import FIRST_PAINT_MS
from benchmarks.meter import Row, app, at_most, first_paints_ms, measure, options, print_table
from benchmarks.sampler_cost import stand_in, throttled_on_and_off

CPU_PERCENT = 3.0
PAINT_OF_NVITOP, CPU_OF_NVITOP = 2.0, 0.7
NVITOP = ("--interval", "0.5", "--monitor", "full")
KEYS = [(1.0, "m")]
"""They lead from the app's first screen to its monitor."""


def rows(seconds: float = 20.0) -> list[Row]:
    """The budgets of the monitor, those beside nvitop included where it can be had."""
    with tempfile.TemporaryDirectory() as folder:
        calm, throttled = Path(folder, "calm"), Path(folder, "throttled")
        environment = {**stand_in(calm), "TRAINFAST_HOME": str(calm / "home")}
        ours = measure(app(), seconds=seconds, settle=4, keys=KEYS, env=environment)
        table = ours.budgets("monitor view, 8 GPUs at 2 Hz, 160x48", CPU_PERCENT)
        table += beside_nvitop(ours.cpu_percent, environment, seconds)
        environment = {**throttled_on_and_off(throttled), "TRAINFAST_HOME": str(throttled / "home")}
        # Long enough that the charts are full of what moves the most cells.
        seen = measure(app(), seconds=seconds, settle=125, keys=KEYS, env=environment)
        return table + seen.budgets("monitor view, 8 GPUs throttled on and off every 3 s, 160x48", CPU_PERCENT)


def beside_nvitop(cpu_percent: float, environment: Mapping[str, str], seconds: float) -> list[Row]:
    """The first paints of `monitor` and of the app, and the CPU of the monitor, as multiples of nvitop's."""
    what = ("first paint, trainfast-tui monitor", "first paint, trainfast-tui")
    try:
        nvitop = [*installed_nvitop(), *NVITOP]
    except (OSError, subprocess.SubprocessError) as error:
        print(f"nvitop: not run: {str(error).splitlines()[0][:200]}")
        paints = first_paints_ms([*app(), "monitor"], app(), env=environment)
        return [at_most(name, paint, FIRST_PAINT_MS, "ms") for name, paint in zip(what, paints, strict=True)]
    *paints, its_paint = first_paints_ms([*app(), "monitor"], app(), nvitop, env=environment)
    table = []
    for name, paint in zip(what, paints, strict=True):
        table.append(at_most(name, paint, FIRST_PAINT_MS, "ms"))
        more = f" (its {its_paint:.0f} ms)"
        table.append(at_most(f"{name}, of nvitop's", paint / its_paint, PAINT_OF_NVITOP, "x", digits=2, more=more))
    its = measure(nvitop, seconds=seconds, settle=4, env=environment)
    command = measure([*app(), "monitor", "--interval", "0.5"], seconds=seconds, settle=4, env=environment)
    for name, percent in (("monitor view", cpu_percent), ("trainfast-tui monitor", command.cpu_percent)):
        more = f" ({percent:.2f} and {its.cpu_percent:.2f} % of a core; nvitop {its.bytes_per_s / 1e3:.1f} kB/s)"
        table.append(
            at_most(f"CPU, {name}, of nvitop's", percent / its.cpu_percent, CPU_OF_NVITOP, "x", digits=2, more=more)
        )
    return table


def installed_nvitop() -> list[str]:
    """The program as this Python has it, else in an environment that holds nothing of ours.

    Raises SubprocessError when it cannot be had, soon where there is no registry.
    """
    if find_spec("nvitop") is not None:
        return [sys.executable, "-m", "nvitop"]
    place = platformdirs.user_cache_path("trainfast-tui") / "benchmarks" / "nvitop"
    if not (program := place / "bin" / "nvitop").exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, capture_output=True, timeout=60)
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--retries", "1", "--timeout", "10"]
        subprocess.run([*pip, "nvitop"], check=True, capture_output=True, timeout=120)
    return [str(program)]


if __name__ == "__main__":
    sys.exit(print_table(rows(options(__doc__, seconds=20.0).parse_args().seconds)))

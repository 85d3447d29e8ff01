"""From the key to the end of the first step: a rerun in the app, with its standby, and a command, which starts cold.

    python -m benchmarks.rerun [--pairs 5] [--device cpu|gpu] [--set KNOB=VALUE ...]

The app is in a terminal of its own: `r`, a knob turned, `r` again, as often as there are pairs, and a cold command
between two of them while the app waits. Times are from the key, or the start of the command, to the end of step 1.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.meter import Program, app, at_most, options, print_columns, print_table

SHARE, GPU_S = 0.4, 5.0
"""The most that a rerun may take: of a cold start on two cores, in seconds on a GPU."""
PARTS = ("plan", "process", "imports", "data", "model", "first_step", "all")
READY_WITHIN_S, ENDS_WITHIN_S = 60.0, 120.0


def main() -> int:
    """Measure, and print the parts and the figure with a budget."""
    asked = options(__doc__, pairs=5, device="cpu", set=[]).parse_args()
    settings = ["steps=6", *(["devices=cpu"] if asked.device == "cpu" else []), *asked.set]
    with tempfile.TemporaryDirectory(prefix="rerun-") as folder:
        environment = {**os.environ, "TRAINFAST_HOME": folder}
        preset = Path(folder, "rerun.toml")
        knobs = (f"{name} = {json.dumps(value)}\n" for name, _, value in (each.partition("=") for each in settings))
        preset.write_text(f'schema = 1\nextends = "tiny-llama"\n[knobs]\n{"".join(knobs)}')
        cold, standby = list[dict[str, float]](), list[dict[str, float]]()
        with Program([*app(), "--preset", str(preset)], env=environment) as screen:
            screen.read(time.monotonic() + ENDS_WITHIN_S, until_painted=True)
            for number in range(asked.pairs + 1):
                _wait_for_standby(screen)
                # The knob under the cursor goes up and down again; the first run only shows the preset.
                keys = "r" if number == 0 else ("\x1b[C", "\x1b[D")[number % 2] + "r"
                rerun = _first_step(screen, keys, Path(folder))
                if number:
                    standby.append(rerun)
                    began_ns, words = time.monotonic_ns(), [*app(), "run", str(preset), "--json"]
                    with subprocess.Popen(words, env=environment, stdout=-3, stderr=-3):
                        cold.append(_first_step(screen, "", Path(folder), began_ns))
    medians = [[statistics.median(one.get(part, 0.0) for one in runs) for part in PARTS] for runs in (cold, standby)]
    lines = [(part, f"{cold_s:.2f}", f"{rerun_s:.2f}") for part, cold_s, rerun_s in zip(PARTS, *medians, strict=True)]
    print_columns([("seconds", "cold", "standby"), *lines])
    cold_s, rerun_s = (each[-1] for each in medians)
    if asked.device == "gpu":
        return print_table([at_most("key to the first step of a rerun", rerun_s, GPU_S, "s", digits=2)])
    return print_table([at_most("a rerun's first step, of a cold one's", rerun_s / cold_s, SHARE, "", digits=2)])


def _wait_for_standby(screen: Program) -> None:
    """Read on until the app's standby has done its imports: its process sleeps for half a second."""
    deadline_s, idle = time.monotonic() + READY_WITHIN_S, 0
    while idle < 5 and time.monotonic() < deadline_s:
        before = _waiting_cpu_s(screen.pid)
        screen.read(time.monotonic() + 0.2)
        idle = idle + 1 if before and before == _waiting_cpu_s(screen.pid) else 0


def _waiting_cpu_s(pid: int) -> float:
    """CPU seconds of the training processes that wait below the app; 0 without one."""
    import psutil

    below = psutil.Process(pid).children(recursive=True)
    return sum(sum(one.cpu_times()[:2]) for one in below if "bootstrap.py" in " ".join(one.cmdline()))


def _first_step(screen: Program, keys: str, home: Path, began_ns: int = 0) -> dict[str, float]:
    """Type the keys, wait for the end of the next run, and return the parts of its start and the whole, in seconds."""
    before = {*home.glob("runs/*")}
    began_ns = began_ns or time.monotonic_ns()
    deadline_s = time.monotonic() + ENDS_WITHIN_S
    screen.read(time.monotonic() + 0.05, [(0.0, keys)] if keys else [])
    while not (new := [one for one in {*home.glob("runs/*")} - before if (one / "result.json").exists()]):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"no run ended: {screen.tail[-2000:]!r}")
        screen.read(time.monotonic() + 0.1)
    start = json.loads((new[0] / "result.json").read_text())["start"]
    wanted = "standby" if keys else "cold"
    if start["kind"] != wanted:
        raise RuntimeError(f"{new[0].name} began {start['kind']}, not {wanted}: {start['reason']}")
    ended_ns = json.loads((new[0] / "steps.jsonl").read_text().partition("\n")[0])["t_ns"]
    return {**start["seconds"], "all": (ended_ns - began_ns) / 1e9}


if __name__ == "__main__":
    sys.exit(main())

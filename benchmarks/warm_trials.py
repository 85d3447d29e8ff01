"""A warm trial's speed against a cold run's, for each knob that a warm process turns.

    python -m benchmarks.warm_trials [--strategies "single;ddp"] [--steps 25] [--set KNOB=VALUE ...]

Order A B B A: a cold run of each setting, one process that tries all of them, the same backwards, and the cold runs
backwards. A setting's figure is the median of its timed steps of both passes, `noise` the difference of its two cold
runs. A setting whose noise exceeds the tolerance cannot be judged on this machine, and counts as not held.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.budget import Row, print_table

from trainfast_runner.records.home import Home
from trainfast_runner.records.run_records import read_records
from trainfast_runner.records.search_directories import conductor_lock
from trainfast_runner.running import launch
from trainfast_runner.running.planning import RunPlan, plan_run
from trainfast_runner.search.run_ends import wait_for_result
from trainfast_runner.search.searches import new_search
from trainfast_runner.search.warm_process import WarmProcess
from trainfast_runner.settings.spec import resolve

TOLERANCE_PERCENT = 3.0
UNTIMED = 2
DEVICES = {"single": "cpu", "ddp": "cpu:2"}
BASE: dict[str, Any] = {
    "batch_size": 8,
    "grad_accum": 1,
    "workers": 0,
    "prefetch": 2,
    "checkpointing": "off",
    "optimizer": "adamw",
    "precision": "fp32",
    "attention": "sdpa",
}
TURNS: tuple[dict[str, Any], ...] = (
    {},
    {"batch_size": 2, "grad_accum": 4},
    {"batch_size": 16},
    {"workers": 2},
    {"checkpointing": "full"},
    {"optimizer": "sgd"},
    {"optimizer": "adamw-fused"},
    {"precision": "bf16"},
    {"attention": "eager"},
)


@dataclass
class Setting:
    """Step times of one setting in ms, a list for each pass, and the seconds that each pass took."""

    turned: dict[str, Any]
    cold_ms: list[list[float]] = field(default_factory=list)
    warm_ms: list[list[float]] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)
    warm_s: list[float] = field(default_factory=list)
    cold_bytes: int = 0
    warm_bytes: int = 0

    @property
    def words(self) -> str:
        """The turned knobs."""
        return " ".join(f"{name}={value}" for name, value in self.turned.items()) or "as it starts"

    @property
    def noise_percent(self) -> float:
        """Difference of the two cold runs."""
        one, other = map(statistics.median, self.cold_ms)
        return 100 * abs(one / other - 1)

    @property
    def medians_ms(self) -> tuple[float, float]:
        """Median step time over both passes, cold and warm."""
        cold, warm = (statistics.median(chain.from_iterable(passes)) for passes in (self.cold_ms, self.warm_ms))
        return cold, warm

    @property
    def gap_percent(self) -> float:
        """Warm above cold."""
        cold, warm = self.medians_ms
        return 100 * (warm / cold - 1)


def measure(strategy: str, steps: int, more_overrides: Sequence[str]) -> list[Setting]:
    """All settings of one strategy."""
    overrides = [f"strategy={strategy}", f"devices={DEVICES[strategy]}", *more_overrides]
    settings = [Setting(turned) for turned in TURNS]
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder)).create()
        for setting in settings:
            _train_cold(setting, home, overrides, steps)
        _try_warm(settings, home, overrides, steps)
        for setting in reversed(settings):
            _train_cold(setting, home, overrides, steps)
    return settings


def _train_cold(setting: Setting, home: Home, overrides: list[str], steps: int) -> None:
    knobs = {**BASE, **setting.turned, "timing_warmup": UNTIMED, "steps": UNTIMED + steps}
    plan = plan_run(resolve("tiny-llama", [*overrides, *(f"{name}={value}" for name, value in knobs.items())]))
    directory = launch.start(plan, home)
    result = wait_for_result(directory, lambda: None)
    measured = [step for step in read_records(directory).steps[0] if not step.warmup]
    setting.cold_ms.append([step.step_ms for step in measured])
    setting.cold_s.append(result.seconds or 0.0)
    setting.cold_bytes = result.memory.peak_allocated_bytes or 0


def _try_warm(settings: list[Setting], home: Home, overrides: list[str], steps: int) -> None:
    plan: RunPlan = plan_run(resolve("tiny-llama", overrides))
    search = new_search(home, "warm-trials")
    with conductor_lock(search):
        directory = launch.start(replace(plan, role="trial", search_id=search.name), home)
        process = WarmProcess(directory, plan.world_size, lambda: None)
        process.ready()
        for setting in (*settings, *reversed(settings)):
            answers = process.trial({**BASE, **setting.turned}, UNTIMED, steps)
            assert answers is not None, process.result
            setting.warm_ms.append(answers[0].step_ms)
            setting.warm_s.append(max(line.seconds or 0.0 for line in answers.values()))
            setting.warm_bytes = max(line.peak_allocated_bytes or 0 for line in answers.values())
        process.end()


def rows(strategy: str, settings: list[Setting]) -> list[Row]:
    """One row a setting."""
    table = []
    for setting in settings:
        cold, warm = setting.medians_ms
        judged = setting.noise_percent <= TOLERANCE_PERCENT
        figures = f"{cold:.1f} ms cold, {warm:.1f} warm: {setting.gap_percent:+.1f} %"
        noise = f"noise {setting.noise_percent:.1f} %"
        peak = f"peak {setting.warm_bytes >> 20} of {setting.cold_bytes >> 20} MiB"
        took = f"{statistics.mean(setting.warm_s):.1f} of {statistics.mean(setting.cold_s):.1f} s"
        budget = f"within {TOLERANCE_PERCENT:g} %" if judged else "not judged: too much noise"
        held = judged and abs(setting.gap_percent) <= TOLERANCE_PERCENT
        table.append((f"{strategy}: {setting.words}", f"{figures}, {noise}; {peak}; {took}", budget, held))
    return table


def main() -> int:
    """Measure every strategy and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default="single;ddp")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--set", action="append", default=[], metavar="KNOB=VALUE")
    parser.add_argument("--raw", type=Path, help="also write every step's time into this file, as JSON")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}")
    settings = {name: measure(name, options.steps, options.set) for name in options.strategies.split(";")}
    if options.raw:
        options.raw.write_text(
            json.dumps({name: [vars(setting) for setting in each] for name, each in settings.items()})
        )
    return print_table([row for name, each in settings.items() for row in rows(name, each)])


if __name__ == "__main__":
    sys.exit(main())

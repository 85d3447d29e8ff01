"""A warm trial's speed against a cold run's, for each knob that a warm process turns.

    python -m benchmarks.warm_trials [--strategies "single;ddp"] [--seconds 120] [--set KNOB=VALUE] [--only KNOB=VALUE]

A warm process tries the setting while a cold run of it lives. They take turns (`turns.py`): a few of the trial's
steps, as many seconds of the run's, more of the trial, and so on. A rank trains with one thread: two that share busy
cores run ten times slower, at random. A setting whose difference is not known to within the tolerance is not judged,
and counts as not held. The last row of a strategy is of the turns of all its settings.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.budget import Row, print_table
from benchmarks.turns import SIDE, Turn, median_with_error, signal_all, speed_ratios

from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import read_result
from trainfast_runner.records.run_records import read_records
from trainfast_runner.records.search_directories import conductor_lock
from trainfast_runner.running import launch
from trainfast_runner.running.planning import RunPlan, plan_run
from trainfast_runner.search.conducting.run_ends import end_run
from trainfast_runner.search.conducting.warm_process import WarmProcess
from trainfast_runner.search.searches import new_search
from trainfast_runner.settings.spec import resolve

TOLERANCE_PERCENT = 3.0
UNTIMED = 2
TURN_S, FIRST_STEPS, LOOK_EVERY = 0.6, 3, 8
MAX_STEPS = 1_000_000
WARM, COLD = "warm", "cold"
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
OVERRIDES: tuple[dict[str, Any], ...] = (
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
    """The turns of one setting, and the times of its trial and its run."""

    overrides: dict[str, Any]
    turns: list[Turn] = field(default_factory=list)
    warm_s: float = 0.0
    """Seconds from the order to the answer of the first trial."""
    cold_s: float = 0.0
    """Seconds from the start of the run to its first timed step."""
    warm_bytes: int = 0
    cold_bytes: int = 0

    @property
    def words(self) -> str:
        """The overrides."""
        return " ".join(f"{name}={value}" for name, value in self.overrides.items()) or "as it starts"

    @property
    def speed_ratios(self) -> list[float]:
        """The speed of the trial as a share of the run's, a ratio a turn."""
        return speed_ratios(self.turns, WARM)

    def median_ms(self, side: str) -> float:
        """The median over the turns of a side."""
        return 1e3 * statistics.median(turn.step_s for turn in self.turns if turn.side == side and turn.step_s)


def measure(strategy: str, options: argparse.Namespace) -> list[Setting]:
    """The settings of one strategy, all or only those with an override of `options.only`."""
    overrides = [f"strategy={strategy}", f"devices={DEVICES[strategy]}", *options.set]
    only = set(options.only)
    settings = [Setting(each) for each in OVERRIDES]
    settings = [each for each in settings if not only or only & set(each.words.split())]
    with tempfile.TemporaryDirectory() as folder:
        home, cold_home = Home(Path(folder, "warm")).create(), Home(Path(folder, "cold")).create()
        search = new_search(home, "warm-trials")
        with conductor_lock(search):
            plan: RunPlan = plan_run(resolve("tiny-llama", overrides))
            directory = launch.start(replace(plan, role="trial", search_id=search.name), home)
            process = WarmProcess(directory, plan.world_size, lambda: None)
            process.ready()
            for setting in settings:
                knobs = {**BASE, **setting.overrides}
                with cold_run([*overrides, *(f"{name}={value}" for name, value in knobs.items())], cold_home) as cold:
                    _take_turns(setting, process, cold, options.seconds, options.known_to)
                result = read_result(cold)
                setting.cold_bytes = (result and result.memory.peak_allocated_bytes) or 0
            process.end()
    return settings


@contextmanager
def cold_run(overrides: Sequence[str], home: Home) -> Iterator[Path]:
    """A run that trains until the block ends, in a home of its own: one home refuses two runs on a device."""
    plan = plan_run(resolve("tiny-llama", [*overrides, f"timing_warmup={UNTIMED}", f"steps={MAX_STEPS}"]))
    os.environ[SIDE] = COLD
    directory = launch.start(plan, home)
    del os.environ[SIDE]
    try:
        yield directory
    finally:
        signal_all(COLD, signal.SIGCONT)
        end_run(directory)


def _take_turns(setting: Setting, process: WarmProcess, cold: Path, most_s: float, known_to_percent: float) -> None:
    """Alternate both sides until their difference is known to within this error, or for `most_s`."""
    began = time.monotonic()
    while len(read_records(cold).steps.get(0, [])) <= UNTIMED:
        time.sleep(0.1)
    setting.cold_s = time.monotonic() - began
    began = time.monotonic()
    cold_turns: list[tuple[float, float]] = []
    warm_s: list[float] = []
    steps = FIRST_STEPS
    while time.monotonic() - began < most_s and (len(warm_s) % LOOK_EVERY or not _is_known(setting, known_to_percent)):
        signal_all(COLD, signal.SIGSTOP)
        replies = process.trial({**BASE, **setting.overrides}, UNTIMED, 1 + steps, more=bool(warm_s))
        assert replies is not None, process.result
        # The first step finds the caches as the other side left them; the run's is cut by its turn's beginning.
        warm_s.append(statistics.mean(replies[0].step_ms[1:]) / 1e3)
        if len(warm_s) == 1:
            setting.warm_s = max(line.seconds or 0.0 for line in replies.values())
            setting.warm_bytes = max(line.peak_allocated_bytes or 0 for line in replies.values())
        signal_all(COLD, signal.SIGCONT)
        begin = time.monotonic()
        time.sleep(max(TURN_S, FIRST_STEPS * warm_s[-1]))
        cold_turns.append((begin, time.monotonic()))
        steps = max(FIRST_STEPS, round(TURN_S / warm_s[-1]))
        if len(warm_s) % LOOK_EVERY == 0:
            setting.turns = _turns(warm_s, cold_turns, cold)
    setting.turns = _turns(warm_s, cold_turns, cold)


def _turns(warm_s: list[float], cold_turns: list[tuple[float, float]], cold: Path) -> list[Turn]:
    """The turns of both sides: of the run the time between the first and the last end of a step in the turn.

    A step that a turn cuts is left out. A median of the others would be of the shorter ones, which are cut less often.
    """
    turns, ends_s = [], [step.t_ns / 1e9 for step in read_records(cold).steps[0]]
    for seconds, (begin, end) in zip(warm_s, cold_turns, strict=True):
        during = [each for each in ends_s if begin < each < end]
        cold_s = (during[-1] - during[0]) / (len(during) - 1) if len(during) > 1 else None
        turns += [Turn(WARM, seconds), Turn(COLD, cold_s)]
    return turns


def _is_known(setting: Setting, known_to_percent: float) -> bool:
    """True once the difference is known to within this error."""
    return bool(setting.turns) and 100 * median_with_error(setting.speed_ratios)[1] < known_to_percent


def rows(strategy: str, settings: list[Setting]) -> list[Row]:
    """One row a setting, and one for all together."""
    table = []
    for setting in settings:
        times = f"{setting.median_ms(COLD):.1f} ms cold, {setting.median_ms(WARM):.1f} warm"
        peak = f"peak {setting.warm_bytes >> 20} of {setting.cold_bytes >> 20} MiB"
        took = f"{setting.warm_s:.1f} of {setting.cold_s:.1f} s"
        table.append(_row(f"{strategy}: {setting.words}", setting.speed_ratios, f"{times}; {peak}; {took}"))
    together = [ratio for setting in settings for ratio in setting.speed_ratios]
    return [*table, _row(f"{strategy}: all of these", together, f"{len(together)} turns")]


def _row(what: str, ratios: Sequence[float], more: str) -> Row:
    """The step time of trials above that of runs, of these ratios of their speeds."""
    speed, error = median_with_error(ratios)
    gap_percent, error_percent = 100 * (1 / speed - 1), 100 * error
    judged = error_percent <= TOLERANCE_PERCENT
    budget = f"within {TOLERANCE_PERCENT:g} %" if judged else "not judged: too much noise"
    held = judged and abs(gap_percent) <= TOLERANCE_PERCENT
    return what, f"{gap_percent:+.1f} +-{error_percent:.1f} %; {more}", budget, held


def main() -> int:
    """Measure every strategy and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default="single;ddp")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the turns of a setting, at most")
    parser.add_argument("--known-to", type=float, default=0.8 * TOLERANCE_PERCENT, metavar="PERCENT", help="then go on")
    parser.add_argument("--set", action="append", default=[], metavar="KNOB=VALUE")
    parser.add_argument("--only", action="append", default=[], metavar="KNOB=VALUE", help="settings with this override")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}")
    strategies = options.strategies.split(";")
    settings = {name: measure(name, options) for name in strategies}
    return print_table([row for name, each in settings.items() for row in rows(name, each)])


if __name__ == "__main__":
    sys.exit(main())

"""The accuracy of predicted speeds: `python benchmarks/predicted_speed.py`, or `--live` to train for real.

Over each grid in `benchmarks/grids`, once a seed: three settings are measured (the baseline and two others), and the
speed of 20 others is predicted, by the traces of their model and a calibration of this machine. A grid was recorded on
another day: the calibrated times are scaled as the grid's anchor setting was slower then than now. Without a grid the
settings are those of synthetic spaces, labelled so: they judge the code, not a machine. `--live` calibrates, trains
three settings of tiny-llama, then others, each predicted before it starts. Exits 1 when a budget is not held.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, Python looks for modules beside this file only.
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.as_installed import app
from benchmarks.best_fit_spaces import GRIDS, Recorded, Synthetic
from benchmarks.budget import Row, print_table

from trainfast_runner.machine import calibration
from trainfast_runner.machine.calibration import Ceiling, calibrate
from trainfast_runner.machine.devices import Machine
from trainfast_runner.memory.tracing import trace_models
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_file import PredictedSpeed
from trainfast_runner.search.candidate_spec import candidate_spec
from trainfast_runner.search.speed.earlier_speeds import EarlierSpeed
from trainfast_runner.search.speed.predicted_speed import SpeedModel
from trainfast_runner.search.speed.step_time import ExpectedStep, step_time
from trainfast_runner.settings.device_counts import device_count
from trainfast_runner.settings.spec import RunSpec, resolve

SEEDS, UNSEEN = 20, 20
MIN_PREDICTED, MIN_INSIDE = 15, 16
"""The budgets for unseen settings after three runs."""
MAX_ERROR, WITHIN = 0.12, 2.0
"""The median error after three runs, and the factor that a prediction before any run is within."""
MIN_WITHIN = 0.95
"""For settings shown before any run: the widest 90 % interval that is shown leaves 4 % outside a factor of 2."""
ANCHOR_RUNS, ANCHOR_STEPS = 3, 40
SLOW_PRECISION = 0.1
"""A precision slower than this share of fp32 is not trained."""
STEP_NOISE = 1e-4
"""Variance of the ln rate of some steps of one visit."""


@dataclass(frozen=True)
class Setting:
    """A setting with the calibrated time of its step. `rates` are its ln samples/s, one a visit."""

    spec: RunSpec
    devices: int
    time: ExpectedStep
    rates: tuple[float, ...]

    def measured(self, seed: random.Random) -> EarlierSpeed:
        """The speed in one of its visits, as a run would have measured it."""
        return EarlierSpeed(self.spec, self.devices, seed.choice(self.rates), STEP_NOISE, f"{seed.random()}")


@dataclass
class Score:
    """Predictions beside what was measured. `errors` are of ln rate, `shown` is the number of predictions."""

    shown: int = 0
    asked: int = 0
    errors: list[float] = field(default_factory=list)
    inside: int = 0

    def add(self, predicted: object, log_rate: float) -> None:
        """Compare one prediction, or the lack of one."""
        self.asked += 1
        if isinstance(predicted, PredictedSpeed):
            self.shown += 1
            self.errors.append(abs(log_rate - math.log(predicted.median)))
            self.inside += predicted.low <= math.exp(log_rate) <= predicted.high


@dataclass
class Scores:
    """The scores of a terrain, one a seed: before any run, and after three."""

    name: str
    before: list[Score] = field(default_factory=list)
    after: list[Score] = field(default_factory=list)

    def rows(self) -> Iterator[Row]:
        """The budgets, each by the median of the seeds."""
        predicted = statistics.median(score.shown for score in self.after)
        yield self._row(
            "predicted after three runs",
            f"{predicted:g} of {UNSEEN}",
            f">= {MIN_PREDICTED}",
            predicted >= MIN_PREDICTED,
        )
        error = statistics.median(math.expm1(_median(score.errors)) for score in self.after)
        yield self._row("median error", f"{100 * error:.1f} %", f"<= {100 * MAX_ERROR:g} %", error <= MAX_ERROR)
        share = sum(score.inside for score in self.after) / max(1, sum(score.shown for score in self.after))
        measured = f"{100 * share:.0f} % of those shown"
        yield self._row(
            "inside the 90 % interval",
            measured,
            f">= {MIN_INSIDE} of {UNSEEN}",
            share >= MIN_INSIDE / UNSEEN,
        )
        shown = sum(score.shown for score in self.before)
        close = sum(error <= math.log(WITHIN) for score in self.before for error in score.errors)
        asked = sum(score.asked for score in self.before)
        yield self._row(
            "before any run, within a factor of 2",
            f"{close} of {shown} shown, of {asked}",
            f">= {100 * MIN_WITHIN:g} %",
            0 < MIN_WITHIN * shown <= close,
        )

    def _row(self, what: str, measured: str, budget: str, held: bool) -> Row:
        return f"{self.name}: {what}", measured, budget, held


def main() -> int:
    """Print the table; the exit status is 1 when a budget is not held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", type=Path, default=GRIDS, metavar="FOLDER", help="the folder of recorded grids")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how often three settings are drawn")
    parser.add_argument("--live", action="store_true", help="train tiny-llama on this machine")
    options = parser.parse_args()
    if options.live:
        return print_table(list(live().rows()))
    scores = [score(path.stem, of_grid(path), options.seeds) for path in sorted(options.grids.glob("*.json"))]
    if not scores:
        print("no recorded grid: synthetic spaces, which judge the code and not a machine", file=sys.stderr)
        scores = [of_synthetic_spaces(options.seeds)]
    return print_table([row for terrain in scores for row in terrain.rows()])


def score(name: str, settings: Sequence[Setting], seeds: int) -> Scores:
    """Predict unseen settings from none and from three measured ones, once a seed; the first is the baseline."""
    scores = Scores(name)
    for number in range(seeds):
        seed = random.Random(number)
        others = seed.sample(settings[1:], min(UNSEEN + 2, len(settings) - 1))
        known = [(setting.measured(seed), setting.time) for setting in (settings[0], *others[:2])]
        scores.before.append(_scored(SpeedModel(settings[0].spec, [], calibrated=True), others[2:], seed))
        scores.after.append(_scored(SpeedModel(settings[0].spec, known, calibrated=True), others[2:], seed))
    return scores


def _scored(model: SpeedModel, settings: Sequence[Setting], seed: random.Random) -> Score:
    """Predict each setting, and compare with what one of its visits measured."""
    score = Score()
    for setting in settings:
        score.add(model.predict(setting.spec, setting.devices, setting.time), seed.choice(setting.rates))
    return score


def of_grid(path: Path) -> list[Setting]:
    """The settings of a recorded grid, the baseline first, each with its time by a trace and this machine's speeds."""
    stored, terrain = json.loads(path.read_text()), Recorded(path)
    spec, machine = resolve(stored["preset"], stored["settings"]), Machine("cpu", (), (), os.cpu_count() or 1)
    numbers = [
        terrain.space.baseline_number,
        *(number for number in terrain.rates if number != terrain.space.baseline_number),
    ]
    specs = [candidate_spec(spec, terrain.space.candidates[number].knobs) for number in numbers]
    ceiling = ceiling_of_one_thread()
    slower = terrain.anchor_ms / anchor_ms(stored["preset"], stored["settings"])
    print(f"{path.stem}: its anchor took {slower:.2f} times as long as now", file=sys.stderr)
    settings: dict[int, Setting] = {}
    for place, model in trace_models(specs, "cpu"):
        if isinstance(model, Exception):
            raise model
        devices = device_count(specs[place], machine)
        time = step_time(specs[place], model, devices, machine.cores, ceiling)
        assert time is not None
        time = replace(time, seconds=slower * time.seconds)
        settings[place] = Setting(specs[place], devices, time, tuple(terrain.rates[numbers[place]]))
    return [settings[place] for place in sorted(settings)]


def anchor_ms(preset: str, settings: Sequence[str]) -> float:
    """Train a grid's baseline as it was recorded, with one thread a rank; return the median run's median step."""
    with tempfile.TemporaryDirectory() as folder:
        home = {**os.environ, "TRAINFAST_HOME": folder, "OMP_NUM_THREADS": "1"}
        words = [word for setting in settings for word in ("--set", setting)]
        runs = [_printed(home, "run", preset, "--set", f"steps={ANCHOR_STEPS}", *words) for _ in range(ANCHOR_RUNS)]
    return statistics.median(float(run["step_ms"]["p50"]) for run in runs)


def ceiling_of_one_thread() -> Ceiling:
    """Calibrate this machine with one thread, as grids are recorded."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        ceiling = calibrate(Home(Path(folder)))
    if ceiling.disturbed:
        print("other processes took the CPU while it was calibrated: its speeds are too low", file=sys.stderr)
    return ceiling


def of_synthetic_spaces(seeds: int) -> Scores:
    """Predict in synthetic spaces, whose parts a calibration knows with an error."""
    scores = Scores("synthetic")
    for number in range(seeds):
        space_scores = score("", synthetic_settings(Synthetic(number), random.Random(f"calibration {number}")), 1)
        scores.before += space_scores.before
        scores.after += space_scores.after
    return scores


def synthetic_settings(space: Synthetic, draw: random.Random) -> list[Setting]:
    """The settings of a synthetic space, the baseline first. The calibration is off by a factor for each part."""
    off = [math.exp(draw.gauss(0, spread)) for spread in (0.3, 0.2, 0.3)]
    baseline, candidates = space.space.baseline_number, space.space.candidates
    numbers = [baseline, *(number for number in space.truth if number != baseline)]
    base = resolve("tiny-llama")
    settings = []
    for number in numbers:
        candidate = candidates[number]
        parts = [part * slower for part, slower in zip(space.parts_s(candidate.knobs), off, strict=True)]
        shares = tuple(part / sum(parts) for part in parts)
        time = ExpectedStep(sum(parts), shares, candidate.samples_per_step)
        settings.append(Setting(candidate_spec(base, candidate.knobs), 1, time, (space.truth[number],)))
    return settings


def live() -> Scores:
    """Calibrate, train three settings of tiny-llama, then unseen ones, each predicted before it starts."""
    draw, scores = random.Random(0), Scores("live")
    with tempfile.TemporaryDirectory() as folder:
        home = {**os.environ, "TRAINFAST_HOME": folder}
        _printed(home, "doctor", "--calibrate")
        (ceiling,) = calibration.read(Home(Path(folder))).values()
        # A CPU that only emulates bf16 would take minutes a run.
        precisions = [
            name for name in ("fp32", "bf16") if ceiling.tflops[name] > SLOW_PRECISION * ceiling.tflops["fp32"]
        ]
        batches, optimizers = (2, 3, 4, 6, 8, 12, 16, 32), ("adamw", "adamw-fused")
        grid = [
            {"batch_size": batch, "precision": precision, "optimizer": optimizer, "checkpointing": checkpointing}
            for batch, precision, optimizer, checkpointing in itertools.product(
                batches, precisions, optimizers, ("off", "full")
            )
        ]
        draw.shuffle(grid)
        scores.before.append(Score())
        scores.after.append(Score())
        for place, knobs in enumerate([{}, *grid[: 2 + UNSEEN]]):
            settings = [word for name, value in knobs.items() for word in ("--set", f"{name}={value}")]
            throughput = _printed(home, "run", "tiny-llama", "--set", "steps=20", *settings)["throughput"]
            predicted, rate = throughput["predicted"], throughput["samples_per_s"]["median"]
            print(f"{knobs or 'the preset'}: {rate:.1f} samples/s, predicted {predicted}", file=sys.stderr)
            into = scores.before[-1] if place == 0 else scores.after[-1] if place > 2 else Score()
            into.add(None if predicted is None else _speed(predicted), math.log(rate))
    return scores


def _speed(fields: Mapping[str, Any]) -> PredictedSpeed:
    return PredictedSpeed(median=fields["median"], low=fields["low"], high=fields["high"], basis=fields["from"])


def _printed(environment: Mapping[str, str], *words: str) -> dict[str, Any]:
    """Return the JSON object that a command prints. Raises CalledProcessError."""
    done = subprocess.run([*app(), *words, "--json"], env=environment, check=True, capture_output=True, text=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.inf


if __name__ == "__main__":
    sys.exit(main())

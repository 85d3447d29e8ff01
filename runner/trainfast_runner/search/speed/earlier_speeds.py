"""Speeds that were measured on this device: finished runs of the history, and trials of best-fit searches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.result import Result
from trainfast_runner.records.roles import WARM_ROLES
from trainfast_runner.records.run_directory import read_run_file, read_written_result
from trainfast_runner.records.run_file import SCHEMA, RecordedSpec, RunFile
from trainfast_runner.records.search_directories import newest_search_directories
from trainfast_runner.results.distributions import MAD_TO_SIGMA, MEDIAN_VARIANCE
from trainfast_runner.search.candidate_spec import candidate_spec
from trainfast_runner.search.journal.best import BestQuestion, Space, Trial, read_best_journal
from trainfast_runner.search.searches import BEST_KIND, first_line
from trainfast_runner.search.speed.trial_rates import log_rate, measurements
from trainfast_runner.settings.spec import RunSpec, spec_of_record

RUNS_READ_FOR_SPEEDS, SEARCHES_READ_FOR_SPEEDS = 200, 20
"""Number of newest runs and searches that are read."""
MAX_OF_MODEL, MAX_OF_OTHERS = 60, 10
"""Largest number of measured speeds that count: of the spec's model, and of other models."""
SLOW_SHARE = 0.5
"""Share of the step-to-step deviation that shifts a whole run: slow and fast spells outlast one run."""
COMPARABLE_THROTTLED_SHARE = 0.05
"""The speed of a run counts if heat or a power brake slowed it for at most this share of the time."""


@dataclass(frozen=True)
class EarlierSpeed:
    """The ln samples/s that a run or a trial measured, with the variance of its noise.

    `process` is the run id of the process that measured.
    """

    spec: RunSpec
    devices: int
    log_rate: float
    variance: float
    process: str


@dataclass(frozen=True)
class SpeedDevice:
    """The device whose speeds are compared: cpu or cuda, and the GPU's name, empty for a CPU."""

    kind: str
    gpu: str = ""


def training_of(spec: RunSpec | RecordedSpec) -> tuple[Mapping[str, Any], object, object]:
    """Return the part of a run that is its training: the model, the training objective and the kind of data."""
    return spec.model, spec.data.get("objective"), spec.data.get("kind")


def measured_speeds(home: Home, spec: RunSpec, device: SpeedDevice) -> list[EarlierSpeed]:
    """Return the newest comparable speeds on this device: of the spec's model, then a few of other models.

    Raises UserError when the home cannot be listed.
    """
    own_speeds: list[EarlierSpeed] = []
    other_speeds: list[EarlierSpeed] = []
    for speed in _speeds_of_runs(home, device):
        speeds, max_count = (
            (own_speeds, MAX_OF_MODEL)
            if training_of(speed.spec) == training_of(spec)
            else (other_speeds, MAX_OF_OTHERS)
        )
        if len(speeds) < max_count:
            speeds.append(speed)
    for speed in _speeds_of_trials(home, spec, device):
        if len(own_speeds) == MAX_OF_MODEL:
            break
        own_speeds.append(speed)
    return [*own_speeds, *other_speeds]


def _speeds_of_runs(home: Home, device: SpeedDevice) -> Iterator[EarlierSpeed]:
    for run_id in home.newest_run_ids(RUNS_READ_FOR_SPEEDS):
        result = read_written_result(home.directory(run_id))
        if result is None or not is_comparable(result):
            continue
        run = read_run_file(home.directory(run_id))
        if run is None or run.script is not None:
            continue  # the speed of the user's own script
        if _device_of(run) == device and (speed := _speed_of_run(run, result)) is not None:
            yield speed


def is_comparable(result: Result) -> bool:
    """True if a run's speed is that of its settings.

    The run finished, was not slowed by heat or a power brake, and was not measured under strict thresholds.
    """
    if result.state != "finished" or result.role in WARM_ROLES or result.measured_under is not None:
        return False
    throttled = (result.throttle.thermal_fraction or 0.0) + (result.throttle.brake_fraction or 0.0)
    return throttled <= COMPARABLE_THROTTLED_SHARE and bool(result.throughput.samples_per_s.typical)


def _speed_of_run(run: RunFile, result: Result) -> EarlierSpeed | None:
    rate = result.throughput.samples_per_s
    try:
        spec = spec_of_record(run)
    except UserError:
        return None  # knobs of another version
    assert rate.typical
    deviation = MAD_TO_SIGMA * (rate.mad or 0.0) / rate.typical
    # Other processes slow a run by about the share of the cores that they take.
    others_share = (result.conditions.others_cpu_percent or 0.0) / 100
    variance = (MEDIAN_VARIANCE / max(1, result.steps.measured) + SLOW_SHARE**2) * deviation**2 + others_share**2
    return EarlierSpeed(spec, max(run.world_size, len(run.device_uuids)), math.log(rate.typical), variance, run.run_id)


def _speeds_of_trials(home: Home, spec: RunSpec, device: SpeedDevice) -> Iterator[EarlierSpeed]:
    """Yield the newest trial of each candidate in best-fit searches of the same training, the newest first."""
    for directory in newest_search_directories(home, SEARCHES_READ_FOR_SPEEDS):
        question_line = first_line(directory)
        # A newer version's lines may mean something else.
        if question_line.kind != BEST_KIND or question_line.schema > SCHEMA:
            continue
        lines = read_best_journal(directory)
        question = newest(lines, BestQuestion)
        space = newest(lines, Space)
        if question is None or space is None or training_of(question) != training_of(spec):
            continue
        if SpeedDevice(question.device, next(iter(question.device_names), "")) != device:
            continue
        measured = measurements(lines)
        newest_trials: dict[int, Trial] = {}
        for trial in reversed(measured.trials):
            if not trial.repeats:
                newest_trials.setdefault(trial.candidate_number, trial)
        for trial in newest_trials.values():
            candidate = space.candidates[trial.candidate_number]
            rate = log_rate(trial)
            try:
                tried_spec = candidate_spec(spec_of_record(question), candidate.knobs)
            except UserError:
                break  # knobs of another version
            assert rate is not None
            yield EarlierSpeed(tried_spec, candidate.world_size, rate, measured.variance(trial), trial.run_id)


def _device_of(run: RunFile) -> SpeedDevice:
    return SpeedDevice(run.device, next(iter(run.device_names), ""))

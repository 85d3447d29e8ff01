"""Speeds that were measured on this device: finished runs of the history, and trials of best-fit searches."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home, newest_search_directories
from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import read_result, read_run_file
from trainfast_runner.records.run_file import SCHEMA, RecordedSpec, RunFile
from trainfast_runner.records.worker_lines import WARM_ROLES
from trainfast_runner.results.distributions import MAD_TO_SIGMA, MEDIAN_VARIANCE
from trainfast_runner.search.best_journal import (
    TIMED_OUTCOMES,
    BestLine,
    BestQuestion,
    ProcessReady,
    Space,
    Trial,
    read_best_journal,
)
from trainfast_runner.search.searches import BEST_KIND, KnobsKey, candidate_spec, first_line, knobs_key
from trainfast_runner.settings.spec import RunSpec, spec_of_record

VOID_LOG_DRIFT = 0.02
"""A process is void if the ln rate of its first candidate changed by more than this until its end."""
MAX_VOID_PROCESSES = 3
"""After this many voided processes drift counts as noise of the machine, and voids no more of them."""
SURE_ERRORS = 3
"""A drift is one only beyond this many times its own error."""
MIN_SPREAD_STEPS = 3
"""The fewest steps that show a spread."""
POOL_STEPS = 4
"""Chosen, not measured: the pooled variance of a step weighs as much as this many steps of the trial itself."""
NOISE_GRID_RATIO = 1.25
"""The pooled noise is rounded to powers of this ratio, so that a new trial seldom changes the noise of all others."""
MIN_RATE_DEVIATION = 0.001
"""Chosen, not measured: the least deviation of a trial in ln rate, even if its few steps are equal."""
DEFAULT_STEP_DEVIATION = 0.02
"""The deviation of a step before three steps of one candidate were measured."""


@dataclass(frozen=True)
class Measurements:
    """The trials that count, and the noise of their rates."""

    trials: tuple[Trial, ...]
    step_deviation: float
    """The deviation of ln step time, pooled over all trials."""
    void_run_ids: frozenset[str]
    """The run ids of voided processes."""
    drifts: tuple[float, ...]
    """The ln rate of each process's reference at its end less that at its beginning."""
    drift_variance: float = 0.0
    """Variance of each trial by drift, where drift is noise and voids no process."""
    drift_variance_by_run: Mapping[str, float] = field(default_factory=dict)
    """Variance of a trial by the drift of its process, by run id, for processes that drifted and count all the same."""

    @property
    def drift_deviation(self) -> float:
        """The least deviation between processes: their drift if too many drifted for an accident, else 0."""
        if len(self.void_run_ids) + len(self.drift_variance_by_run) < MAX_VOID_PROCESSES:
            return 0.0
        square = sum(drift * drift for drift in self.drifts) / len(self.drifts)
        return math.sqrt(square / 2) if square > VOID_LOG_DRIFT * VOID_LOG_DRIFT else 0.0

    def variance(self, trial: Trial) -> float:
        """Return the variance of a trial's ln rate by its own steps and the pooled ones."""
        deviations = _deviations(trial.step_ms)
        count, step_variance = len(deviations), self.step_deviation**2
        if count > 2:
            pooled = POOL_STEPS * step_variance
            step_variance = (pooled + count * _robust_variance(deviations)) / (POOL_STEPS + count)
        drift_variance = self.drift_variance + self.drift_variance_by_run.get(trial.run_id, 0.0)
        return MEDIAN_VARIANCE * step_variance / max(1, len(trial.step_ms)) + MIN_RATE_DEVIATION**2 + drift_variance


def measurements(lines: Iterable[BestLine], *, voids_drifted: bool = True) -> Measurements:
    """Return the trials that count: measured or slow, in no voided process.

    Without `voids_drifted` the trials of a process that drifted count, with its drift as noise. If a counted trial was
    disturbed, drift is noise in every process.
    """
    timed = [
        line
        for line in lines
        if isinstance(line, Trial) and line.outcome in TIMED_OUTCOMES and line.step_ms and min(line.step_ms) > 0
    ]
    deviation = _pooled(timed)
    is_noise = any(trial.counts_disturbed for trial in timed)
    processes: dict[str, list[Trial]] = defaultdict(list)
    for trial in timed:
        processes[trial.run_id].append(trial)
    drifted: dict[str, float] = {}
    drifts = []
    for run_id, trials in processes.items():
        drift = _drift(trials)
        if drift is None:
            continue
        size, error = drift
        drifts.append(size)
        has_drifted = abs(size) > max(VOID_LOG_DRIFT, SURE_ERRORS * error * deviation)
        if has_drifted and len(drifted) < MAX_VOID_PROCESSES and not is_noise:
            # Both ends have an error: half of the squared difference is the variance of one.
            drifted[run_id] = size * size / 2
    noise = statistics.fmean(drift * drift for drift in drifts) / 2 if is_noise and drifts else 0.0
    if not voids_drifted:
        return Measurements(tuple(timed), deviation, frozenset(), tuple(drifts), noise, drifted)
    counted = tuple(trial for trial in timed if trial.run_id not in drifted)
    return Measurements(counted, deviation, frozenset(drifted), tuple(drifts), noise)


def reference_of(trials: Sequence[Trial]) -> Trial | None:
    """Return the first trial of a process that was measured to its end; None without one.

    The repeat of that trial at the end of the process shows drift. A slow candidate would take long to repeat.
    """
    return next((trial for trial in trials if trial.outcome == "measured"), None)


def log_rate(trial: Trial, *, per_joule: bool = False) -> float | None:
    """Return the ln of samples/s by the median step, or of samples a joule; None without an energy counter."""
    if per_joule:
        return math.log(trial.samples_per_step * len(trial.step_ms) / trial.joules) if trial.joules else None
    return math.log(1000 * trial.samples_per_step / statistics.median(trial.step_ms))


def relative_error(step_ms: Sequence[float]) -> float:
    """Return the standard error of the median step time, as a share of the median; infinite below three steps."""
    deviations = _deviations(step_ms)
    return math.sqrt(MEDIAN_VARIANCE * _robust_variance(deviations) / len(step_ms)) if deviations else math.inf


def steps_for(deviation: float, error: float, min_steps: int, max_steps: int) -> int:
    """Return the steps, from `min_steps` to `max_steps`, after which the median's expected standard error is `error`.

    `deviation` is that of ln step time.
    """
    return max(min_steps, min(max_steps, math.ceil(MEDIAN_VARIANCE * (deviation / error) ** 2)))


def _drift(trials: Sequence[Trial]) -> tuple[float, float] | None:
    """Return the ln rate of a process's reference at the end less that at the beginning; None without a repeat.

    The second figure is the error of the first, in deviations of a step.
    """
    reference = reference_of(trials)
    if reference is None:
        return None
    first_trials = [
        trial for trial in trials if trial.candidate_number == reference.candidate_number and not trial.repeats
    ]
    last_trials = [trial for trial in trials if trial.candidate_number == reference.candidate_number and trial.repeats]
    if not first_trials or not last_trials:
        return None
    begin = [step for trial in first_trials for step in trial.step_ms]
    end = [step for trial in last_trials for step in trial.step_ms]
    size = math.log(statistics.median(begin) / statistics.median(end))
    return size, math.sqrt(MEDIAN_VARIANCE * (1 / len(begin) + 1 / len(end)))


def _deviations(step_ms: Sequence[float]) -> list[float]:
    """Return the ln of each step less that of the median step; empty below three steps, too few for a spread."""
    if len(step_ms) < MIN_SPREAD_STEPS:
        return []
    middle = math.log(statistics.median(step_ms))
    return [math.log(step) - middle for step in step_ms]


def _robust_variance(deviations: Sequence[float]) -> float:
    """Return the variance by the median absolute deviation.

    The factor n / (n - 1) corrects for the median, which is taken from the same values.
    """
    if not deviations:
        return 0.0
    deviation = MAD_TO_SIGMA * statistics.median(map(abs, deviations))
    return deviation**2 * len(deviations) / max(1, len(deviations) - 1)


def _pooled(trials: Sequence[Trial]) -> float:
    """Return the deviation of ln step time, pooled over all trials and rounded to a grid."""
    residuals = [
        abs(deviation) * math.sqrt(len(trial.step_ms) / (len(trial.step_ms) - 1))
        for trial in trials
        for deviation in _deviations(trial.step_ms)
    ]
    noise = MAD_TO_SIGMA * statistics.median(residuals) if residuals else DEFAULT_STEP_DEVIATION
    return float(NOISE_GRID_RATIO ** round(math.log(max(noise, MIN_RATE_DEVIATION)) / math.log(NOISE_GRID_RATIO)))


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
        result = read_result(home.directory(run_id))
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


GUESSED_START_S, GUESSED_COMPILATION_S, GUESSED_SWITCH_S = 10.0, 40.0, 0.3
"""Assumed before the first process start, the first compilation and the first warm trial."""


class ProcessStarts:
    """Seconds until a process takes its first timed step, by its key."""

    def __init__(self, lines: Sequence[BestLine]) -> None:
        untimed_s: dict[str, float] = {}
        for line in lines:
            if isinstance(line, Trial) and not line.warm and line.run_id not in untimed_s:
                untimed_s[line.run_id] = _untimed_s(line)
        starts_s: dict[KnobsKey, list[float]] = defaultdict(list)
        for line in lines:
            if isinstance(line, ProcessReady):
                starts_s[knobs_key(line.process_knobs)].append(line.start_s + untimed_s.get(line.run_id, 0.0))
        self._measured_s = {key: statistics.median(seconds) for key, seconds in starts_s.items()}
        self._guessed_s: dict[KnobsKey, float] = {}

    def seconds(self, key: KnobsKey) -> float:
        """Return the measured start of this process, else that of the most similar one."""
        if key in self._measured_s:
            return self._measured_s[key]
        if key not in self._guessed_s:
            self._guessed_s[key] = self._guess_s(key)
        return self._guessed_s[key]

    def _guess_s(self, key: KnobsKey) -> float:
        compilation_s = GUESSED_COMPILATION_S if _compiles(key) else 0.0
        if not self._measured_s:
            return GUESSED_START_S + compilation_s
        similar_keys = [other_key for other_key in self._measured_s if _compiles(other_key) == _compiles(key)]
        knobs = dict(key)
        _, start_s = max(
            (sum(knobs.get(name) == value for name, value in other_key), self._measured_s[other_key])
            for other_key in similar_keys or self._measured_s
        )
        return start_s if similar_keys else start_s + compilation_s


def _compiles(key: KnobsKey) -> bool:
    return dict(key).get("compile", "off") != "off"


def switch_seconds(trials: Iterable[Trial]) -> float:
    """Return the median seconds of a warm trial without its timed steps."""
    return statistics.median([_untimed_s(trial) for trial in trials if trial.warm] or [GUESSED_SWITCH_S])


def _untimed_s(trial: Trial) -> float:
    return max(0.0, trial.seconds - sum(trial.step_ms) / 1000)

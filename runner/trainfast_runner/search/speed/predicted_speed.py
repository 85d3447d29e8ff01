"""The samples/s of a run before it, with a 90 % interval: the calibrated time of its step, corrected by earlier runs.

ln(measured rate x calibrated step time) is modelled as the parts of the step that take longer than calibrated, each by
its share of the step, plus the speed of the machine since it was calibrated, plus the effects of knobs as in a best-fit
search, relative to `REFERENCE`, plus a process's own effect and noise. The posterior is exact (Rasmussen and Williams,
"Gaussian Processes for Machine Learning", 2.2).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add, mul
from typing import NamedTuple

from trainfast_runner.records.run_file import PredictedSpeed
from trainfast_runner.results.distributions import NORMAL_90
from trainfast_runner.search.speed.earlier_speeds import EarlierSpeed, training_of
from trainfast_runner.search.speed.effects import (
    CovarianceParts,
    Factor,
    FactorRow,
    Observation,
    PriorCovariance,
    Scales,
    covariance_parts,
)
from trainfast_runner.search.speed.levels import Levels
from trainfast_runner.search.speed.step_time import ExpectedStep
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.settings.spec import RunSpec

MAX_SHOWN_RATIO = 3.0
"""An interval whose upper end is this many times its lower end is too wide to be shown."""
WORK_DEVIATIONS = (0.3, 0.2, 0.3)
"""Prior deviations, in ln seconds, of how much longer calls, FLOPs and moved bytes take than calibrated."""
UNCALIBRATED_WORK_DEVIATIONS = (1.5, 1.5, 1.5)
"""`WORK_DEVIATIONS` of a device that was not calibrated: nominal speeds stand in."""
MACHINE_DEVIATION = 0.15
"""Prior deviation, in ln seconds, of every step alike: other work, heat or a host's other guests change a machine."""
KNOB_DEVIATIONS = {
    "precision": 0.15,
    "batch_size": 0.08,
    "grad_accum": 0.03,
    "seq_len": 0.1,
    "checkpointing": 0.05,
    "optimizer": 0.05,
    "attention": 0.1,
    "compile": 0.2,
    "engine": 0.1,
    "workers": 0.05,
    "pin_memory": 0.02,
    "prefetch": 0.02,
    # Ranks also communicate: fsdp of two gloo ranks took 1.4 to 2.7 times as long as ddp (`benchmarks/grids`).
    "strategy": 0.4,
    "devices": 0.1,
    "tp_degree": 0.2,
    "pp_degree": 0.2,
    "pp_schedule": 0.1,
    "micro_batches": 0.1,
    "reshard": 0.1,
    "p2p": 0.2,
    "grad_clip": 0.02,
    "model": 0.12,
}
"""Prior deviations, in ln rate, of a knob's effect beyond the work it changes. Other knobs do not change the speed."""
SCALES = Scales(main=0.1, pair=0.03, visit=0.04)
VISITS = (0.04, 0.08, 0.16)
"""Deviations between runs of the same settings: the most likely one, of `ENOUGH_RUNS` or more, else the first."""
ENOUGH_RUNS = 4
WEIGHTS = {name: (deviation / SCALES.main) ** 2 for name, deviation in KNOB_DEVIATIONS.items()}
REFERENCE: KnobValues = {
    **{name: value for name, value in defaults().items() if name in KNOB_DEVIATIONS},
    "batch_size": 8,
    "devices": 1,
    "model": "",
}
"""Knobs whose time is their work alone; the effect of any other value is relative to these."""
NEAREST = 16
"""Number of earlier speeds behind a prediction: those that differ least."""
NOISE = 1e-4
"""Variance of the ln rate that a run measures, before any run was measured."""

MeasuredStep = tuple[EarlierSpeed, ExpectedStep]
"""An earlier speed, and the step that the calibration expects of its settings."""


@dataclass(frozen=True)
class Unknown:
    """The reason, in a few words, why no speed is predicted."""

    why: str


@dataclass(frozen=True)
class _Timed:
    """A run with its time by the calibration. `observation` is relative to REFERENCE."""

    observation: Observation
    shares: tuple[float, ...]


class _Pair(NamedTuple):
    """The prior covariance of two runs: its parts by knobs, and that by work and machine."""

    by_knobs: CovarianceParts
    by_work: float


class _Fit:
    """The measured runs under one prior. `pairs` are those of each run with itself and those before it."""

    def __init__(self, prior: PriorCovariance, runs: Sequence[_Timed], pairs: Sequence[Sequence[_Pair]]) -> None:
        self._prior, self.factor = prior, Factor()
        for run, with_earlier in zip(runs, pairs, strict=False):
            self._add(run, with_earlier)

    def predict(self, run: _Timed, pairs: Sequence[_Pair]) -> tuple[float, float]:
        """Return mean and deviation of the ln rate of one more run, relative to its calibrated step."""
        measured = self.factor.whitened.copy()
        row, deviation, _ = self._add(run, pairs)
        return sum(map(mul, row, measured)), deviation

    def _add(self, run: _Timed, pairs: Sequence[_Pair]) -> FactorRow:
        by_knobs = self._prior.from_parts([pair.by_knobs for pair in pairs])
        *covariances, own_variance = map(add, by_knobs, (pair.by_work for pair in pairs))
        return self.factor.add(covariances, own_variance + run.observation.variance, run.observation.value)


class SpeedModel:
    """Predicts speeds of one training on one device from earlier ones there, each with its calibrated step time."""

    def __init__(self, spec: RunSpec, measured: Sequence[MeasuredStep], *, calibrated: bool) -> None:
        self._training = training_of(spec)
        self._measured = measured
        self._work_deviations = WORK_DEVIATIONS if calibrated else UNCALIBRATED_WORK_DEVIATIONS
        self._measured_knobs = [self._speed_knobs(speed.spec, speed.devices) for speed, _ in measured]
        self.own_count = sum(training_of(speed.spec) == self._training for speed, _ in measured)
        # The next run is as noisy as those before.
        self._noise = statistics.median(speed.variance for speed, _ in measured) if measured else NOISE
        self._calibrated = calibrated

    def predict(self, spec: RunSpec, devices: int, step: ExpectedStep) -> PredictedSpeed | Unknown:
        """Predict the speed of a run of the same training; a few milliseconds."""
        wanted = self._speed_knobs(spec, devices)
        near = sorted(
            range(len(self._measured_knobs)),
            key=lambda number: _prior_variance_between(wanted, self._measured_knobs[number]),
        )[:NEAREST]
        levels = Levels([wanted, REFERENCE, *(self._measured_knobs[number] for number in near)], WEIGHTS)
        reference = levels.point(REFERENCE)

        def timed(knobs: KnobValues, step: ExpectedStep, rate: float, variance: float, visit: str) -> _Timed:
            terms = ((1.0, levels.point(knobs)), (-1.0, reference))
            return _Timed(Observation(terms, rate - _log_rate(step), variance, visit), step.shares)

        runs = [
            timed(self._measured_knobs[number], expected, speed.log_rate, speed.variance, speed.visit)
            for number, (speed, expected) in ((number, self._measured[number]) for number in near)
        ]
        runs.append(timed(wanted, step, 0.0, self._noise, ""))
        pairs = [self._pairs_of(levels, run, runs[: place + 1]) for place, run in enumerate(runs)]
        visits = VISITS if len(near) >= ENOUGH_RUNS else VISITS[:1]
        fits = (_Fit(PriorCovariance(levels, replace(SCALES, visit=visit)), runs[:-1], pairs) for visit in visits)
        mean, deviation = max(fits, key=lambda fit: fit.factor.log_likelihood).predict(runs[-1], pairs[-1])
        return self._interval(_log_rate(step) + mean, deviation)

    def _interval(self, log_rate: float, deviation: float) -> PredictedSpeed | Unknown:
        factor = math.exp(NORMAL_90 * deviation)
        if factor * factor >= MAX_SHOWN_RATIO:
            if not self._calibrated:
                return Unknown("this device is not calibrated; doctor --calibrate does it")
            return Unknown(f"known only within a factor of {factor * factor:.1f}; a run tells more")
        median = math.exp(log_rate)
        return PredictedSpeed(median=median, low=median / factor, high=median * factor, basis=self._basis())

    def _basis(self) -> str:
        peaks = "the calibrated speeds of this device" if self._calibrated else "the work of a step"
        if not self._measured:
            return peaks
        others = len(self._measured) - self.own_count
        runs = [f"{self.own_count} of this model"] * bool(self.own_count) + [f"{others} of others"] * bool(others)
        return f"{peaks} and measured runs: {', '.join(runs)}"

    def _speed_knobs(self, spec: RunSpec, devices: int) -> KnobValues:
        """The knobs that speed depends on, the number of devices, and which model is trained."""
        knobs = {name: value for name, value in spec.knobs.items() if name in KNOB_DEVIATIONS}
        training = training_of(spec)
        return {**knobs, "devices": devices, "model": "" if training == self._training else repr(training)}

    def _pairs_of(self, levels: Levels, run: _Timed, others: Sequence[_Timed]) -> list[_Pair]:
        """The run beside each of the others."""
        return [
            _Pair(
                covariance_parts(levels, run.observation, other.observation),
                MACHINE_DEVIATION**2
                + sum(
                    a * b * spread**2
                    for a, b, spread in zip(run.shares, other.shares, self._work_deviations, strict=True)
                ),
            )
            for other in others
        ]


def _prior_variance_between(knobs: KnobValues, other_knobs: KnobValues) -> float:
    """Prior variance of the knobs in which two runs differ."""
    return sum(WEIGHTS[name] for name, value in knobs.items() if other_knobs[name] != value)


def _log_rate(step: ExpectedStep) -> float:
    """The ln samples/s of a step that takes as long as calibrated."""
    return math.log(step.samples / step.seconds)

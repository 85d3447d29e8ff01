"""Predict the samples/s of a run with a 90 % interval: the calibrated time of its step, corrected by earlier runs.

ln(measured rate x calibrated step time) is modelled as the parts of the step that take longer than calibrated, weighted
by their shares of the step, plus the speed of the machine since it was calibrated, plus the effects of knobs as in a
best-fit search, relative to `REFERENCE_KNOBS`, plus a process's own effect and noise. The posterior is exact
(Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2.2).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul

from trainfast_runner.records.run_file import PredictedSpeed
from trainfast_runner.results.distributions import NORMAL_90
from trainfast_runner.search.speed.earlier_speeds import EarlierSpeed, training_of
from trainfast_runner.search.speed.effects import Likelihood, Observation, Scales
from trainfast_runner.search.speed.levels import Levels
from trainfast_runner.search.speed.step_time import ExpectedStep
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.settings.spec import RunSpec

MAX_SHOWN_RATIO = 3.0
"""An interval whose upper end is this many times its lower end is too wide to be shown.

Of speeds with an interval just narrower about 4 % were a factor of two off."""
WORK_DEVIATIONS = (0.3, 0.2, 0.3)
"""Prior deviations, in ln seconds, of how much longer calls, FLOPs and moved bytes take than calibrated."""
UNCALIBRATED_WORK_DEVIATIONS = (1.5, 1.5, 1.5)
"""`WORK_DEVIATIONS` of a device that was not calibrated, where nominal speeds stand in."""
MACHINE_DEVIATION = 0.15
"""Prior deviation, in ln seconds, shared by all steps on this machine: other work, heat, or a host's other guests."""
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
PRIOR_SCALES = Scales(main=0.1, pair=0.03, process=0.04)
"""Prior deviations; that of a knob's effect is scaled to its own in `KNOB_DEVIATIONS` by `KNOB_WEIGHTS`."""
RUN_DEVIATIONS = (0.04, 0.08, 0.16)
"""Deviations between runs of the same settings, in ln rate, to choose from; the first with few runs.

On cores whose speed changed by a third, a fixed 0.04 had 45 % of the speeds inside their 90 % interval."""
ENOUGH_RUNS = 4
"""Number of runs from which their own scatter chooses among `RUN_DEVIATIONS`."""
KNOB_WEIGHTS = {name: (deviation / PRIOR_SCALES.main) ** 2 for name, deviation in KNOB_DEVIATIONS.items()}
"""Factor on the prior variance of each knob's effect."""
REFERENCE_KNOBS: KnobValues = {
    **{name: value for name, value in defaults().items() if name in KNOB_DEVIATIONS},
    "batch_size": 8,
    "devices": 1,
    "model": "",
}
"""Knobs without an effect beyond their work; the effects of other values are relative to these knobs."""
NEAREST_COUNT = 16
"""Number of earlier speeds behind a prediction: those with the most similar settings. 3 ms of CPU; 32 take 16."""
ASSUMED_NOISE_VARIANCE = 1e-4
"""Assumed variance of the ln rate that a run measures, before the first run."""

SpeedAndStep = tuple[EarlierSpeed, ExpectedStep]
"""An earlier speed, and the step that the calibration expects of its settings."""


@dataclass(frozen=True)
class UnknownSpeed:
    """No speed is predicted; the reason in a few words."""

    reason: str


@dataclass(frozen=True)
class _ObservedRun:
    """A run's observation, relative to REFERENCE_KNOBS, and the shares of its step."""

    observation: Observation
    shares: tuple[float, ...]


class SpeedModel:
    """Predicts speeds of one training on one device from earlier ones there, each with its calibrated step time."""

    def __init__(self, spec: RunSpec, measured: Sequence[SpeedAndStep], *, calibrated: bool) -> None:
        self._training = training_of(spec)
        self._measured = measured
        self._work_deviations = WORK_DEVIATIONS if calibrated else UNCALIBRATED_WORK_DEVIATIONS
        self._measured_knobs = [self._speed_knobs(speed.spec, speed.devices) for speed, _ in measured]
        self.own_count = sum(training_of(speed.spec) == self._training for speed, _ in measured)
        # The next run is as noisy as the earlier ones.
        variances = [speed.variance for speed, _ in measured]
        self._noise_variance = statistics.median(variances or [ASSUMED_NOISE_VARIANCE])
        self._calibrated = calibrated

    def predict(self, spec: RunSpec, devices: int, step: ExpectedStep) -> PredictedSpeed | UnknownSpeed:
        """Predict the speed of a run of the same training; takes a few milliseconds."""
        wanted_knobs = self._speed_knobs(spec, devices)
        nearest_numbers = sorted(
            range(len(self._measured_knobs)),
            key=lambda number: _prior_variance_between(wanted_knobs, self._measured_knobs[number]),
        )[:NEAREST_COUNT]
        levels = Levels(
            [wanted_knobs, REFERENCE_KNOBS, *(self._measured_knobs[number] for number in nearest_numbers)], KNOB_WEIGHTS
        )
        reference = levels.point(REFERENCE_KNOBS)

        def observed(
            knobs: KnobValues, step: ExpectedStep, log_rate: float, variance: float, process: str
        ) -> _ObservedRun:
            terms = ((1.0, levels.point(knobs)), (-1.0, reference))
            return _ObservedRun(Observation(terms, log_rate - _log_rate(step), variance, process), step.shares)

        runs = []
        for number in nearest_numbers:
            speed, expected_step = self._measured[number]
            runs.append(
                observed(self._measured_knobs[number], expected_step, speed.log_rate, speed.variance, speed.process)
            )
        runs.append(observed(wanted_knobs, step, 0.0, self._noise_variance, ""))
        fixed_covariances = [
            [self._work_covariance(run, other) for other in runs[: index + 1]] for index, run in enumerate(runs)
        ]
        likelihood = Likelihood(levels, [run.observation for run in runs], 0.0, fixed_covariances)
        deviations = RUN_DEVIATIONS if len(nearest_numbers) >= ENOUGH_RUNS else RUN_DEVIATIONS[:1]
        scales = max(
            (replace(PRIOR_SCALES, process=deviation) for deviation in deviations),
            key=lambda scales: likelihood.log_likelihood(scales, len(nearest_numbers)),
        )
        factor = likelihood.factor(scales)
        # The last row is of the run to predict: its mean rests on the measured runs in the rows before.
        mean, deviation = sum(map(mul, factor.rows[-1], factor.whitened)), factor.diagonal[-1]
        return self._interval(_log_rate(step) + mean, deviation)

    def _interval(self, log_rate: float, deviation: float) -> PredictedSpeed | UnknownSpeed:
        factor = math.exp(NORMAL_90 * deviation)
        if factor * factor >= MAX_SHOWN_RATIO:
            if not self._calibrated:
                return UnknownSpeed("this device is not calibrated; run doctor --calibrate")
            return UnknownSpeed(f"known only within a factor of {factor * factor:.1f}; a run tells more")
        median = math.exp(log_rate)
        return PredictedSpeed(median=median, low=median / factor, high=median * factor, basis=self._basis())

    def _basis(self) -> str:
        peaks = "the calibrated speeds of this device" if self._calibrated else "the work of a step"
        if not self._measured:
            return peaks
        other_count = len(self._measured) - self.own_count
        own_text = f"{self.own_count} of this model" if self.own_count else ""
        other_text = f"{other_count} of others" if other_count else ""
        return f"{peaks} and measured runs: {', '.join(filter(None, (own_text, other_text)))}"

    def _speed_knobs(self, spec: RunSpec, devices: int) -> KnobValues:
        """Return the knobs that speed depends on, the number of devices, and the model."""
        knobs = {name: value for name, value in spec.knobs.items() if name in KNOB_DEVIATIONS}
        training = training_of(spec)
        return {**knobs, "devices": devices, "model": "" if training == self._training else repr(training)}

    def _work_covariance(self, run: _ObservedRun, other: _ObservedRun) -> float:
        """Return the prior covariance of two runs by the parts of their work, and by the machine's speed."""
        parts = zip(run.shares, other.shares, self._work_deviations, strict=True)
        return MACHINE_DEVIATION**2 + sum(a * b * deviation**2 for a, b, deviation in parts)


def _prior_variance_between(knobs: KnobValues, other_knobs: KnobValues) -> float:
    """Return the prior variance of the knobs in which two runs differ."""
    return sum(KNOB_WEIGHTS[name] for name, value in knobs.items() if other_knobs[name] != value)


def _log_rate(step: ExpectedStep) -> float:
    """Return the ln samples/s of a step that takes as long as calibrated."""
    return math.log(step.samples / step.seconds)

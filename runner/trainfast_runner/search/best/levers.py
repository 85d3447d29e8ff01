"""The gain that physics expects of each lever of a best-fit search before it runs, and what bounds it.

A step waits for its data, then come forward and backward, in which host calls and device work overlap on a GPU, then
the optimizer. The baseline's trial has measured these parts, and later trials those of other loaders and optimizers;
the traced calls, FLOPs and bytes of a candidate scale the rest, and a compiler removes calls.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainfast_runner.search.best_journal import BestQuestion, Candidate, Space, StepProfile, Trial
from trainfast_runner.search.effects import Prior
from trainfast_runner.search.predicted_speed import NOMINAL_CEILINGS, OVERLAP_EXPONENT, overlapped
from trainfast_runner.settings.knob_values import KnobValue, whole_number
from trainfast_runner.settings.precisions import peak_precision
from trainfast_runner.worker.catalog import LEVERS

COMPILED = {"default": (1 / 3, 0.9), "blocks": (1 / 3, 1.0), "reduce-overhead": (0.1, 0.9), "max-autotune": (0.1, 0.9)}
"""Shares of the host calls and of the device work that a value of `compile` leaves.

Assumed: fused kernels are about a third as many, CUDA graphs replay a step in a few launches."""
FORWARD_SHARE = 1 / 3
"""The forward's share of the work, which checkpointing repeats in part; for a model that was not traced."""
UNFUSED_ATTENTION, UNKNOWN_BUSY_SHARE = 1.15, 0.5
"""Factors for a model that was not traced: the work with `attention=eager`, and the busy share of the device, are
assumed."""
LOADER_KNOBS = ("workers", "prefetch", "pin_memory")
PHASES = {
    **dict.fromkeys(LOADER_KNOBS, "the wait for data"),
    "optimizer": "the optimizer's step",
    "attention": "attention",
}
"""The part of a step that a knob acts on alone."""
MIN_BOUND = 0.01
"""A knob whose part of the step is below this share is left out."""
UNTRIED_WAIT, MAX_WAIT = 0.5, 0.95
"""Chosen, not measured: the share of a similar loader's wait that another loader is expected to leave; the largest
share of a step that counts as a wait."""
LIMITING_SHARE = 0.03
"""Chosen, not measured: a wait for loader processes above this share of the step decides its time."""
MAX_DEVIATION, MEASURED_DEVIATION = 0.3, 0.02
"""Chosen, not measured: prior deviations, in ln rate, of a knob's effect, and of one whose phase is measured for every
value."""
KNOWN_WORK = {"checkpointing": 0.1, "attention": 0.1, "loss": 0.1, "allocator": 0.05}
"""Prior deviations of knobs whose traced work tells most of their effect.

With 0.16 for the batch, whose best size depends on caches, 8 of 80 synthetic spaces were over 2 % off."""
BUSY_GPU_SHARE = 0.9
"""Chosen, not measured: from this share on kernels, and no launches, decide the time of a step."""
MIN_UNUSED_GAIN, ENOUGH_OF_IT = 1.2, 0.9
"""Chosen, not measured: of a lever left alone, the least gain that is worth a line, and the share of
a 64 times larger batch's gain that is enough."""


def _work_of(device: str, candidate: Candidate) -> tuple[float, float, float]:
    """Return seconds of host calls, of device work, and of the optimizer; of a model not traced in a unit of their own.

    A script is not traced: each of its micro-batches makes the same calls.
    """
    knobs = candidate.knobs
    calls, work = COMPILED.get(str(knobs.get("compile")), (1.0, 1.0))
    if candidate.host_s and candidate.device_s:
        return calls * candidate.host_s, work * candidate.device_s, candidate.optimizer_s or 0.0
    more = 1.0 + FORWARD_SHARE * LEVERS["checkpointing"][knobs.get("checkpointing")].recomputed
    more *= UNFUSED_ATTENTION if knobs.get("attention") == "eager" else 1.0
    tflops = NOMINAL_CEILINGS[device].tflops
    work /= tflops.get(peak_precision(str(knobs.get("precision", "fp32"))), tflops["fp32"]) / tflops["fp32"]
    micro_batches = whole_number(knobs, "grad_accum") if "grad_accum" in knobs else 1
    return calls * more * micro_batches, work * more * candidate.samples_per_step, 0.0


@dataclass(frozen=True)
class StepParts:
    """The parts of a measured step, in ms."""

    data: float
    optimizer: float
    host: float
    """Calls of forward and backward."""
    device: float
    """Work of forward and backward."""
    overlap: float
    """Exponent p of (host^p + device^p)^(1/p), the time of both."""

    @classmethod
    def of(cls, question: BestQuestion, candidate: Candidate, trial: Trial) -> StepParts | None:
        """Return the parts of a candidate's trial; None if neither its phases nor its work are known."""
        if trial.profile is None and not candidate.host_s:
            return None
        profile, whole_ms = trial.profile or StepProfile(), trial.median_ms
        power = OVERLAP_EXPONENT.get(question.device, 1.0)
        host_s, device_s, optimizer_s = _work_of(question.device, candidate)
        both_s = overlapped(host_s, device_s, power)
        data_ms = min(profile.data_ms or 0.0, MAX_WAIT * whole_ms)
        working_ms = whole_ms - data_ms
        optimizer_ms = profile.optimizer_ms
        if optimizer_ms is None:
            optimizer_ms = working_ms * optimizer_s / (both_s + optimizer_s)
        rest_ms = max(working_ms - optimizer_ms, (1 - MAX_WAIT) * working_ms)
        busy = device_s / both_s if candidate.host_s else UNKNOWN_BUSY_SHARE
        device_ms = rest_ms * (busy if profile.gpu_busy is None else min(1.0, profile.gpu_busy))
        return cls(data_ms, optimizer_ms, (rest_ms**power - device_ms**power) ** (1 / power), device_ms, power)

    def both_ms(self, host: float = 1.0, device: float = 1.0) -> float:
        """Return the time of forward and backward with so many times the host calls and the device work."""
        return overlapped(host * self.host, device * self.device, self.overlap)

    def gain(self, batch: float = 1.0, host: float = 1.0, device: float = 1.0) -> float:
        """Return how many times the samples a second so many times the batch, calls and device work would give."""
        before_ms = self.data + self.optimizer + self.both_ms()
        return batch * before_ms / (batch * self.data + self.optimizer + self.both_ms(host, batch * device))


def phase_shares(space: Space, trial: Trial) -> dict[str, float]:
    """Return the share of a trial's step that each knob acts on alone, of the knobs whose phase was measured.

    Attention is known by its FLOPs, which decide only while kernels keep the GPU busy, and not for eager's, which waits
    for memory. On a CPU loader processes take the cores that compute: their knobs act on all of the step.
    """
    profile, shares = trial.profile or StepProfile(), dict[str, float]()
    knobs = space.candidates[trial.candidate_number].knobs
    if profile.data_ms is not None and (profile.gpu_busy is not None or not knobs.get("workers")):
        shares |= dict.fromkeys(LOADER_KNOBS, profile.data_ms / trial.median_ms)
    if profile.optimizer_ms is not None:
        shares["optimizer"] = profile.optimizer_ms / trial.median_ms
    is_busy = (profile.gpu_busy or 0.0) >= BUSY_GPU_SHARE
    if space.attention_share is not None and is_busy and knobs.get("attention") != "eager":
        shares["attention"] = space.attention_share
    return shares


Setting = tuple[KnobValue, ...]


def _loader(candidate: Candidate) -> Setting:
    return tuple(candidate.knobs.get(name) for name in LOADER_KNOBS)


class _Phases:
    """The phases that trials measured, in ms, by the setting of the loader or of the optimizer."""

    def __init__(self, space: Space, trials: Mapping[int, Sequence[Trial]]) -> None:
        self.waits, self.limits = (defaultdict[Setting, list[float]](list) for _ in range(2))
        self.updates = defaultdict[KnobValue, list[float]](list)
        """Waits for a sample, steps a sample of loader processes that were too slow, and the optimizer's steps."""
        for candidate, trial in ((space.candidates[number], trial) for number in trials for trial in trials[number]):
            profile, samples, key = trial.profile or StepProfile(), candidate.samples_per_step, _loader(candidate)
            if profile.data_ms is not None:
                self.waits[key].append(profile.data_ms / samples)
                if candidate.knobs.get("workers") and profile.data_ms > LIMITING_SHARE * trial.median_ms:
                    self.limits[key].append(trial.median_ms / samples)
            if profile.optimizer_ms is not None:
                self.updates[candidate.knobs.get("optimizer")].append(profile.optimizer_ms)

    def wait_ms(self, loader: Setting) -> float:
        """Return the wait for a sample beside which steps of any length have others: a loader not tried has half."""
        if loader in self.waits or not self.waits:
            return min(self.waits.get(loader, [0.0]))
        alike = {other: sum(one == its for one, its in zip(loader, other, strict=True)) for other in self.waits}
        nearest = [other for other in alike if alike[other] == max(alike.values())]
        return UNTRIED_WAIT * min(statistics.fmean(self.waits[other]) for other in nearest)


def prior_of(
    question: BestQuestion, space: Space, names: Sequence[str], trials: Mapping[int, Sequence[Trial]]
) -> Prior:
    """Return the expected ln gain of each candidate over the baseline, and the deviation of each knob's effect.

    `trials` are those that count, by candidate. Without the baseline's, or for joules, nothing is expected of any knob.
    """
    candidates, baseline = space.candidates, space.candidates[space.baseline_number]
    of_baseline = trials.get(space.baseline_number, ())
    parts = StepParts.of(question, baseline, of_baseline[0]) if of_baseline else None
    if parts is None or question.objective == "samples_per_joule":
        return Prior(np.zeros(len(candidates)), np.ones(len(names)))
    phases, before = _Phases(space, trials), _work_of(question.device, baseline)

    def ms_per_sample(candidate: Candidate) -> float:
        host, device, update = before
        if bool(candidate.host_s) == bool(baseline.host_s):
            host, device, update = _work_of(question.device, candidate)
        else:
            device *= candidate.samples_per_step / baseline.samples_per_step
        updates, samples = phases.updates.get(candidate.knobs.get("optimizer")), candidate.samples_per_step
        update_ms = parts.optimizer * (update / before[2] if before[2] else 1.0)
        update_ms = statistics.fmean(updates) if updates else update_ms
        both_ms = parts.both_ms(host / before[0], device / before[1])
        whole_ms = phases.wait_ms(_loader(candidate)) + (update_ms + both_ms) / samples
        return float(max([whole_ms, *phases.limits.get(_loader(candidate), ())]))

    log_ms = np.log([ms_per_sample(candidate) for candidate in candidates])
    deviations = {name: KNOWN_WORK.get(name, MAX_DEVIATION) for name in names}
    measured = {
        **dict.fromkeys(LOADER_KNOBS, phases.waits.keys() >= set(map(_loader, candidates))),
        "optimizer": phases.updates.keys() >= {candidate.knobs.get("optimizer") for candidate in candidates},
    }
    fastest = max((each[0] for each in trials.values()), key=lambda trial: trial.samples_per_step / trial.median_ms)
    for name, share in phase_shares(space, fastest).items():
        bound = -UNTRIED_WAIT * math.log(1 - min(share, MAX_WAIT))
        deviations[name] = min(MEASURED_DEVIATION if measured.get(name) else MAX_DEVIATION, bound)
    weights = np.array([deviations[name] for name in names]) / MAX_DEVIATION
    return Prior(log_ms[space.baseline_number] - log_ms, weights)


def unused_lever(question: BestQuestion, candidate: Candidate, trials: Sequence[Trial]) -> str:
    """Return the lever that the search left alone and that would matter most to a candidate, in words; or nothing.

    The gain is predicted from the parts of the candidate's first trial.
    """
    parts, levers = StepParts.of(question, candidate, trials[0]) if trials else None, list[tuple[float, str]]()
    if parts is None:
        return ""
    if question.global_batch is not None:
        gains = {factor: parts.gain(batch=factor) for factor in (2**power for power in range(1, 7))}
        factor = next(factor for factor, gain in gains.items() if gain >= ENOUGH_OF_IT * max(gains.values()))
        size = question.global_batch
        levers.append((gains[factor], f"a global batch of {factor * size} instead of {size}, if your training allows"))
    if "compile" not in question.vary and question.knobs.get("compile") == "off":
        host, device = COMPILED["default"]
        levers.append((parts.gain(host=host, device=device), "compile=default"))
    gain, words = max(levers, default=(1.0, ""))
    return f"predicted: about {gain:.2g}x samples/s by {words}" if gain >= MIN_UNUSED_GAIN else ""

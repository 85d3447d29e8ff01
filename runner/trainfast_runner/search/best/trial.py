"""Measure one candidate: in a warm process by steps until their median is exact enough, or in a run of its own.

A measurement is void if other processes took the CPU, or heat or a power brake throttled a GPU meanwhile. A GPU at its
power limit is in its ordinary state under load, and voids nothing.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trainfast_runner.errors import highest
from trainfast_runner.machine.cpu import CpuWindow
from trainfast_runner.records.result import Doubt, Result
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.records.run_records import read_records, read_worker_lines
from trainfast_runner.records.worker_lines import TrialLine
from trainfast_runner.results.bottleneck_rules import OTHERS_CPU_PERCENT
from trainfast_runner.results.device_conditions import DeviceConditions, join_of
from trainfast_runner.results.doubts import DOUBTFUL_THROTTLED_SHARE, THROTTLING_KINDS, doubts
from trainfast_runner.results.summary import read_start_s
from trainfast_runner.results.verdict import first_difference
from trainfast_runner.search.best.candidates import UNTIMED_TRIAL_STEPS, Failure, StepRule, failure_in, oom_failure
from trainfast_runner.search.best_journal import (
    TIMED_OUTCOMES,
    Attempt,
    AttemptOutcome,
    BestJournal,
    BestLaunched,
    BestLine,
    Candidate,
    ColdRun,
    Trial,
)
from trainfast_runner.search.conductor import WarmProcess
from trainfast_runner.search.measured_speeds import relative_error
from trainfast_runner.search.searches import incompatible_reason
from trainfast_runner.settings.knob_values import KnobValues

MIN_ADDED_STEPS = 2
"""The fewest steps that are added to a trial."""
ENERGY_SAMPLED_S = 3.0
"""Timed steps of this length have two samples of a GPU's energy counter, which is read once a second."""


@dataclass(frozen=True)
class WantedTrial:
    """A candidate to be measured in a warm process, with the rules of the measurement."""

    candidate_number: int
    knobs: KnobValues
    samples_per_step: int
    rule: StepRule
    needs_energy: bool = False
    """True to add steps until the GPUs' energy counters were read twice."""
    keep_disturbed: bool = False
    """True to measure a trial that other processes or heat disturb, and record the reason; False to void it at once."""
    is_warm: bool = False
    """True if the process has tried a candidate before."""
    repeats: bool = False
    """True for the repeat of the process's first trial."""


@dataclass
class _StepsTaken:
    """The steps of a trial so far: the slowest rank's times, the losses, and the peak."""

    step_ms: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    peak_bytes: int | None = None
    began_ns: int = 0
    ended_ns: int = 0
    doubt: Doubt | None = None
    """The share of the CPU that other processes took; None if that was small."""

    @property
    def seconds(self) -> float:
        """Seconds from the begin of the first step to the end of the last."""
        return (self.ended_ns - self.began_ns) / 1e9

    def add(self, replies: dict[int, TrialLine]) -> None:
        """Add all ranks' replies to one order."""
        lines = list(replies.values())
        self.step_ms += [max(times) for times in zip(*(line.step_ms for line in lines), strict=True)]
        self.losses += lines[0].losses
        self.peak_bytes = highest((self.peak_bytes, *(line.peak_allocated_bytes for line in lines)))
        self.ended_ns = max(line.t_ns for line in lines)
        timed_ns = sum(lines[0].step_ms) * 1e6
        self.began_ns = self.began_ns or round(self.ended_ns - timed_ns)


class _Ending(NamedTuple):
    """The outcome of a trial's steps."""

    outcome: AttemptOutcome = "measured"
    reason: str = ""
    missing_bytes: int | None = None


def take_trial(process: WarmProcess, uuids: Sequence[str], wanted: WantedTrial) -> Trial | None:
    """Take a trial in a process on these GPUs, and return its line; None when the process ended without an answer.

    A trial that ran other settings than the wanted ones has failed.
    """
    began_s, steps = time.monotonic(), _StepsTaken()
    ending = _take_steps(process, wanted, steps)
    if ending is None:
        return None
    outcome, reason = ending.outcome, ending.reason
    gpus = gpu_conditions(process.directory, uuids, steps.began_ns, steps.ended_ns)
    found = [*filter(None, (steps.doubt, throttled_doubt(gpus, steps.began_ns, steps.ended_ns)))]
    if outcome in TIMED_OUTCOMES:
        difference = override_reason(process.directory, wanted.knobs)
        if difference is not None:
            outcome, reason = "failed", difference
        elif found:
            reason = "; ".join(filter(None, (reason, void_reason(found))))
            if not wanted.keep_disturbed:
                outcome = "void"
    return Trial(
        candidate_number=wanted.candidate_number,
        run_id=process.directory.name,
        outcome=outcome,
        warm=wanted.is_warm,
        samples_per_step=wanted.samples_per_step,
        step_ms=steps.step_ms,
        joules=joules_of(gpus),
        peak_allocated_bytes=steps.peak_bytes,
        last_loss=next((loss for loss in reversed(steps.losses) if loss is not None), None),
        losses=steps.losses,
        seconds=time.monotonic() - began_s,
        reason=reason,
        missing_bytes=ending.missing_bytes,
        doubts=found,
        repeats=wanted.repeats,
    )


def _take_steps(process: WarmProcess, wanted: WantedTrial, steps: _StepsTaken) -> _Ending | None:
    """Order timed steps and add them to `steps` until the rule is satisfied, or nothing more can come.

    None if the process did not answer.
    """
    rule = wanted.rule
    disturbance = CpuDisturbance()
    count, is_continued = rule.min_steps, False
    while True:
        replies = process.trial(wanted.knobs, UNTIMED_TRIAL_STEPS, count, more=is_continued)
        if replies is None:
            return None
        failed_line = next((line for line in replies.values() if line.outcome != "measured"), None)
        if failed_line is not None:
            return _ending_of(failed_line)
        steps.add(replies)
        is_continued = True
        steps.doubt = disturbance.doubt()
        if steps.doubt is not None and not wanted.keep_disturbed:
            return _Ending()
        judgement = rule.judge(steps.step_ms)
        if judgement == "slow":
            best_ms = min(steps.step_ms)
            return _Ending("slow", f"the best step takes {best_ms:.3g} ms, hopeless above {rule.give_up_ms:.3g} ms")
        if judgement == "more":
            count = steps_to_add(steps.step_ms, rule)
        elif wanted.needs_energy and (missing_s := ENERGY_SAMPLED_S - steps.seconds) > 0:
            # In one order: between two orders the GPU waits, and that energy would count.
            count = max(rule.min_steps, math.ceil(1000 * missing_s / statistics.median(steps.step_ms)))
        else:
            return _Ending()


def _ending_of(failed_line: TrialLine) -> _Ending:
    message = failed_line.message or ""
    if failed_line.outcome != "oom":
        return _Ending("failed", message)
    failure = failure_in(message)
    return _Ending("oom", failure.reason, failure.missing_bytes)


def override_reason(directory: Path, knobs: KnobValues) -> str | None:
    """Return the knob of a warm process's last trial that ran otherwise than in `knobs`; None if all ran as asked."""
    run = read_run_file(directory)
    if run is None:
        return None
    expected_run = msgspec.structs.replace(run, role=None, knobs={**run.knobs, **knobs})
    return first_difference(expected_run, read_worker_lines(directory))


def steps_to_add(step_ms: Sequence[float], rule: StepRule) -> int:
    """Return the further steps that bring the median's standard error to the rule's, within the rule's maximum."""
    count, error = len(step_ms), relative_error(step_ms)
    needed_steps = rule.max_steps if math.isinf(error) else math.ceil(count * (error / rule.standard_error) ** 2)
    return min(rule.max_steps - count, max(MIN_ADDED_STEPS, needed_steps - count))


def trial_of_run(
    number: int, candidate: Candidate, directory: Path, result: Result, seconds: float, *, keep_disturbed: bool
) -> Trial:
    """Return the line of an ended run of candidate `number`; `seconds` are without the preparation of the run.

    With `keep_disturbed` a run that other processes or heat disturbed is not void. The losses are left out: a script's
    samples may come in another order.
    """
    step_ms, samples = _timed_steps(directory)
    joules_per_sample = result.energy.joules_per_sample
    return Trial(
        candidate_number=number,
        warm=False,
        samples_per_step=samples,
        step_ms=step_ms,
        joules=None if joules_per_sample is None else joules_per_sample * samples * len(step_ms),
        seconds=seconds,
        **_fields_of_run(result, candidate.knobs, keep_disturbed=keep_disturbed),
    )


def _fields_of_run(result: Result, knobs: Collection[str], *, keep_disturbed: bool) -> dict[str, Any]:
    """Return the fields of an ended run that its line has as a trial or as a cold run."""
    outcome, reason = outcome_of(result, knobs, keep_disturbed=keep_disturbed)
    failure = oom_failure(result) if outcome == "oom" else Failure(reason)
    return {
        "run_id": result.run_id,
        "outcome": outcome,
        "peak_allocated_bytes": result.memory.peak_allocated_bytes,
        "reason": failure.reason,
        "missing_bytes": failure.missing_bytes,
        # Few steps are no doubt: the intervals of a search count steps.
        "doubts": [doubt for doubt in doubts(result) if doubt.kind != "few_steps"],
    }


def with_checked_samples(trial: Trial, candidate: Candidate) -> Trial:
    """Return the trial, incompatible if its steps took other than the candidate's samples.

    Often nothing else shows the value of a script's own flag.
    """
    if trial.outcome not in ("measured", "void") or trial.samples_per_step == candidate.samples_per_step:
        return trial
    reason = f"samples a step: {trial.samples_per_step} ran, {candidate.samples_per_step} were asked for"
    return msgspec.structs.replace(trial, outcome="incompatible", reason=reason)


def _timed_steps(directory: Path) -> tuple[list[float], int]:
    """Return the slowest rank's times of timed steps in ms, and the samples of a step on all ranks; 0 if unknown."""
    ranks = [[step for step in steps if not step.warmup] for steps in read_records(directory).steps.values()]
    steps = list(zip(*ranks, strict=False))  # a rank that was killed has fewer
    samples = [sum(line.samples or 0 for line in rank_steps) for rank_steps in steps]
    step_ms = [max(line.step_ms for line in rank_steps) for rank_steps in steps]
    return step_ms, statistics.median_low(samples) if samples else 0


UNTIMED_COLD_STEPS = 3
"""Untimed steps of a cold run, as of any run; on a CPU its memory is measured in them."""


def cold_run_of(
    launch_line: BestLaunched, directory: Path, result: Result, knobs: Collection[str], *, keep_disturbed: bool
) -> ColdRun:
    """Return the line of an ended cold run of a candidate with these knobs.

    With `keep_disturbed` a run that other processes or heat disturbed is not void. A script has no losses here: its
    samples may come in another order.
    """
    rate = result.throughput.samples_per_s
    joules_per_sample = result.energy.joules_per_sample
    fields = _fields_of_run(result, knobs, keep_disturbed=keep_disturbed)
    has_rate, has_losses = fields["outcome"] in ("measured", "void"), result.script is None
    return ColdRun(
        candidate_number=launch_line.candidate_number,
        role=launch_line.role,
        knob=launch_line.knob,
        samples_per_s=rate.typical if has_rate else None,
        mad=rate.mad if has_rate else None,
        samples_per_joule=1 / joules_per_sample if joules_per_sample else None,
        predicted=result.throughput.predicted,
        start_s=read_start_s(directory),
        first_loss=result.loss.first if has_losses else None,
        last_loss=result.loss.last if has_losses else None,
        seconds=result.seconds or 0.0,
        **fields,
    )


def outcome_of(result: Result, knobs: Collection[str] = (), *, keep_disturbed: bool) -> tuple[AttemptOutcome, str]:
    """Return the outcome of an ended run and its reason.

    A run is incompatible when its script overrode one of these knobs.
    """
    if result.state == "oom":
        return "oom", result.reason
    if result.state == "lost":
        return "void", f"lost: {result.reason}"
    if result.state != "finished" or result.throughput.samples_per_s.typical is None:
        reason = result.reason or _no_rate_reason(result)
        return "failed", f"{result.state}: {reason}" if reason else result.state
    if result.loss.not_finite:
        return "failed", f"the loss of {result.loss.not_finite} steps is not finite"
    overridden = incompatible_reason(result, knobs)
    if overridden is not None:
        return "incompatible", overridden
    reason = void_reason(doubts(result))
    return "measured" if not reason or keep_disturbed else "void", reason


def _no_rate_reason(result: Result) -> str:
    """Return the reason that a script's samples are unknown; empty for any other run."""
    return "" if result.script is None else result.script.unknown.get("samples", "")


def gpu_conditions(directory: Path, uuids: Sequence[str], begin_ns: int, end_ns: int) -> list[DeviceConditions]:
    """Return throttling and energy of a run's GPUs between two moments (CLOCK_MONOTONIC); empty on a CPU."""
    if not uuids:
        return []
    devices = read_records(directory).device_samples
    return join_of(devices, list(uuids)).conditions_between(begin_ns, end_ns)


def joules_of(devices: Sequence[DeviceConditions]) -> float | None:
    """Return the energy summed over the GPUs; None without a GPU, or if a GPU has no figure."""
    joules = [device.energy_joules for device in devices]
    known_joules = [value for value in joules if value is not None]
    return sum(known_joules) if joules and len(known_joules) == len(joules) else None


VOIDING_KINDS = ("other_processes", *THROTTLING_KINDS.values())
"""Kinds of doubt that void a measurement."""
USUAL_DISTURBANCES, LAST_MEASUREMENTS = 2, 8
"""Chosen, not measured: with this many disturbed measurements of a candidate, or among the last `LAST_MEASUREMENTS`,
the next counts: the disturbance is the machine's normal noise."""


class CpuDisturbance:
    """The CPU time that processes other than the search's own take from now on."""

    def __init__(self) -> None:
        self._window = CpuWindow()

    def doubt(self) -> Doubt | None:
        """Return the share of the CPU that other processes took since; None if small or unknown."""
        others = self._window.others_cores()
        percent = None if others is None else 100 * others / len(os.sched_getaffinity(0))
        if percent is None or percent < OTHERS_CPU_PERCENT:
            return None
        return Doubt(kind="other_processes", text=f"other processes took {percent:.0f} % of the CPU")


def throttled_doubt(devices: Sequence[DeviceConditions], begin_ns: int, end_ns: int) -> Doubt | None:
    """Return the GPU that was throttled for too much of the time; None if none was."""
    for device in devices:
        for cause, kind in THROTTLING_KINDS.items():
            share = (device.throttled_ms.get(cause) or 0.0) * 1e6 / max(1, end_ns - begin_ns)
            if share >= DOUBTFUL_THROTTLED_SHARE:
                text = f"GPU {device.index} was throttled ({cause}) for {share:.0%} of the time"
                return Doubt(kind=kind, text=text)
    return None


def void_reason(found: Iterable[Doubt]) -> str:
    """Return the doubts that void a measurement, in words; empty if none does."""
    return "; ".join(doubt.text for doubt in found if doubt.kind in VOIDING_KINDS)


def is_usually_disturbed(lines: Sequence[BestLine], number: int) -> bool:
    """True if so many of the last measurements, or of this candidate's, were disturbed that disturbance is normal."""
    attempts = BestJournal(tuple(lines)).attempts
    of_candidate = [line for line in attempts if line.candidate_number == number]
    counts = [sum(map(_is_disturbed, attempts[-LAST_MEASUREMENTS:])), sum(map(_is_disturbed, of_candidate))]
    return max(counts) >= USUAL_DISTURBANCES


def _is_disturbed(line: Attempt) -> bool:
    """True if a measurement is void, or counts although it was disturbed."""
    return line.outcome == "void" or line.counts_disturbed

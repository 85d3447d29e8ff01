"""Measure one candidate in a warm process: order steps until their median is exact enough, or the pace is hopeless."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from trainfast_runner.known_values import highest
from trainfast_runner.records.result import Doubt
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.records.run_records import read_worker_lines
from trainfast_runner.records.warm_process import TrialLine
from trainfast_runner.results.asked_and_ran import first_difference
from trainfast_runner.search.best.disturbances import CpuDisturbance, throttled_doubt, void_reason
from trainfast_runner.search.best.measure.gpu_conditions import gpu_conditions, joules_of
from trainfast_runner.search.best.step_rule import UNTIMED_TRIAL_STEPS, StepRule
from trainfast_runner.search.best.too_large import failure_in
from trainfast_runner.search.conducting.warm_process import WarmProcess
from trainfast_runner.search.journal.best import TIMED_OUTCOMES, AttemptOutcome, Trial
from trainfast_runner.search.speed.trial_rates import relative_error
from trainfast_runner.settings.knob_type import KnobValues

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

"""Measure one candidate in a warm process: order steps until their median is known well, or the pace is hopeless."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.records.run_records import worker_lines
from trainfast_runner.records.warm_process import TrialLine
from trainfast_runner.results.asked_and_ran import first_difference
from trainfast_runner.search.best.disturbances import CpuDisturbance, gpu_conditions, joules_of, why_throttled
from trainfast_runner.search.best.step_rule import UNTIMED, StepRule
from trainfast_runner.search.best.too_large import failure_in
from trainfast_runner.search.journal.best import TIMED_OUTCOMES, Trial
from trainfast_runner.search.speed.trial_rates import relative_error
from trainfast_runner.search.warm_process import WarmProcess
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.units import highest

LEAST_MORE = 2
"""Steps that are added at least."""
SAMPLED_S = 3.0
"""Timed steps of this length have two samples of a GPU's energy counter, which is read once a second."""


@dataclass(frozen=True)
class WantedTrial:
    """A candidate to be measured in a warm process, and how.

    With `needs_energy` steps are added until the GPUs' energy counters were read twice. A trial that other processes
    or heat disturb is void at once, but with `keep_disturbed` it is measured with that reason.
    """

    candidate_number: int
    knobs: KnobValues
    samples_per_step: int
    rule: StepRule
    needs_energy: bool = False
    keep_disturbed: bool = False


@dataclass
class _StepsTaken:
    """The steps of a trial so far: the slowest rank's time of each, the losses, the peak, and the outcome."""

    step_ms: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    peak_bytes: int | None = None
    began_ns: int = 0
    ended_ns: int = 0
    outcome: str = "measured"
    reason: str = ""
    missing_bytes: int | None = None
    has_ended: bool = False
    """True if the trial ended its process."""
    disturbed: str | None = None
    """Why others void the trial; None if they do not."""

    def add(self, answers: dict[int, TrialLine]) -> None:
        """Add the answers of all ranks to one order."""
        lines = list(answers.values())
        self.step_ms += [max(times) for times in zip(*(line.step_ms for line in lines), strict=True)]
        self.losses += lines[0].losses
        self.peak_bytes = highest((self.peak_bytes, *(line.peak_allocated_bytes for line in lines)))
        self.ended_ns = max(line.t_ns for line in lines)
        timed_ns = sum(lines[0].step_ms) * 1e6
        self.began_ns = self.began_ns or round(self.ended_ns - timed_ns)


class EndedTrial(NamedTuple):
    """The line of a trial, and whether it ended its process."""

    trial: Trial
    ended_process: bool


def take_trial(process: WarmProcess, uuids: Sequence[str], wanted: WantedTrial) -> EndedTrial | None:
    """Take a trial in a process on these GPUs; None when the process ended without an answer.

    A trial that ran other settings than asked has failed.
    """
    began = time.monotonic()
    steps = _take_steps(process, wanted)
    if steps is None:
        return None
    outcome, reason = steps.outcome, steps.reason
    gpus = gpu_conditions(process.directory, uuids, steps.began_ns, steps.ended_ns)
    void = steps.disturbed or why_throttled(gpus, steps.began_ns, steps.ended_ns)
    if outcome in TIMED_OUTCOMES:
        difference = why_other_than_asked(process.directory, wanted.knobs)
        if difference is not None:
            outcome, reason = "failed", difference
        elif void is not None:
            outcome, reason = outcome if wanted.keep_disturbed else "void", "; ".join(filter(None, (reason, void)))
    trial = Trial(
        candidate_number=wanted.candidate_number,
        run_id=process.directory.name,
        outcome=outcome,
        warm=True,
        samples_per_step=wanted.samples_per_step,
        step_ms=steps.step_ms,
        joules=joules_of(gpus),
        peak_allocated_bytes=steps.peak_bytes,
        last_loss=next((loss for loss in reversed(steps.losses) if loss is not None), None),
        losses=steps.losses,
        seconds=time.monotonic() - began,
        reason=reason,
        missing_bytes=steps.missing_bytes,
    )
    return EndedTrial(trial, steps.has_ended)


def _take_steps(process: WarmProcess, wanted: WantedTrial) -> _StepsTaken | None:
    """Order timed steps until the rule is satisfied, or nothing more can come; None if the process did not answer."""
    rule = wanted.rule
    disturbance, steps_taken, steps = CpuDisturbance(), _StepsTaken(), rule.least
    while steps:
        answers = process.trial(wanted.knobs, UNTIMED, steps, more=bool(steps_taken.step_ms))
        if answers is None:
            return None
        bad = next((line for line in answers.values() if line.outcome != "measured"), None)
        if bad is not None:
            steps_taken.outcome, steps_taken.reason = str(bad.outcome), bad.message or ""
            steps_taken.has_ended = bad.ended_process
            if bad.outcome == "oom":
                failure = failure_in(steps_taken.reason)
                steps_taken.reason, steps_taken.missing_bytes = failure.reason, failure.missing_bytes
            break
        steps_taken.add(answers)
        steps_taken.disturbed = disturbance.why_void()
        if steps_taken.disturbed is not None and not wanted.keep_disturbed:
            break
        judged = rule.judge(steps_taken.step_ms)
        if judged == "slow":
            best_ms = min(steps_taken.step_ms)
            steps_taken.outcome = judged
            steps_taken.reason = f"its best step takes {best_ms:.3g} ms, hopeless above {rule.give_up_ms:.3g} ms"
            break
        steps = steps_to_add(steps_taken.step_ms, rule) if judged == "more" else 0
        if not steps and wanted.needs_energy and steps_taken.ended_ns - steps_taken.began_ns < SAMPLED_S * 1e9:
            steps = rule.least
    return steps_taken


def why_other_than_asked(directory: Path, knobs: KnobValues) -> str | None:
    """The knob of a warm process's last trial that ran otherwise than in `knobs`; None if all ran as asked."""
    run = read_run_file(directory)
    if run is None:
        return None
    expected_run = msgspec.structs.replace(run, role=None, knobs={**run.knobs, **knobs})
    return first_difference(expected_run, worker_lines(directory))


def steps_to_add(step_ms: Sequence[float], rule: StepRule) -> int:
    """Return how many further steps bring the median's standard error to the rule's, within the rule's most."""
    count, error = len(step_ms), relative_error(step_ms)
    needed = rule.most if math.isinf(error) else math.ceil(count * (error / rule.standard_error) ** 2)
    return min(rule.most - count, max(LEAST_MORE, needed - count))

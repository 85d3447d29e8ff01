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
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import highest
from trainfast_runner.machine.cpu import CpuWindow
from trainfast_runner.records.result import Doubt, Result
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.records.run_records import read_records, read_worker_lines
from trainfast_runner.results.bottleneck_rules import OTHERS_CPU_PERCENT
from trainfast_runner.results.device_conditions import DeviceConditions, join_of
from trainfast_runner.results.doubts import DOUBTFUL_THROTTLED_SHARE, THROTTLING_KINDS, doubts
from trainfast_runner.results.summary import read_start_s
from trainfast_runner.results.verdict import first_difference
from trainfast_runner.search.best.candidates import UNTIMED_TRIAL_STEPS, Failure, StepRule, failure_in, oom_failure
from trainfast_runner.search.best_journal import (
    TIMED_OUTCOMES,
    UNDER_LIMIT,
    Attempt,
    AttemptOutcome,
    BestLaunched,
    BestLine,
    Candidate,
    ColdRun,
    Trial,
)
from trainfast_runner.search.conductor import WarmProcess
from trainfast_runner.search.effects import relative_error
from trainfast_runner.search.searches import incompatible_reason
from trainfast_runner.settings.knob_values import KnobValues

MIN_ADDED_STEPS = 2
"""The fewest steps that are added to a trial."""
ENERGY_SAMPLED_S = 3.0
"""Timed steps of this length have two samples of a GPU's energy counter, which is read once a second."""
UNTIMED_COLD_STEPS = 3
"""Untimed steps of a cold run, as of any run; on a CPU its memory is measured in them."""
VOIDING_KINDS = ("other_processes", *THROTTLING_KINDS.values())
"""Kinds of doubt that void a measurement."""
USUAL_DISTURBANCES, LAST_MEASUREMENTS = 2, 8
"""Chosen, not measured: with this many disturbed measurements of a candidate, or among the last `LAST_MEASUREMENTS`,
the next counts: the disturbance is the machine's normal noise."""


def take_trial(
    process: WarmProcess,
    trial: Trial,
    knobs: KnobValues,
    rule: StepRule,
    *,
    uuids: Sequence[str] = (),
    needs_energy: bool = False,
    keep_disturbed: bool = False,
) -> Trial | None:
    """Return the trial with its outcome and figures; None when the process on these GPUs ended without an answer.

    `needs_energy` adds steps until the energy counters were read twice. With `keep_disturbed` a trial that other
    processes or heat disturb counts, and has the reason; else it is void. One that ran other settings has failed.
    """
    began_s, cpu = time.monotonic(), CpuWindow()
    step_ms: list[float] = []
    losses: list[float | None] = []
    found: list[Doubt] = []
    outcome: AttemptOutcome = "measured"
    failure, peak_bytes, begin_ns, end_ns = Failure(""), None, 0, 0
    count, is_continued = rule.min_steps, False
    while count:
        replies = process.trial(knobs, UNTIMED_TRIAL_STEPS, count, more=is_continued)
        if replies is None:
            return None
        lines, is_continued = [*replies.values()], True
        failed = next((line for line in lines if line.outcome != "measured"), None)
        if failed is not None:
            message = failed.message or ""
            outcome, failure = ("oom", failure_in(message)) if failed.outcome == "oom" else ("failed", Failure(message))
            break
        # The slowest rank's times count.
        step_ms += [max(times) for times in zip(*(line.step_ms for line in lines), strict=True)]
        losses += lines[0].losses
        peak_bytes = highest((peak_bytes, *(line.peak_allocated_bytes for line in lines)))
        end_ns = max(line.t_ns for line in lines)
        begin_ns = begin_ns or round(end_ns - sum(lines[0].step_ms) * 1e6)
        found = cpu_doubts(cpu)
        judgement = rule.judge(step_ms)
        count = 0
        if judgement == "slow":
            words = f"the best step takes {min(step_ms):.3g} ms, hopeless above {rule.give_up_ms:.3g} ms"
            outcome, failure = "slow", Failure(words)
        elif found and not keep_disturbed:
            break
        elif judgement == "more":
            count = steps_to_add(step_ms, rule)
        elif needs_energy and (missing_s := ENERGY_SAMPLED_S - (end_ns - begin_ns) / 1e9) > 0:
            # In one order: between two orders the GPU waits, and that energy would count.
            count = max(rule.min_steps, math.ceil(1000 * missing_s / statistics.median(step_ms)))
    reason, gpus = failure.reason, gpu_conditions(process.directory, uuids, begin_ns, end_ns)
    found += throttled_doubts(gpus, begin_ns, end_ns)
    if outcome in TIMED_OUTCOMES:
        difference = override_reason(process.directory, knobs)
        if difference is not None:
            outcome, reason = "failed", difference
        elif found:
            outcome = outcome if keep_disturbed else "void"
            reason = "; ".join(filter(None, (reason, void_reason(found))))
    return msgspec.structs.replace(
        trial,
        outcome=outcome,
        reason=reason,
        missing_bytes=failure.missing_bytes,
        step_ms=step_ms,
        losses=losses,
        joules=joules_of(gpus),
        peak_allocated_bytes=peak_bytes,
        doubts=found,
        seconds=time.monotonic() - began_s,
    )


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

    The slowest rank's times count. The losses are left out: a script's samples may come in another order.
    """
    ranks = [[step for step in steps if not step.warmup] for steps in read_records(directory).steps.values()]
    steps = list(zip(*ranks, strict=False))  # a rank that was killed has fewer
    samples = [sum(line.samples or 0 for line in rank_steps) for rank_steps in steps]
    samples_per_step = statistics.median_low(samples) if samples else 0
    joules_per_sample = result.energy.joules_per_sample
    return Trial(
        candidate_number=number,
        warm=False,
        samples_per_step=samples_per_step,
        step_ms=[max(line.step_ms for line in rank_steps) for rank_steps in steps],
        joules=None if joules_per_sample is None else joules_per_sample * samples_per_step * len(steps),
        seconds=seconds,
        **_fields_of_run(result, candidate.knobs, keep_disturbed=keep_disturbed),
    )


def cold_run_of(
    launch_line: BestLaunched, directory: Path, result: Result, knobs: Collection[str], *, keep_disturbed: bool
) -> ColdRun:
    """Return the line of an ended cold run of a candidate with these knobs.

    Losses compare after equally many steps and on the same samples: a run under memory_limit and a script have none.
    """
    rate = result.throughput.samples_per_s
    joules_per_sample = result.energy.joules_per_sample
    fields = _fields_of_run(result, knobs, keep_disturbed=keep_disturbed)
    has_rate = fields["outcome"] in ("measured", "void")
    has_losses = result.script is None and launch_line.role != UNDER_LIMIT
    return ColdRun(
        candidate_number=launch_line.candidate_number,
        role=launch_line.role,
        knob=launch_line.knob,
        samples_per_s=rate.typical if has_rate else None,
        mad=rate.mad if has_rate else None,
        samples_per_joule=1 / joules_per_sample if joules_per_sample else None,
        predicted=result.throughput.predicted,
        start_s=read_start_s(directory),
        losses=[result.loss.first, result.loss.last] if has_losses else [],
        seconds=result.seconds or 0.0,
        **fields,
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


def outcome_of(result: Result, knobs: Collection[str] = (), *, keep_disturbed: bool) -> tuple[AttemptOutcome, str]:
    """Return the outcome of an ended run and its reason.

    A run is incompatible when its script overrode one of these knobs. With `keep_disturbed` a run that other processes
    or heat disturbed is not void.
    """
    if result.state == "oom":
        return "oom", result.reason
    if result.state == "lost":
        return "void", f"lost: {result.reason}"
    if result.state != "finished" or result.throughput.samples_per_s.typical is None:
        unknown = "" if result.script is None else result.script.unknown.get("samples", "")
        return "failed", ": ".join(filter(None, (result.state, result.reason or unknown)))
    if result.loss.not_finite:
        return "failed", f"the loss of {result.loss.not_finite} steps is not finite"
    overridden = incompatible_reason(result, knobs)
    if overridden is not None:
        return "incompatible", overridden
    reason = void_reason(doubts(result))
    return "measured" if not reason or keep_disturbed else "void", reason


def gpu_conditions(directory: Path, uuids: Sequence[str], begin_ns: int, end_ns: int) -> list[DeviceConditions]:
    """Return throttling and energy of a run's GPUs between two moments (CLOCK_MONOTONIC); empty on a CPU."""
    if not uuids:
        return []
    return join_of(read_records(directory).device_samples, list(uuids)).conditions_between(begin_ns, end_ns)


def joules_of(devices: Sequence[DeviceConditions]) -> float | None:
    """Return the energy summed over the GPUs; None without a GPU, or if a GPU has no figure."""
    joules = [device.energy_joules for device in devices if device.energy_joules is not None]
    return sum(joules) if joules and len(joules) == len(devices) else None


def cpu_doubts(window: CpuWindow) -> list[Doubt]:
    """Return the share of the CPU that other processes took in this window; empty if small or unknown."""
    cores = window.others_cores()
    percent = 0.0 if cores is None else 100 * cores / len(os.sched_getaffinity(0))
    if percent < OTHERS_CPU_PERCENT:
        return []
    return [Doubt(kind="other_processes", text=f"other processes took {percent:.0f} % of the CPU")]


def throttled_doubts(devices: Sequence[DeviceConditions], begin_ns: int, end_ns: int) -> list[Doubt]:
    """Return each GPU that was throttled for too much of the time, with the cause."""
    shares = [
        (device.index, cause, kind, (device.throttled_ms.get(cause) or 0.0) * 1e6 / max(1, end_ns - begin_ns))
        for device in devices
        for cause, kind in THROTTLING_KINDS.items()
    ]
    return [
        Doubt(kind=kind, text=f"GPU {index} was throttled ({cause}) for {share:.0%} of the time")
        for index, cause, kind, share in shares
        if share >= DOUBTFUL_THROTTLED_SHARE
    ]


def void_reason(found: Iterable[Doubt]) -> str:
    """Return the doubts that void a measurement, in words; empty if none does."""
    return "; ".join(doubt.text for doubt in found if doubt.kind in VOIDING_KINDS)


def is_usually_disturbed(lines: Sequence[BestLine], number: int) -> bool:
    """True if so many of the last measurements, or of this candidate's, were disturbed that disturbance is normal."""
    attempts = [line for line in lines if isinstance(line, Attempt)]
    of_candidate = [line for line in attempts if line.candidate_number == number]
    return any(
        sum(line.outcome == "void" or line.counts_disturbed for line in group) >= USUAL_DISTURBANCES
        for group in (attempts[-LAST_MEASUREMENTS:], of_candidate)
    )

"""Take the steps of a best-fit search that `decide` chooses: trials, cold runs and the end.

A trial takes steps in a warm process until their median is exact enough; a script's is a run of its own. A measurement
is void if other processes took the CPU or the GPU, or if heat or a power brake throttled a GPU meanwhile. A GPU at its
power limit is in its ordinary state under load, and voids nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trainfast_runner.errors import UserError, highest, lowest
from trainfast_runner.machine.calibration import Ceiling
from trainfast_runner.machine.cpu import CpuWindow
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.result import Doubt, Result, RunConditions
from trainfast_runner.records.run_directory import read_records, read_run_file, read_worker_lines
from trainfast_runner.records.run_file import ForeignProcess
from trainfast_runner.records.run_lines import Step
from trainfast_runner.records.worker_lines import COLD
from trainfast_runner.results.bottleneck import diagnose, figures_by_scope, foreign_processes, measured_window_of
from trainfast_runner.results.device_conditions import DeviceConditions, Window, join_of, total_joules, window_of
from trainfast_runner.results.doubts import THROTTLING_KINDS, doubts
from trainfast_runner.results.summary import read_start_s, window_throttle
from trainfast_runner.results.verdict import first_difference
from trainfast_runner.running import launch
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.best.answer import answer_of
from trainfast_runner.search.best.decide import BestDecision, BestState, decide
from trainfast_runner.search.best.question import BestPlan, oom_reason, with_seen_samples
from trainfast_runner.search.best_journal import (
    TIMED_OUTCOMES,
    UNDER_LIMIT,
    Attempt,
    AttemptOutcome,
    BestEnded,
    BestJournal,
    BestLine,
    BestQuestion,
    BestStep,
    Candidate,
    ColdRun,
    ProcessReady,
    Space,
    StepProfile,
    Trial,
)
from trainfast_runner.search.conductor import Conductor, SearchCaller, WarmProcess, run_within
from trainfast_runner.search.effects import UNTIMED_TRIAL_STEPS, StepRule, relative_error
from trainfast_runner.search.journal import EndState, worked_seconds
from trainfast_runner.search.predicted_speed import SpeedDevice, known_ceiling, with_predicted_speed
from trainfast_runner.search.searches import SearchOptions, incompatible_reason, takes_warm_trials
from trainfast_runner.settings.knob_values import KnobValue, KnobValues
from trainfast_runner.worker.shared.words import TRIAL

LIMIT_STEPS = 4
"""Steps of a run under the real `memory_limit`: the optimizer's states exist from the second on."""
PREDICTIONS_WAIT_S = 30.0
"""The first trial, its process ready, waits for predictions at most this long; no trace runs beside a trial."""
MIN_ADDED_STEPS = 2
"""The fewest steps that are added to a trial."""
SAMPLED_S = 3.0
"""Timed steps of this length have two samples of a GPU's energy counter and utilization, read once a second."""
UNTIMED_COLD_STEPS = 3
"""Untimed steps of a cold run, as of any run; on a CPU its memory is measured in them."""
VOIDING_KINDS = ("other_processes", "shared_gpu", *THROTTLING_KINDS.values())
"""Kinds of doubt that void a measurement."""
USUAL_DISTURBANCES, LAST_MEASUREMENTS = 2, 8
"""Chosen, not measured: with this many disturbed measurements of a candidate, or among the last `LAST_MEASUREMENTS`,
the next counts: the disturbance is the machine's normal noise."""


class BestConductor(Conductor[BestEnded]):
    """Conducts a best-fit search: trials, then cold runs.

    A preset's candidates are tried in warm processes, each of a script's in a run of its own.
    """

    JOURNAL = BestJournal

    def __init__(
        self, directory: Path, best_plan: BestPlan, home: Home, options: SearchOptions, caller: SearchCaller
    ) -> None:
        super().__init__(directory, home, options, caller)
        self._question = next(line for line in self._lines if isinstance(line, BestQuestion))
        # The journal's question has the GPUs that the search took when it began.
        self._best_plan = dataclasses.replace(best_plan, question=self._question)
        self._space = newest(self._lines, Space) or best_plan.space
        self._process_knobs: KnobValues = {}
        self._process_uuids: list[str] = []

    def end_line(self, state: EndState, reason: str) -> BestEnded:
        """Return an end with the answer or the best so far, or with the smallest excess if nothing fits."""
        if not any(isinstance(line, Space) for line in self._lines):
            return BestEnded(state=state, reason=reason)
        if state != "nothing_fits":
            answer = answer_of(self._state()) if state in ("answered", "cancelled") else None
            return BestEnded(state=state, reason=reason, answer=answer)
        verdicts = [*self._state().ruled_out.values()]
        missing_bytes = lowest(verdict.excess_bytes for verdict in verdicts)
        reason = f"{reason}: {verdicts[0].reason}" if missing_bytes is None else reason
        return BestEnded(state=state, reason=reason, missing_bytes=missing_bytes)

    def open(self) -> None:
        """List the candidates with their predictions.

        Models are traced by the standby, which then is the baseline's process. The memory of a script is unknown.
        """
        if any(isinstance(line, Space) for line in self._lines):
            return
        if not self._question.is_script:
            launch.keep_standby(self._best_plan.plan, self._home)
            predict = partial(self._best_plan.predict_candidates, ceiling=self._ceiling())
            self._space = run_within(PREDICTIONS_WAIT_S, predict, self._raise_if_cancelled)
        self._write(self._space)

    def _ceiling(self) -> Ceiling:
        device = SpeedDevice(self._question.device, next(iter(self._question.device_names), ""))
        return known_ceiling(self._home, device)

    def step(self) -> BestEnded | None:
        """Decide and take one step."""
        state = self._state()
        if (number := state.next_center) is not None:
            grow = partial(self._best_plan.grow, space=self._space, number=number, ceiling=self._ceiling())
            self._space = run_within(PREDICTIONS_WAIT_S, grow, self._raise_if_cancelled)
            self._write(self._space)
            state = self._state()
        decision = decide(state)
        step = decision.step
        self._write(step)
        if decision.end_state is not None:
            self._runs.end_process()
            return msgspec.structs.replace(self.end_line(decision.end_state, step.why), stopped_because=step.why)
        assert step.candidate_number is not None
        if step.action != "trial":
            self._take_cold_run(decision, step.candidate_number)
        elif self._question.is_script:
            self._try_script(decision.step_rule, step.candidate_number)
        else:
            self._try_warm(decision, step.candidate_number)
        return None

    def _state(self) -> BestState:
        warm_run_id = None if self._runs.process is None else self._runs.process.directory.name
        return BestState(self._lines, worked_seconds(self._lines), warm_run_id)

    def _plan_trial_or_record(self, number: int, **knobs: KnobValue) -> RunPlan | None:
        """Return the plan of a candidate's trial, or record why it is refused. Raises UserError for the baseline."""
        try:
            return self._best_plan.plan_of(self._space.candidates[number], under_memory_limit=False, **knobs)
        except UserError as error:
            if number == self._space.baseline_number:
                raise
            self._write(self._trial(number, "", outcome="failed", reason=error.line_without_option()))
            return None

    def _trial(self, number: int, run_id: str, **fields: Any) -> Trial:
        """Return a trial of a candidate without a step."""
        samples_per_step = self._space.candidates[number].samples_per_step
        fields = {"outcome": "measured", "warm": False, "seconds": 0.0, **fields}
        return Trial(candidate_number=number, run_id=run_id, samples_per_step=samples_per_step, **fields)

    def _record_end(self, number: int, began_s: float) -> None:
        """Record a trial whose process ended without an answer."""
        result = self._runs.wait_for_process_end()
        outcome, reason = outcome_of(result)
        seconds = self._runs.clock_s() - began_s
        self._write(self._trial(number, result.run_id, outcome=outcome, reason=reason, seconds=seconds))

    def _take_cold_run(self, decision: BestDecision, number: int) -> None:
        """Measure a candidate in a cold run."""
        self._runs.end_process()
        step, candidate, plan_of = decision.step, self._space.candidates[number], self._best_plan.plan_of
        if step.action == UNDER_LIMIT:
            plan = plan_of(candidate, under_memory_limit=True, steps=LIMIT_STEPS, timing_warmup=1)
        else:
            # Losses compare after equally many steps.
            earlier = (line for line in self._lines if isinstance(line, ColdRun) and line.role != UNDER_LIMIT)
            first = next((read_run_file(self._home.directory(run.run_id)) for run in earlier), None)
            steps = None if first is None else first.knobs.get("steps")
            if not isinstance(steps, int):
                steps = UNTIMED_COLD_STEPS + decision.step_rule.max_steps
            plan = plan_of(candidate, steps=steps, timing_warmup=UNTIMED_COLD_STEPS)
            plan = with_predicted_speed(plan, self._home)
        directory = self._runs.start(plan, COLD)
        run = cold_run_of(step, candidate, directory, self._runs.wait_for_end(directory))
        self._write(with_usual_disturbance(run, self._lines))

    def _try_warm(self, decision: BestDecision, number: int) -> None:
        """Measure a candidate in the warm process of its process knobs, or in a new one."""
        if decision.needs_new_process:
            self._runs.end_process()
        process = self._process_for(number)
        if process is None:
            return
        candidate, run_id = self._space.candidates[number], process.directory.name
        began_s = self._runs.clock_s()
        is_warm = any(isinstance(line, Trial) and line.run_id == run_id for line in self._lines)
        trial = take_trial(
            process,
            self._trial(number, run_id, warm=is_warm, repeats=decision.step.repeats),
            {name: value for name, value in candidate.knobs.items() if name not in candidate.process_knobs},
            decision.step_rule,
            uuids=self._process_uuids,
            # The baseline's busy share is what every later expectation starts from.
            needs_samples=self._question.objective == "samples_per_joule"
            or (bool(self._process_uuids) and number == self._space.baseline_number and not is_warm),
        )
        if trial is None:
            self._record_end(number, began_s)
            return
        self._write(with_usual_disturbance(trial, self._lines))
        if process.ended_by_error:
            self._runs.wait_for_process_end()
        elif not takes_warm_trials(self._best_plan.survey.run_of(candidate.knobs).knobs):
            self._runs.end_process()

    def _process_for(self, number: int) -> WarmProcess | None:
        """Return the warm process for a candidate, if need be a new one; None if that ended before it was ready."""
        process_knobs = self._space.candidates[number].process_knobs
        if self._runs.process is not None and self._process_knobs == process_knobs:
            return self._runs.process
        self._runs.end_process()
        began_s = self._runs.clock_s()
        plan = self._plan_trial_or_record(number)
        if plan is None:
            return None
        process = self._runs.start_process(plan, TRIAL)
        self._process_knobs, self._process_uuids = process_knobs, plan.device_uuids
        if process.ready() is None:
            self._record_end(number, began_s)
            return None
        start_s = self._runs.clock_s() - began_s
        self._write(ProcessReady(run_id=process.directory.name, process_knobs=process_knobs, start_s=start_s))
        return process

    def _try_script(self, rule: StepRule, number: int) -> None:
        """Measure a candidate in its own run. The noise so far decides the steps."""
        candidate, began_s = self._space.candidates[number], self._runs.clock_s()
        steps = UNTIMED_TRIAL_STEPS + rule.steps_at(self._state().measured.step_deviation)
        plan = self._plan_trial_or_record(number, steps=steps, timing_warmup=UNTIMED_TRIAL_STEPS)
        if plan is None:
            return
        directory = self._runs.start(plan, TRIAL)
        result = self._runs.wait_for_end(directory)
        start_s = read_start_s(directory)
        seconds = max(0.0, self._runs.clock_s() - began_s - start_s)
        trial = with_usual_disturbance(trial_of_run(number, candidate, directory, result, seconds), self._lines)
        if trial.step_ms:
            self._write(ProcessReady(run_id=directory.name, process_knobs=candidate.process_knobs, start_s=start_s))
        if trial.outcome in ("measured", "void") and trial.samples_per_step != candidate.samples_per_step:
            # The first measured trial shows the samples of a step: a script may accumulate by itself. Others must
            # match: often nothing else shows the value of a script's own flag.
            if any(isinstance(line, Trial) and line.outcome == "measured" for line in self._lines):
                text = f"samples a step: {trial.samples_per_step} ran, {candidate.samples_per_step} were asked for"
                trial = msgspec.structs.replace(trial, outcome="incompatible", reason=text)
            elif trial.outcome == "measured" and trial.samples_per_step:
                self._space = with_seen_samples(self._space, trial)
                self._write(self._space)
        self._write(trial)


def take_trial(
    process: WarmProcess,
    trial: Trial,
    knobs: KnobValues,
    rule: StepRule,
    *,
    uuids: Sequence[str] = (),
    needs_samples: bool = False,
) -> Trial | None:
    """Return the trial with its outcome and figures; None when the process on these GPUs ended without an answer.

    `needs_samples` adds steps until the GPUs were read twice. A trial that other processes or heat disturb is
    void, and one that ran other settings has failed.
    """
    began_s, cpu, others_cores = time.monotonic(), CpuWindow(), None
    step_ms: list[float] = []
    steps: list[Step] = []
    losses: list[float | None] = []
    outcome: AttemptOutcome = "measured"
    reason, peak_bytes, begin_ns, end_ns = "", None, 0, 0
    count = rule.min_steps
    while count:
        replies = process.trial(knobs, UNTIMED_TRIAL_STEPS, count, more=end_ns > 0)
        if replies is None:
            return None
        lines = [*replies.values()]
        failed = next((line for line in lines if line.outcome != "measured"), None)
        if failed is not None:
            message = failed.message or ""
            outcome, reason = ("oom", oom_reason(message)) if failed.outcome == "oom" else ("failed", message)
            break
        # The slowest rank's times count.
        step_ms += [max(times) for times in zip(*(line.step_ms for line in lines), strict=True)]
        steps += lines[0].steps()
        losses += lines[0].losses
        peak_bytes = highest((peak_bytes, *(line.peak_allocated_bytes for line in lines)))
        end_ns = max(line.t_ns for line in lines)
        others_cores = cpu.others_cores() if process.descends_from_us else None
        begin_ns = begin_ns or round(end_ns - sum(lines[0].step_ms) * 1e6)
        judgement = rule.judge(step_ms)
        count = 0
        if judgement == "slow":
            words = f"the best step takes {min(step_ms):.3g} ms, hopeless above {rule.give_up_ms:.3g} ms"
            outcome, reason = "slow", words
        elif judgement == "more":
            count = steps_to_add(step_ms, rule)
        elif needs_samples and (missing_s := SAMPLED_S - (end_ns - begin_ns) / 1e9) > 0:
            # In one order: between two orders the GPU waits, and that energy would count.
            count = max(rule.min_steps, math.ceil(1000 * missing_s / statistics.median(step_ms)))
    devices, found = trial_conditions(process.directory, uuids, Window(begin_ns, end_ns), others_cores)
    if outcome in TIMED_OUTCOMES:
        difference = override_reason(process.directory, knobs)
        if difference is not None:
            outcome, reason = "failed", difference
        elif disturbance := void_reason(found):
            outcome, reason = "void", "; ".join(filter(None, (reason, disturbance)))
    trial = msgspec.structs.replace(trial, **phases_of(process.directory, steps, knobs))
    return msgspec.structs.replace(
        trial,
        outcome=outcome,
        reason=reason,
        step_ms=step_ms,
        losses=losses,
        joules=total_joules(devices),
        peak_allocated_bytes=peak_bytes,
        doubts=found,
        seconds=time.monotonic() - began_s,
    )


def trial_conditions(
    directory: Path, uuids: Sequence[str], window: Window, others_cores: float | None = None
) -> tuple[list[DeviceConditions], list[Doubt]]:
    """Return the conditions of a run's GPUs in a window, none on a CPU, and the doubts about what was measured in it.

    `others_cores` are the cores that other processes kept busy; None if unknown.
    """
    devices: list[DeviceConditions] = []
    foreign: list[ForeignProcess] = []
    records = read_records(directory) if uuids else None
    if records is not None and records.run is not None:
        devices = join_of(records.device_samples, list(uuids)).conditions_between(window.begin_ns, window.end_ns)
        # Before the first sample any watched GPU may be one of these.
        indexes = {sample.index for uuid in uuids for _, sample in records.device_samples.get(uuid, ())[:1]}
        foreign = foreign_processes(records.run, records.events, window)
        foreign = [process for process in foreign if process.device in indexes or not indexes]
    others_percent = None if others_cores is None else 100 * others_cores / len(os.sched_getaffinity(0))
    result = Result(
        run_id=directory.name,
        state="finished",
        throttle=window_throttle(devices, window, None),
        conditions=RunConditions(foreign_processes=foreign, others_cpu_percent=others_percent),
    )
    return devices, doubts(result)


def phases_of(directory: Path, steps: Sequence[Step], knobs: KnobValues) -> dict[str, Any]:
    """Return the `profile` and the `diagnosis` of a trial with these knobs and timed steps; empty without a window."""
    window = window_of(steps)
    records = None if window is None else read_records(directory)
    if window is None or records is None or records.run is None:
        return {}
    run = msgspec.structs.replace(records.run, knobs={**records.run.knobs, **knobs})
    join = join_of(records.device_samples, run.watch_uuids, used_uuids=run.device_uuids)
    readings = records.device_samples, records.host_samples, records.events
    measured = measured_window_of(run, {0: steps}, window, join, *readings)
    busy_percent = figures_by_scope(measured)["run"][0]["gpu_utilization_percent"]
    profile = StepProfile(
        data_ms=measured.mean_ms("data"),
        optimizer_ms=measured.mean_ms("optimizer"),
        gpu_busy=None if busy_percent is None else busy_percent / 100,
    )
    return {"profile": profile, "diagnosis": [finding.line for finding in diagnose(measured)]}


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


def trial_of_run(number: int, candidate: Candidate, directory: Path, result: Result, seconds: float) -> Trial:
    """Return the line of an ended run of candidate `number`; `seconds` are without the preparation of the run.

    The slowest rank's times count. The losses are left out: a script's samples may come in another order.
    """
    ranks = [[step for step in steps if not step.warmup] for steps in read_records(directory).steps.values()]
    steps = list(zip(*ranks, strict=False))  # a rank that was killed has fewer
    samples = [sum(line.samples or 0 for line in rank_steps) for rank_steps in steps]
    samples_per_step = statistics.median_low(samples) if samples else 0
    joules_per_sample = result.energy.joules_per_sample
    first_rank = ranks[0] if ranks else []
    return Trial(
        candidate_number=number,
        warm=False,
        samples_per_step=samples_per_step,
        step_ms=[max(line.step_ms for line in rank_steps) for rank_steps in steps],
        joules=None if joules_per_sample is None else joules_per_sample * samples_per_step * len(steps),
        seconds=seconds,
        **phases_of(directory, first_rank, {}),
        **_fields_of_run(result, candidate.knobs),
    )


def cold_run_of(step: BestStep, candidate: Candidate, directory: Path, result: Result) -> ColdRun:
    """Return the line of an ended cold run of the candidate of a step.

    Losses compare after equally many steps and on the same samples: a run under memory_limit and a script have none.
    """
    assert step.candidate_number is not None
    rate = result.throughput.samples_per_s
    joules_per_sample = result.energy.joules_per_sample
    fields = _fields_of_run(result, candidate.knobs)
    has_rate = fields["outcome"] in ("measured", "void")
    has_losses = result.script is None and step.action != UNDER_LIMIT
    return ColdRun(
        candidate_number=step.candidate_number,
        role=step.action,
        knob=step.knob,
        samples_per_s=rate.typical if has_rate else None,
        mad=rate.mad if has_rate else None,
        samples_per_joule=1 / joules_per_sample if joules_per_sample else None,
        predicted=result.throughput.predicted,
        start_s=read_start_s(directory),
        losses=[result.loss.first, result.loss.last] if has_losses else [],
        seconds=result.seconds or 0.0,
        **fields,
    )


def _fields_of_run(result: Result, knobs: Collection[str]) -> dict[str, Any]:
    """Return the fields of an ended run that its line has as a trial or as a cold run."""
    outcome, reason = outcome_of(result, knobs)
    return {
        "run_id": result.run_id,
        "outcome": outcome,
        "peak_allocated_bytes": result.memory.peak_allocated_bytes,
        "reason": reason,
        # Few steps are no doubt: the intervals of a search count steps.
        "doubts": [doubt for doubt in doubts(result) if doubt.kind != "few_steps"],
    }


def outcome_of(result: Result, knobs: Collection[str] = ()) -> tuple[AttemptOutcome, str]:
    """Return the outcome of an ended run and its reason.

    A run is incompatible when its script overrode one of these knobs, and void when other processes or heat disturb it.
    """
    if result.state == "oom":
        return "oom", oom_reason(result.reason, None if result.oom is None else result.oom.missing_bytes)
    if result.state == "lost":
        return "void", f"lost: {result.reason}"
    if result.state != "finished" or result.throughput.samples_per_s.typical is None:
        unknown = "" if result.script is None else result.script.unknown.get("samples", "")
        return "failed", ": ".join(filter(None, (result.state, result.reason or unknown)))
    if (difference := result.loss_difference) is not None and difference.excess:
        return "failed", f"{difference.excess} ({difference.against} compared)"
    if result.loss.not_finite:
        return "failed", f"the loss of {result.loss.not_finite} steps is not finite"
    overridden = incompatible_reason(result, knobs)
    if overridden is not None:
        return "incompatible", overridden
    reason = void_reason(doubts(result))
    return "void" if reason else "measured", reason


def void_reason(found: Collection[Doubt]) -> str:
    """Return the doubts that void a measurement, in words; empty if none does."""
    return "; ".join(doubt.text for doubt in found if doubt.kind in VOIDING_KINDS)


AttemptT = TypeVar("AttemptT", Trial, ColdRun)


def with_usual_disturbance(attempt: AttemptT, lines: Sequence[BestLine]) -> AttemptT:
    """Return the attempt; a disturbed one counts if so many of the last, or of its candidate's, were disturbed.

    A run under memory_limit shows only whether the candidate fits: a disturbed one counts.
    """
    others = [line for line in lines if isinstance(line, Attempt)]
    of_candidate = [line for line in others if line.candidate_number == attempt.candidate_number]
    is_usual = (isinstance(attempt, ColdRun) and attempt.role == UNDER_LIMIT) or any(
        sum(line.outcome == "void" or line.counts_disturbed for line in group) >= USUAL_DISTURBANCES
        for group in (others[-LAST_MEASUREMENTS:], of_candidate)
    )
    disturbance = void_reason(attempt.doubts)
    if not (is_usual and attempt.outcome == "void" and disturbance and attempt.reason.endswith(disturbance)):
        return attempt
    # A trial with a reason of its own was given up as hopeless.
    return msgspec.structs.replace(attempt, outcome="measured" if attempt.reason == disturbance else "slow")

"""Take the steps of a best-fit search that `decide` chooses: trials, cold runs, instructions and the end."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError, lowest
from trainfast_runner.machine import calibration
from trainfast_runner.machine.cpu import cpu_name
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.records.run_records import read_worker_lines
from trainfast_runner.records.worker_lines import COLD, ActualLine
from trainfast_runner.results.summary import read_start_s
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.best.answer import answer_of
from trainfast_runner.search.best.candidates import (
    UNTIMED_TRIAL_STEPS,
    Failure,
    ModelSurvey,
    ScriptSurvey,
    oom_failure,
    seq_len_of,
    with_bounds,
)
from trainfast_runner.search.best.decide import BestDecision, decide
from trainfast_runner.search.best.person_instructions import read_instructions
from trainfast_runner.search.best.question import BestPlan
from trainfast_runner.search.best.state import BestState, state_of_best_journal
from trainfast_runner.search.best.trial import (
    UNTIMED_COLD_STEPS,
    cold_run_of,
    is_usually_disturbed,
    take_trial,
    trial_of_run,
    with_checked_samples,
)
from trainfast_runner.search.best_journal import (
    UNDER_LIMIT,
    Attempt,
    AttemptOutcome,
    BestEnded,
    BestLaunched,
    BestLine,
    BestQuestion,
    Candidate,
    ColdRun,
    Instruction,
    ProcessReady,
    Space,
    Trial,
    read_best_journal,
)
from trainfast_runner.search.conductor import (
    Conductor,
    OrphanedRuns,
    SearchCaller,
    WarmProcess,
    conduct_alone,
    end_if_live,
    is_usable,
    raise_if_stopped,
    wait_until,
)
from trainfast_runner.search.effects import steps_for
from trainfast_runner.search.journal import EndState, worked_seconds
from trainfast_runner.search.predicted_speed import with_predicted_speed
from trainfast_runner.search.searches import SearchOptions, candidate_spec, takes_warm_trials
from trainfast_runner.settings.knob_values import KnobValue, KnobValues
from trainfast_runner.worker.shared.words import TRIAL

LIMIT_STEPS = 4
"""Steps of a run under the real `memory_limit`: the optimizer's states exist from the second on."""


PREDICTIONS_WAIT_S = 30.0
"""The first trial, its process ready, waits for predictions at most this long; no trace runs beside a trial."""
OUTCOME_OF_END_STATE: Mapping[str, AttemptOutcome] = {"oom": "oom", "lost": "void"}
"""Outcome of a trial by the state in which its process ended without an answer; any other state is a failure."""


class BestConductor(Conductor[BestLine, BestEnded]):
    """Conducts a best-fit search: trials, then cold runs.

    A preset's candidates are tried in warm processes, each of a script's in a run of its own.
    """

    def __init__(
        self, directory: Path, best_plan: BestPlan, home: Home, options: SearchOptions, caller: SearchCaller[BestLine]
    ) -> None:
        super().__init__(directory, best_plan.plan, home, read_best_journal(directory), options, caller)
        self._question = next(line for line in self._lines if isinstance(line, BestQuestion))
        self._survey = best_plan.survey
        self._space = best_plan.space
        self._orphans = OrphanedBestRuns(home, directory.name, self._lines)
        self._process_knobs: KnobValues = {}
        self._process_uuids: list[str] = []

    def end_line(self, state: EndState, reason: str) -> BestEnded:
        """Return an end with the best answer so far, if anything was measured."""
        has_answer = state == "cancelled" and any(isinstance(line, Space) for line in self._lines)
        return BestEnded(state=state, reason=reason, answer=answer_of(self._state()) if has_answer else None)

    def open(self) -> None:
        """Take over the runs of an earlier conductor, and list the candidates with their predictions."""
        self._orphans.end_trying_runs()
        recorded_space = newest(self._lines, Space)
        if recorded_space is not None:
            self._space = recorded_space
        for launch_line, directory in self._orphans.cold_runs():
            self._follow(launch_line, directory)
        survey = self._survey
        if recorded_space is None and isinstance(survey, ModelSurvey):
            self._predict_candidates(survey)
        elif recorded_space is None:
            self._write(self._space)  # the memory of a script is unknown
        elif isinstance(survey, ScriptSurvey):
            self._update_candidates(survey)

    def step(self) -> BestEnded | None:
        """Decide and take one step."""
        given = read_instructions(self._directory)
        for instruction in given[sum(isinstance(line, Instruction) for line in self._lines) :]:
            self._write(msgspec.structs.replace(instruction, t_ns=time.monotonic_ns()))
        decision = decide(self._state())
        step = decision.step
        self._write(step)
        if decision.end_state is not None:
            return self._decided_end(step.why, decision.end_state)
        assert step.candidate_number is not None
        survey = self._survey
        if step.action != "trial":
            self._take_cold_run(decision, step.candidate_number)
        elif isinstance(survey, ModelSurvey):
            self._try_warm(survey, decision, step.candidate_number)
        elif isinstance(survey, ScriptSurvey):
            self._try_script(survey, decision, step.candidate_number)
        return None

    def _decided_end(self, why: str, end_state: EndState) -> BestEnded:
        """Return the end: the answer, or the smallest excess if nothing fits."""
        self._runs.end_process()
        if end_state != "nothing_fits":
            answer = answer_of(self._state()) if end_state == "answered" else None
            return BestEnded(state=end_state, reason=why, stopped_because=why, answer=answer)
        verdicts = self._state().ruled_out.values()
        closest = min(verdicts, key=lambda verdict: verdict.excess_bytes or math.inf)
        missing_bytes = lowest(verdict.excess_bytes for verdict in verdicts)
        reason = f"{why}: {closest.reason}" if missing_bytes is None else why
        return BestEnded(state=end_state, reason=reason, stopped_because=why, missing_bytes=missing_bytes)

    def _plan_of(self, number: int, *, under_memory_limit: bool = False, **knobs: KnobValue) -> RunPlan:
        """Return the plan of a candidate's run, under its `memory_limit` or none. Raises UserError."""
        candidate = self._space.candidates[number]
        plan = self._survey.plan_of(self._question, candidate, under_memory_limit=under_memory_limit, **knobs)
        return dataclasses.replace(plan, search_id=self._directory.name)

    def _plan_trial_or_record(self, number: int, **knobs: KnobValue) -> RunPlan | None:
        """Return the plan of a candidate's trial, or record why it is refused. Raises UserError for the baseline."""
        try:
            return self._plan_of(number, under_memory_limit=False, **knobs)
        except UserError as error:
            if number == self._space.baseline_number:
                raise
            self._record_failure(number, Failure(error.line_without_option()))
            return None

    def _record_launch(self, directory: Path, role: str, number: int, knob: str | None = None) -> BestLaunched:
        """Write that a run was started for a candidate, or taken over, and return the line."""
        launch_line = BestLaunched(run_id=directory.name, role=role, candidate_number=number, knob=knob)
        self._write(launch_line)
        return launch_line

    def _take_cold_run(self, decision: BestDecision, number: int) -> None:
        """Measure a candidate in a cold run, or take the same run of a killed conductor."""
        self._runs.end_process()
        step = decision.step
        if step.action == UNDER_LIMIT:
            plan = self._plan_of(number, under_memory_limit=True, steps=LIMIT_STEPS, timing_warmup=1)
        else:
            # Losses compare after equally many steps.
            cold_runs = (line for line in self._lines if isinstance(line, ColdRun) and line.role != UNDER_LIMIT)
            first_run = next(cold_runs, None)
            first = None if first_run is None else read_run_file(self._home.directory(first_run.run_id))
            steps = UNTIMED_COLD_STEPS + decision.step_rule.max_steps if first is None else int(first.knobs["steps"])
            plan = self._plan_of(number, steps=steps, timing_warmup=UNTIMED_COLD_STEPS)
            plan = with_predicted_speed(plan, self._home)
        directory = self._orphans.adopt_measuring_run(plan) or self._runs.start(plan, COLD)
        self._follow(self._record_launch(directory, step.action, number, step.knob), directory)

    def _follow(self, launch_line: BestLaunched, directory: Path) -> None:
        """Wait for the end of a cold run and record it."""
        result = self._runs.wait_for_end(directory)
        # A run under memory_limit shows only whether the candidate fits: a disturbed one counts.
        keep_disturbed = launch_line.role == UNDER_LIMIT or is_usually_disturbed(
            self._lines, launch_line.candidate_number
        )
        knobs = self._space.candidates[launch_line.candidate_number].knobs
        self._write(cold_run_of(launch_line, directory, result, knobs, keep_disturbed=keep_disturbed))

    def _record_failure(
        self, number: int, failure: Failure, outcome: AttemptOutcome = "failed", run_id: str = "", seconds: float = 0.0
    ) -> None:
        """Record a trial without a step."""
        samples = self._space.candidates[number].samples_per_step
        trial = Trial(
            candidate_number=number,
            run_id=run_id,
            outcome=outcome,
            warm=False,
            samples_per_step=samples,
            seconds=seconds,
            reason=failure.reason,
            missing_bytes=failure.missing_bytes,
        )
        self._write(trial)

    def _state(self) -> BestState:
        warm_run_id = None if self._runs.process is None else self._runs.process.directory.name
        return state_of_best_journal(self._lines, worked_seconds(self._lines), warm_run_id)

    def _predict_candidates(self, survey: ModelSurvey) -> None:
        """Trace and predict while the baseline's process starts, then write the candidates.

        They come before the first trial, but after the record of a baseline's process that ended while it started.
        """
        cancelled = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            prediction = pool.submit(survey.predict_candidates, self._question, cancelled)
            try:
                self._process_for(self._space.baseline_number)
                wait_until(prediction.done, self._raise_if_cancelled, time.monotonic() + PREDICTIONS_WAIT_S)
            finally:
                cancelled.set()
        self._space = prediction.result()
        self._write(self._space)

    def _try_warm(self, survey: ModelSurvey, decision: BestDecision, number: int) -> None:
        """Measure a candidate in the warm process of its process knobs, or in a new one."""
        if decision.needs_new_process:
            self._runs.end_process()
        process = self._process_for(number)
        if process is None:
            return
        candidate = self._space.candidates[number]
        began_s = self._runs.clock_s()
        run_id = process.directory.name
        trial = take_trial(
            process,
            Trial(
                candidate_number=number,
                run_id=run_id,
                outcome="measured",
                warm=any(isinstance(line, Trial) and line.run_id == run_id for line in self._lines),
                samples_per_step=candidate.samples_per_step,
                seconds=0.0,
                repeats=decision.step.repeats,
            ),
            {name: value for name, value in candidate.knobs.items() if name not in candidate.process_knobs},
            decision.step_rule,
            uuids=self._process_uuids,
            needs_energy=self._question.objective == "samples_per_joule",
            keep_disturbed=is_usually_disturbed(self._lines, number),
        )
        if trial is None:
            self._record_end(number, self._runs.wait_for_process_end(), self._runs.clock_s() - began_s)
            return
        self._write(trial)
        if trial.step_ms:  # the setting took a step, with which its FLOPs are recorded
            self._add_flops_bounds(survey, process, candidate)
        if process.ended_by_error:
            self._runs.wait_for_process_end()
        elif not takes_warm_trials(candidate_spec(survey.spec, candidate.knobs).knobs):
            self._runs.end_process()

    def _add_flops_bounds(self, survey: ModelSurvey, process: WarmProcess, tried: Candidate) -> None:
        """Add the bounds by FLOPs to the candidates, once a process has counted the FLOPs of a tried one."""
        if any(candidate.least_s_per_sample for candidate in self._space.candidates):
            return
        plan = survey.plan
        ceiling = calibration.read(self._home).get(next(iter(plan.device_names), "") or cpu_name())
        lines = read_worker_lines(process.directory).get(0, [])
        counted = (line.model_flops_per_sample for line in reversed(lines) if isinstance(line, ActualLine))
        flops = next(filter(None, counted), None)
        if ceiling is not None and not ceiling.disturbed and flops is not None:
            self._space = with_bounds(self._space, survey, flops, seq_len_of(self._question, tried), ceiling)
            self._write(self._space)

    def _process_for(self, number: int) -> WarmProcess | None:
        """Return the warm process for a candidate, if need be a new one; None if that ended before it was ready."""
        candidate = self._space.candidates[number]
        if self._runs.process is not None and self._process_knobs == candidate.process_knobs:
            return self._runs.process
        self._runs.end_process()
        self._orphans.end_cold_runs()
        began_s = self._runs.clock_s()
        plan = self._plan_trial_or_record(number)
        if plan is None:
            return None
        process = self._runs.start_process(plan, TRIAL)
        self._record_launch(process.directory, TRIAL, number)
        self._process_knobs, self._process_uuids = candidate.process_knobs, plan.device_uuids
        if process.ready() is None:
            self._record_end(number, self._runs.wait_for_process_end(), self._runs.clock_s() - began_s)
            return None
        start_s = self._runs.clock_s() - began_s
        self._write(ProcessReady(run_id=process.directory.name, process_knobs=candidate.process_knobs, start_s=start_s))
        return process

    def _record_end(self, number: int, result: Result, seconds: float) -> None:
        """Record a trial whose process ended without an answer."""
        raise_if_stopped(result)
        outcome = OUTCOME_OF_END_STATE.get(result.state, "failed")
        failure = oom_failure(result) if outcome == "oom" else Failure(f"{result.state}: {result.reason}")
        self._record_failure(number, failure, outcome, result.run_id, seconds)

    def _try_script(self, survey: ScriptSurvey, decision: BestDecision, number: int) -> None:
        """Measure a candidate in its own run, or take the ended run that a killed conductor left.

        The noise so far decides the steps of a new run.
        """
        self._orphans.end_cold_runs()
        candidate = self._space.candidates[number]
        rule = decision.step_rule
        began_s = self._runs.clock_s()
        deviation = self._state().measured.step_deviation
        steps = UNTIMED_TRIAL_STEPS + steps_for(deviation, rule.standard_error, rule.min_steps, rule.max_steps)
        plan = self._plan_trial_or_record(number, steps=steps, timing_warmup=UNTIMED_TRIAL_STEPS)
        if plan is None:
            return
        orphan = self._orphans.adopt_trying_run(plan)
        directory = orphan or self._runs.start(plan, TRIAL)
        self._record_launch(directory, TRIAL, number)
        result = self._runs.wait_for_end(directory)
        process_start_s = read_start_s(directory)
        seconds = self._runs.clock_s() - began_s if orphan is None else result.seconds or 0.0
        trial = trial_of_run(
            number,
            candidate,
            directory,
            result,
            max(0.0, seconds - process_start_s),
            keep_disturbed=is_usually_disturbed(self._lines, number),
        )
        # The first measured trial shows the samples of a step: a script may accumulate by itself. Others must match.
        if any(isinstance(line, Trial) and line.outcome == "measured" for line in self._lines):
            trial = with_checked_samples(trial, candidate)
        if trial.step_ms:
            self._write(
                ProcessReady(run_id=directory.name, process_knobs=candidate.process_knobs, start_s=process_start_s)
            )
        self._write(trial)
        self._update_candidates(survey)

    def _update_candidates(self, survey: ScriptSurvey) -> None:
        """Write the candidates again if trials changed their known figures, also trials of a killed conductor."""
        updated = survey.with_seen_samples(self._space, self._lines)
        if updated is not self._space:
            self._space = updated
            self._write(updated)


def conduct_best(
    directory: Path, best_plan: BestPlan, home: Home, options: SearchOptions, caller: SearchCaller[BestLine]
) -> BestEnded:
    """Conduct the search in `directory` to its end; record and return the end.

    Raises UserError when another process conducts the search, and when its device is in use.
    """
    return conduct_alone(directory, lambda: BestConductor(directory, best_plan, home, options, caller))


class OrphanedBestRuns(OrphanedRuns):
    """The orphaned runs of a best-fit search: trials, or warm processes, and cold runs."""

    def __init__(self, home: Home, search_id: str, lines: Sequence[BestLine]) -> None:
        recorded_run_ids = {line.run_id for line in lines if isinstance(line, Attempt)}
        super().__init__(home, search_id, recorded_run_ids, TRIAL, COLD, is_new=len(lines) == 1)
        self._launched = {line.run_id: line for line in lines if isinstance(line, BestLaunched)}

    def cold_runs(self) -> Iterator[tuple[BestLaunched, Path]]:
        """Yield each usable cold run, alive or not, whose launch the journal has."""
        for run_id in [run_id for run_id in self._measuring if run_id in self._launched]:
            del self._measuring[run_id]
            if is_usable(directory := self._home.directory(run_id)):
                yield self._launched[run_id], directory

    def adopt_measuring_run(self, plan: RunPlan) -> Path | None:
        """Return the cold run of the plan's settings that was killed before its launch was recorded; end the others."""
        directory = super().adopt_measuring_run(plan)
        self._measuring = {}
        return directory

    def end_cold_runs(self) -> None:
        """End the cold runs that were not adopted."""
        for run_id in self._measuring:
            end_if_live(self._home.directory(run_id))
        self._measuring = {}

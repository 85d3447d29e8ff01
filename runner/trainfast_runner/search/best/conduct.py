"""Conduct a best-fit search: do what `decide` says, record the outcome, and leave nothing running behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.records.run_file import COLD, TRIAL
from trainfast_runner.results.start_time import start_s
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.best.choose.answer import answer_of, answer_so_far
from trainfast_runner.search.best.choose.decide import BestDecision, decide
from trainfast_runner.search.best.choose.state import BestState, state_of_best_journal
from trainfast_runner.search.best.disturbances import is_usually_disturbed
from trainfast_runner.search.best.measure.bounds import ceiling_here, flops_of, with_bounds
from trainfast_runner.search.best.measure.cold_run_record import UNTIMED_COLD_STEPS, cold_run_of
from trainfast_runner.search.best.measure.orphaned_best_runs import OrphanedBestRuns
from trainfast_runner.search.best.measure.trial import WantedTrial, take_trial
from trainfast_runner.search.best.measure.trial_record import trial_of_run
from trainfast_runner.search.best.person_orders import read_orders
from trainfast_runner.search.best.question.opening import BestPlan
from trainfast_runner.search.best.step_rule import UNTIMED
from trainfast_runner.search.best.too_large import Failure, closest_to_fit, oom_failure
from trainfast_runner.search.candidate_spec import candidate_spec
from trainfast_runner.search.conductor import Caller, Conductor, conduct_alone, worked_seconds
from trainfast_runner.search.journal.best import (
    BestEnded,
    BestLaunched,
    BestLine,
    BestQuestion,
    ColdRun,
    Ordered,
    RecordedKnobs,
    Space,
    Trial,
    Visited,
    read_best_journal,
)
from trainfast_runner.search.journal.lines import Conducted
from trainfast_runner.search.options import SearchOptions
from trainfast_runner.search.processes import Interrupted, WarmProcess, wait_for_result
from trainfast_runner.search.speed.speeds import with_predicted_speed
from trainfast_runner.search.speed.trial_rates import steps_for
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.worker.catalog import allows_warm_trials

TRACE_WITHIN_S = 30.0
"""The first trial waits at most this long for predictions once its process is ready: nothing is traced while timing."""
LIMIT_STEPS = 4
"""Steps of a run under the real `memory_limit`: the optimizer's states exist from the second on."""


def conduct_best(
    directory: Path,
    best: BestPlan,
    home: Home,
    options: SearchOptions,
    *,
    on_line: Callable[[BestLine], None] = lambda line: None,
    is_cancelled: Callable[[], bool] = lambda: False,
    began_ns: int | None = None,
) -> BestEnded:
    """Conduct the search in `directory` to its end, record that and return it. `on_line` gets every new line.

    The search's time counts from `began_ns` (CLOCK_MONOTONIC), when checking the question began.

    Raises UserError when another process conducts the search, when its device is in use, and when the budget does not
    pay for the baseline.
    """
    caller = Caller(on_line, is_cancelled, began_ns)
    return conduct_alone(directory, lambda: BestConductor(directory, best, home, options, caller))


class BestConductor(Conductor[BestLine, BestEnded]):
    """Conducts a best-fit search: trials in warm processes, then cold runs in fresh ones."""

    def __init__(
        self, directory: Path, best: BestPlan, home: Home, options: SearchOptions, caller: Caller[BestLine]
    ) -> None:
        super().__init__(directory, best.plan, home, read_best_journal(directory), options, caller)
        self._question = next(line for line in self._lines if isinstance(line, BestQuestion))
        self._survey = best.survey
        self._space = best.space
        self._ceiling = ceiling_here(home, best.plan)
        self._orphans = OrphanedBestRuns(home, directory.name, self._lines)
        self._process_knobs: RecordedKnobs = {}
        self._process_uuids: list[str] = []
        self._previous_state: BestState | None = None

    def conducted_line(self, conducted: Conducted) -> Conducted:
        """Return the line as it is: a best-fit search has no options of its own here."""
        return conducted

    def end_line(self, state: str, reason: str) -> BestEnded:
        """Return an end with the best found so far, if anything was measured."""
        is_cancelled = state == "cancelled" and any(isinstance(line, Space) for line in self._lines)
        return BestEnded(state=state, reason=reason, answer=answer_so_far(self._lines) if is_cancelled else None)

    def open(self) -> None:
        """Take over what an earlier conductor left, and list the candidates with their predictions."""
        self._orphans.end_warm_processes()
        for launched, left in self._orphans.cold_runs():
            self._follow(launched, left)
        space = next((line for line in reversed(self._lines) if isinstance(line, Space)), None)
        if space is None:
            self._survey_while_starting()
        else:
            self._space = space
            self._learn()

    def step(self) -> BestEnded | None:
        """Decide and take one step."""
        self._check_budget()
        self._record_orders()
        decision = decide(self._state())
        step = decision.step
        self._write(step)
        if step.action == "end":
            return self._last_line(decision)
        assert step.candidate is not None
        if step.action == "trial":
            self._take_trial(decision, step.candidate)
        else:
            self._take_cold_run(decision, step.candidate)
        return None

    def _check_budget(self) -> None:
        """Raise UserError if the first trial, the baseline's, took more than the budget."""
        first = next((index for index, line in enumerate(self._lines) if isinstance(line, Trial)), None)
        cost_s = 0.0 if first is None else worked_seconds(self._lines[: first + 1])
        if cost_s > self._question.budget_s:
            raise UserError(
                f"--budget {self._question.budget_s:g}s is below the cost of the baseline, which took {cost_s:.1f} s",
                key="--budget",
                advice=f"--budget {5 * cost_s:.0f}s or more",
            )

    def _last_line(self, decision: BestDecision) -> BestEnded:
        """Return the end: the answer, or the smallest excess where nothing fits."""
        self._end_process()
        excess = [candidate.excess_bytes for candidate in self._space.candidates if candidate.excess_bytes is not None]
        reason = decision.step.why
        if decision.end_state == "nothing_fits" and not excess:
            reason += f": {closest_to_fit(self._state().ruled_out.values()).reason}"
        return BestEnded(
            state=decision.end_state,
            reason=reason,
            stopped_because=decision.step.why,
            answer=answer_of(self._state()) if decision.end_state == "answered" else None,
            missing_bytes=min(excess, default=None) if decision.end_state == "nothing_fits" else None,
        )

    def _survey_while_starting(self) -> None:
        """Trace and predict while the baseline's process starts, and write the candidates before its first trial."""
        cancelled = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            predict_candidates = pool.submit(self._survey.predict_candidates, self._question, cancelled)
            try:
                if self._survey.tries_warm:
                    self._process_for(self._space.baseline)
                self._wait_for(predict_candidates, time.monotonic() + TRACE_WITHIN_S)
            finally:
                cancelled.set()
        self._space = predict_candidates.result()
        self._write(self._space)

    def _take_trial(self, decision: BestDecision, number: int) -> None:
        """Measure a candidate: in the warm process of its process knobs, in a new one, or in a run by itself."""
        if not self._survey.tries_warm:
            self._take_trial_by_itself(decision, number)
            return
        if decision.needs_new_process:
            self._end_process()
        process = self._process_for(number)
        if process is None:
            return
        candidate, began_s = self._space.candidates[number], self._clock_s()
        knobs = {name: value for name, value in candidate.knobs.items() if name not in candidate.process_knobs}
        wanted = WantedTrial(
            candidate=number,
            knobs=knobs,
            samples_per_step=candidate.samples_per_step,
            rule=decision.step_rule,
            needs_energy=self._question.objective == "samples_per_joule",
            keep_disturbed=is_usually_disturbed(self._lines, number),
        )
        taken = take_trial(process, self._process_uuids, wanted)
        if taken is None:
            self._record_end(number, self._ended_process(process), self._clock_s() - began_s)
            return
        trial, has_ended = taken
        is_warm = any(isinstance(line, Trial) and line.run_id == trial.run_id for line in self._lines)
        self._write(msgspec.structs.replace(trial, warm=is_warm, repeats=decision.step.repeats))
        self._add_flops_bounds(process)
        if has_ended:
            process.wait_for_end()
            self._ended_process(process)
        elif not self._is_turned_warm(number):
            self._end_process()

    def _take_trial_by_itself(self, decision: BestDecision, number: int) -> None:
        """Measure a candidate in a run by itself, or take the one that a killed conductor left, once it has ended.

        It has as many steps as the noise so far asks for.
        """
        self._orphans.end_cold_runs()
        candidate, rule, began_s = self._space.candidates[number], decision.step_rule, self._clock_s()
        deviation = self._state().measured.step_deviation
        steps = UNTIMED + steps_for(deviation, rule.standard_error, rule.least, rule.most)
        plan = self._trial_plan(number, steps=steps, timing_warmup=UNTIMED)
        if plan is None:
            return
        launched = BestLaunched(run_id="", role=TRIAL, candidate=number)
        left = self._orphans.adopt_trial(plan)
        if left is not None:
            self._write(msgspec.structs.replace(launched, run_id=left.name))
        plan = self._survey.trial_of(plan, self._space, number, self._lines)
        directory = left or self._start(plan, TRIAL, launched)
        result = wait_for_result(directory, self._raise_if_cancelled)
        self._live = None
        if result.state in ("stopped", "killed"):
            raise Interrupted
        to_steady_s = start_s(directory)
        seconds = self._clock_s() - began_s if left is None else result.seconds or 0.0
        trial = trial_of_run(
            number,
            candidate,
            directory,
            result,
            max(0.0, seconds - to_steady_s),
            keep_disturbed=is_usually_disturbed(self._lines, number),
            checks_samples=any(isinstance(line, Trial) and line.outcome == "measured" for line in self._lines),
        )
        if trial.step_ms:
            self._write(Visited(run_id=directory.name, process_knobs=candidate.process_knobs, start_s=to_steady_s))
        self._write(trial)
        self._learn()

    def _learn(self) -> None:
        """Write the candidates anew if trials tell more of them; a killed conductor may not have written that."""
        predict_from_trials = self._survey.predict_from_trials(self._question, self._space, self._lines)
        if predict_from_trials != self._space:
            self._space = predict_from_trials
            self._write(predict_from_trials)

    def _is_turned_warm(self, number: int) -> bool:
        """True if a process of this candidate takes a second trial, even of the same setting."""
        knobs = candidate_spec(self._survey.spec, self._space.candidates[number].knobs).knobs
        return allows_warm_trials(str(knobs["strategy"]), str(knobs["engine"]), str(knobs["compile"]))

    def _add_flops_bounds(self, process: WarmProcess) -> None:
        """Add the bounds by FLOPs to the candidates, once a process has counted its model's."""
        if self._ceiling is None or any(candidate.least_s_per_sample for candidate in self._space.candidates):
            return
        if (flops := flops_of(process.directory)) is not None:
            self._space = with_bounds(self._space, self._survey, flops, self._ceiling)
            self._write(self._space)

    def _process_for(self, number: int) -> WarmProcess | None:
        """The warm process for a candidate, a new one if need be; None if it ended before it was ready."""
        candidate = self._space.candidates[number]
        if self._process is not None and self._process_knobs == candidate.process_knobs:
            return self._process
        self._end_process()
        self._orphans.end_cold_runs()
        began_s = self._clock_s()
        plan = self._trial_plan(number)
        if plan is None:
            return None
        directory = self._start(plan, TRIAL, BestLaunched(run_id="", role=TRIAL, candidate=number))
        process = self._process = WarmProcess(directory, plan.world_size, self._raise_if_cancelled)
        self._process_knobs, self._process_uuids = candidate.process_knobs, plan.device_uuids
        if process.ready() is None:
            self._record_end(number, self._ended_process(process), self._clock_s() - began_s)
            return None
        start_s = self._clock_s() - began_s
        self._write(Visited(run_id=directory.name, process_knobs=candidate.process_knobs, start_s=start_s))
        return process

    def _plan_of(self, number: int, *, under_memory_limit: bool = False, **knobs: KnobValue) -> RunPlan:
        """The plan of a candidate's run, under its `memory_limit` or none. Raises UserError."""
        candidate = self._space.candidates[number]
        plan = self._survey.plan_of(self._question, candidate, under_memory_limit=under_memory_limit, **knobs)
        return replace(plan, search_id=self._directory.name)

    def _trial_plan(self, number: int, **knobs: KnobValue) -> RunPlan | None:
        """Plan a candidate's trial; None if that is refused, which is recorded. Raises UserError for the baseline's."""
        try:
            return self._plan_of(number, under_memory_limit=False, **knobs)
        except UserError as error:
            if number == self._space.baseline:
                raise
            self._record_failure(number, "", "failed", Failure(error.line()))
            return None

    def _start(self, plan: RunPlan, role: str, launched: BestLaunched) -> Path:
        directory = self._launch(plan, role)
        self._write(msgspec.structs.replace(launched, run_id=directory.name))
        return directory

    def _take_cold_run(self, decision: BestDecision, number: int) -> None:
        """Measure a candidate in a fresh process, or take the same run of a killed conductor."""
        self._end_process()
        launched = BestLaunched(run_id="", role=decision.step.action, candidate=number, knob=decision.step.knob)
        if decision.step.action == "limit":
            plan = self._plan_of(number, under_memory_limit=True, steps=LIMIT_STEPS, timing_warmup=1)
        else:
            steps = self._cold_steps() or UNTIMED_COLD_STEPS + decision.step_rule.most
            plan = self._plan_of(number, steps=steps, timing_warmup=UNTIMED_COLD_STEPS)
            plan = with_predicted_speed(plan, self._home)
        directory = self._orphans.adopt_cold_run(plan)
        if directory is None:
            directory = self._start(plan, COLD, launched)
        else:
            self._write(msgspec.structs.replace(launched, run_id=directory.name))
        self._follow(launched, directory)

    def _cold_steps(self) -> int | None:
        """Steps of the search's cold runs so far: losses compare after equally many; None before the first."""
        first = next((line for line in self._lines if isinstance(line, ColdRun) and line.role != "limit"), None)
        run = None if first is None else read_run_file(self._home.directory(first.run_id))
        return None if run is None else int(run.knobs["steps"])

    def _follow(self, launched: BestLaunched, directory: Path) -> None:
        """Wait for the end of a cold run and record it."""
        self._live = directory
        result = wait_for_result(directory, self._raise_if_cancelled)
        self._live = None
        if result.state in ("stopped", "killed"):
            raise Interrupted
        # Others take no memory from a run under its own limit: that it fits counts, whatever its speed.
        keep_disturbed = launched.role == "limit" or is_usually_disturbed(self._lines, launched.candidate)
        knobs = self._space.candidates[launched.candidate].knobs
        self._write(cold_run_of(launched, directory, result, knobs, keep_disturbed=keep_disturbed))

    def _record_end(self, number: int, result: Result, seconds: float) -> None:
        """Record a trial whose process ended without an answer."""
        if result.state in ("stopped", "killed"):
            raise Interrupted
        outcome = {"oom": "oom", "lost": "void"}.get(result.state, "failed")
        failure = oom_failure(result) if outcome == "oom" else Failure(f"{result.state}: {result.reason}")
        self._record_failure(number, result.run_id, outcome, failure, seconds)

    def _record_failure(self, number: int, run_id: str, outcome: str, why: Failure, seconds: float = 0.0) -> None:
        self._write(
            Trial(
                candidate=number,
                run_id=run_id,
                outcome=outcome,
                warm=False,
                samples_per_step=self._space.candidates[number].samples_per_step,
                seconds=seconds,
                reason=why.words,
                missing_bytes=why.missing_bytes,
            )
        )

    def _record_orders(self) -> None:
        """Record the orders that a person gave since the last step."""
        recorded = sum(isinstance(line, Ordered) for line in self._lines)
        for order in read_orders(self._directory)[recorded:]:
            self._write(Ordered(do=order.do, knob=order.knob, value=order.value, candidate=order.candidate))

    def _state(self) -> BestState:
        warm = None if self._process is None else self._process.directory.name
        spent_s = worked_seconds(self._lines)
        self._previous_state = state_of_best_journal(self._lines, spent_s, warm, self._previous_state)
        return self._previous_state

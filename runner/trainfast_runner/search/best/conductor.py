"""The parts that the best-fit searches of presets and scripts share: steps, cold runs, instructions and the end."""

from __future__ import annotations

import dataclasses
import time
from abc import abstractmethod
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.roles import COLD
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.best.choose.answer import answer_of, answer_so_far
from trainfast_runner.search.best.choose.decide import BestDecision, decide
from trainfast_runner.search.best.choose.state import BestState, state_of_best_journal
from trainfast_runner.search.best.disturbances import is_usually_disturbed
from trainfast_runner.search.best.measure.cold_run_record import UNTIMED_COLD_STEPS, cold_run_of
from trainfast_runner.search.best.orphaned_best_runs import OrphanedBestRuns
from trainfast_runner.search.best.person_instructions import read_instructions
from trainfast_runner.search.best.planning.baseline_cost import budget_error
from trainfast_runner.search.best.planning.best_plan import BestPlan
from trainfast_runner.search.best.too_large import Failure, closest_to_fit
from trainfast_runner.search.conducting.conductor import Conductor, SearchCaller
from trainfast_runner.search.journal.best import (
    UNDER_LIMIT,
    AttemptOutcome,
    BestEnded,
    BestLaunched,
    BestLine,
    BestQuestion,
    ColdRun,
    Instruction,
    Space,
    Trial,
    read_best_journal,
)
from trainfast_runner.search.journal.lines import EndState, worked_seconds
from trainfast_runner.search.options import SearchOptions
from trainfast_runner.search.speed.device_speed_model import with_predicted_speed
from trainfast_runner.settings.knob_values import KnobValue

LIMIT_STEPS = 4
"""Steps of a run under the real `memory_limit`: the optimizer's states exist from the second on."""


class BestConductor(Conductor[BestLine, BestEnded]):
    """Conducts a best-fit search: trials, then cold runs.

    The candidates of a preset and of a script are tried in different ways: `preset_conductor`, `script_conductor`.
    """

    def __init__(
        self,
        directory: Path,
        best_plan: BestPlan,
        home: Home,
        options: SearchOptions,
        caller: SearchCaller[BestLine],
    ) -> None:
        super().__init__(directory, best_plan.plan, home, read_best_journal(directory), options, caller)
        self._question = next(line for line in self._lines if isinstance(line, BestQuestion))
        self._survey = best_plan.survey
        self._space = best_plan.space
        self._orphans = OrphanedBestRuns(home, directory.name, self._lines)
        self._previous_state: BestState | None = None

    @abstractmethod
    def list_candidates(self) -> None:
        """Write the candidates before the first trial, with all their known figures."""

    @abstractmethod
    def try_candidate(self, decision: BestDecision, number: int) -> None:
        """Measure a candidate in a trial and write the outcome."""

    def update_candidates(self) -> None:
        """Write the candidates again if trials changed their known figures. Does nothing for a preset."""

    def end_line(self, state: EndState, reason: str) -> BestEnded:
        """Return an end with the best answer so far, if anything was measured."""
        has_answer = state == "cancelled" and any(isinstance(line, Space) for line in self._lines)
        return BestEnded(state=state, reason=reason, answer=answer_so_far(self._lines) if has_answer else None)

    def open(self) -> None:
        """Take over the runs of an earlier conductor, and list the candidates with their predictions."""
        self._orphans.end_trying_runs()
        recorded_space = newest(self._lines, Space)
        if recorded_space is not None:
            self._space = recorded_space
        for launch_line, directory in self._orphans.cold_runs():
            self._follow(launch_line, directory)
        if recorded_space is None:
            self.list_candidates()
        else:
            self.update_candidates()

    def step(self) -> BestEnded | None:
        """Decide and take one step."""
        self._check_budget()
        self._record_instructions()
        decision = decide(self._state())
        step = decision.step
        self._write(step)
        if step.action == "end":
            return self._decided_end(decision)
        assert step.candidate_number is not None
        if step.action == "trial":
            self.try_candidate(decision, step.candidate_number)
        else:
            self._take_cold_run(decision, step.candidate_number)
        return None

    def _check_budget(self) -> None:
        """Raise UserError if the baseline's trial took longer than the budget, unless other processes disturbed it."""
        first_trial = next((line for line in self._lines if isinstance(line, Trial)), None)
        if (
            first_trial is None
            or first_trial.outcome == "void"
            or first_trial.candidate_number != self._space.baseline_number
        ):
            return
        cost_s = worked_seconds(self._lines[: self._lines.index(first_trial) + 1])
        if cost_s > self._question.budget_s:
            raise budget_error(self._question.budget_s, cost_s, f", which took {cost_s:.1f} s")

    def _decided_end(self, decision: BestDecision) -> BestEnded:
        """Return the end: the answer, or the smallest excess if nothing fits."""
        assert decision.end_state is not None, "a decision to end has its state"
        self._runs.end_process()
        excess_bytes = [
            candidate.excess_bytes for candidate in self._space.candidates if candidate.excess_bytes is not None
        ]
        reason = decision.step.why
        if decision.end_state == "nothing_fits" and not excess_bytes:
            reason += f": {closest_to_fit(self._state().ruled_out.values()).reason}"
        return BestEnded(
            state=decision.end_state,
            reason=reason,
            stopped_because=decision.step.why,
            answer=answer_of(self._state()) if decision.end_state == "answered" else None,
            missing_bytes=min(excess_bytes, default=None) if decision.end_state == "nothing_fits" else None,
        )

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
            self._record_failure(number, "", "failed", Failure(error.line_without_option()))
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
            steps = self._cold_steps() or UNTIMED_COLD_STEPS + decision.step_rule.max_steps
            plan = self._plan_of(number, steps=steps, timing_warmup=UNTIMED_COLD_STEPS)
            plan = with_predicted_speed(plan, self._home)
        directory = self._orphans.adopt_measuring_run(plan) or self._runs.start(plan, COLD)
        self._follow(self._record_launch(directory, step.action, number, step.knob), directory)

    def _cold_steps(self) -> int | None:
        """Steps of the search's cold runs so far: losses compare after equally many; None before the first."""
        first_run = next((line for line in self._lines if isinstance(line, ColdRun) and line.role != UNDER_LIMIT), None)
        run = None if first_run is None else read_run_file(self._home.directory(first_run.run_id))
        return None if run is None else int(run.knobs["steps"])

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
        self, number: int, run_id: str, outcome: AttemptOutcome, failure: Failure, seconds: float = 0.0
    ) -> None:
        self._write(
            Trial(
                candidate_number=number,
                run_id=run_id,
                outcome=outcome,
                warm=False,
                samples_per_step=self._space.candidates[number].samples_per_step,
                seconds=seconds,
                reason=failure.reason,
                missing_bytes=failure.missing_bytes,
            )
        )

    def _record_instructions(self) -> None:
        """Record the instructions that a person gave since the last step."""
        recorded_count = sum(isinstance(line, Instruction) for line in self._lines)
        for instruction in read_instructions(self._directory)[recorded_count:]:
            self._write(msgspec.structs.replace(instruction, t_ns=time.monotonic_ns()))

    def _state(self) -> BestState:
        warm_run_id = None if self._runs.process is None else self._runs.process.directory.name
        spent_s = worked_seconds(self._lines)
        self._previous_state = state_of_best_journal(self._lines, spent_s, warm_run_id, self._previous_state)
        return self._previous_state

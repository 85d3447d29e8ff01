"""Take the steps of a batch search that `decide` chooses, record each outcome, and end every process."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

import msgspec

from trainfast_runner.records.home import Home
from trainfast_runner.running import planning
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.batch.answer import answer_of
from trainfast_runner.search.batch.batch_plan import BatchPlan
from trainfast_runner.search.batch.decide import decide
from trainfast_runner.search.batch.probe_record import confirmation_record
from trainfast_runner.search.batch.state import BatchState, state_of_batch_journal
from trainfast_runner.search.conducting.conductor import Conductor, SearchCaller
from trainfast_runner.search.conducting.orphaned_runs import OrphanedRuns
from trainfast_runner.search.journal.batch import (
    CONFIRM_STEP,
    BatchEnded,
    BatchLaunched,
    BatchLine,
    BatchQuestion,
    ConfirmationRun,
    Predicted,
    Probe,
    RankPeaks,
    read_batch_journal,
)
from trainfast_runner.search.journal.lines import Conducted, EndState
from trainfast_runner.search.memory.limits import with_limits
from trainfast_runner.search.options import BatchSearchOptions
from trainfast_runner.worker.shared.search_roles import CONFIRMATION, PROBE

UNTIMED_CONFIRMATION_STEPS = 3
"""Steps of a confirmation run before the timed ones; fewer where that would leave none."""


class BatchConductor(Conductor[BatchLine, BatchEnded]):
    """Conducts a batch search: tries sizes, and confirms the largest that fits in a fresh process.

    A preset's sizes and a script's are tried in different ways: `preset_conductor`, `script_conductor`.
    """

    _options: BatchSearchOptions
    """The options with those of batch searches alone."""

    def __init__(
        self,
        directory: Path,
        batch_plan: BatchPlan,
        home: Home,
        options: BatchSearchOptions,
        caller: SearchCaller[BatchLine],
    ) -> None:
        lines = read_batch_journal(directory)
        question = next(line for line in lines if isinstance(line, BatchQuestion))
        plan = with_limits(on_gpus(batch_plan.plan, question.device_uuids), tuple(question.limits_bytes))
        super().__init__(directory, plan, home, lines, options, caller)
        self._plan_script_run = batch_plan.plan_script_run
        recorded = {line.run_id for line in lines if isinstance(line, Probe | ConfirmationRun)}
        self._orphans = OrphanedRuns(home, directory.name, recorded, PROBE, CONFIRMATION, is_new=len(lines) == 1)

    @abstractmethod
    def predict(self) -> None:
        """Write the `Predicted` line from which the first size is chosen."""

    @abstractmethod
    def probe(self, batch_size: int) -> BatchEnded | None:
        """Try one size and write its `Probe`; return the end if nothing more can be tried."""

    @abstractmethod
    def plan_size(self, batch_size: int, steps: int, timing_warmup: int) -> RunPlan:
        """Plan an ordinary run of one size."""

    @abstractmethod
    def nothing_fits(self, reason: str) -> BatchEnded:
        """Return the end of a search in which a batch of 1 does not fit."""

    @abstractmethod
    def confirmed_peaks(self, directory: Path) -> list[RankPeaks]:
        """Return the highest peaks of each rank of a confirmation run."""

    def conducted_line(self, conducted: Conducted) -> Conducted:
        """Return the line with this search's options."""
        return msgspec.structs.replace(
            conducted, no_oom=self._options.no_oom, confirmation_steps=self._options.confirmation_steps
        )

    def open(self) -> None:
        """End an orphaned process and predict the largest size."""
        self._orphans.end_trying_runs()
        if not any(isinstance(line, (Predicted, Probe)) for line in self._lines):
            self.predict()

    def step(self) -> BatchEnded | None:
        """Decide and take one step."""
        decision = decide(self._state())
        step = decision.step
        self._write(step)
        if step.action == "probe" and step.batch_size is not None:
            return self.probe(step.batch_size)
        self._runs.end_process()
        if step.action == CONFIRM_STEP and step.batch_size is not None:
            self._confirm(step.batch_size)
            return None
        assert decision.end_state is not None, "a decision to end has its state"
        if decision.end_state == "nothing_fits":
            return self.nothing_fits(step.why)
        answer = answer_of(self._state()) if decision.end_state == "answered" else None
        return BatchEnded(state=decision.end_state, reason=step.why, answer=answer)

    def end_line(self, state: EndState, reason: str) -> BatchEnded:
        """Return an end without an answer."""
        return BatchEnded(state=state, reason=reason)

    def _confirm(self, batch_size: int) -> None:
        """Make the confirmation run, a normal run with data, or adopt that of a killed conductor."""
        began_s, steps = self._runs.clock_s(), self._options.confirmation_steps
        plan = self.plan_size(batch_size, steps, min(UNTIMED_CONFIRMATION_STEPS, steps - 1))
        directory = self._adopt_confirmation(plan) or self._start(plan, CONFIRMATION)
        result = self._runs.wait_for_end(directory)
        ranks = self.confirmed_peaks(directory)
        seconds = self._runs.clock_s() - began_s
        self._write(confirmation_record(self._state(), ranks, result, batch_size, seconds))

    def _start(self, plan: RunPlan, role: str) -> Path:
        return self._record_launch(self._runs.start(plan, role), role)

    def _record_launch(self, directory: Path, role: str) -> Path:
        """Write that a run was started, or taken over, and return its directory."""
        self._write(BatchLaunched(run_id=directory.name, role=role))
        return directory

    def _adopt_confirmation(self, plan: RunPlan) -> Path | None:
        """Return the plan's run of a killed conductor, its launch recorded; None without one."""
        adopted_run = self._orphans.adopt_measuring_run(plan)
        launched_run_ids = {line.run_id for line in self._lines if isinstance(line, BatchLaunched)}
        if adopted_run is not None and adopted_run.name not in launched_run_ids:
            self._record_launch(adopted_run, CONFIRMATION)
        return adopted_run

    def _state(self) -> BatchState:
        return state_of_batch_journal(self._lines, no_oom=self._options.no_oom)


def on_gpus(plan: RunPlan, uuids: list[str]) -> RunPlan:
    """Return a preset's plan on these GPUs, even if others are freer now; a script's plan unchanged.

    Raises UserError if one of the GPUs is gone.
    """
    # A journal of a search on the CPU names none.
    if plan.script is not None or not uuids or plan.device_uuids == uuids:
        return plan
    return planning.plan_run(plan.spec, plan.python, uuids)

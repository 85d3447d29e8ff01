"""Try the candidates of a preset in warm processes: one process for all candidates with the same process knobs."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Result
from trainfast_runner.search.best.choose.decide import BestDecision
from trainfast_runner.search.best.conductor import BestConductor
from trainfast_runner.search.best.disturbances import is_usually_disturbed
from trainfast_runner.search.best.measure.trial import WantedTrial, take_trial
from trainfast_runner.search.best.objective import seq_len_of
from trainfast_runner.search.best.planning.best_plan import BestPlan
from trainfast_runner.search.best.survey.flops_bounds import ceiling_here, flops_of, with_bounds
from trainfast_runner.search.best.survey.model_survey import ModelSurvey
from trainfast_runner.search.best.too_large import Failure, oom_failure
from trainfast_runner.search.candidate_spec import candidate_spec, takes_warm_trials
from trainfast_runner.search.conducting.conductor import SearchCaller
from trainfast_runner.search.conducting.run_ends import raise_if_stopped
from trainfast_runner.search.conducting.waiting import wait_until
from trainfast_runner.search.conducting.warm_process import WarmProcess
from trainfast_runner.search.journal.best import (
    AttemptOutcome,
    BestLine,
    Candidate,
    ProcessReady,
    Trial,
)
from trainfast_runner.search.options import SearchOptions
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.worker.shared.search_roles import TRIAL

PREDICTIONS_WAIT_S = 30.0
"""The first trial, its process ready, waits for predictions at most this long; no trace runs beside a trial."""
OUTCOME_OF_END_STATE: Mapping[str, AttemptOutcome] = {"oom": "oom", "lost": "void"}
"""Outcome of a trial by the state in which its process ended without an answer; any other state is a failure."""


class PresetBestConductor(BestConductor):
    """Conducts the best-fit search of a preset."""

    _survey: ModelSurvey
    """`conduct_best` gives this class only plans that have one."""

    def __init__(
        self,
        directory: Path,
        best_plan: BestPlan,
        home: Home,
        options: SearchOptions,
        caller: SearchCaller[BestLine],
    ) -> None:
        super().__init__(directory, best_plan, home, options, caller)
        self._ceiling = ceiling_here(home, best_plan.plan)
        self._process_knobs: KnobValues = {}
        self._process_uuids: list[str] = []

    def list_candidates(self) -> None:
        """Trace and predict while the baseline's process starts, then write the candidates.

        They come before the first trial, but after the record of a baseline's process that ended while it started.
        """
        cancelled = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            prediction = pool.submit(self._survey.predict_candidates, self._question, cancelled)
            try:
                self._process_for(self._space.baseline_number)
                wait_until(prediction.done, self._raise_if_cancelled, time.monotonic() + PREDICTIONS_WAIT_S)
            finally:
                cancelled.set()
        self._space = prediction.result()
        self._write(self._space)

    def try_candidate(self, decision: BestDecision, number: int) -> None:
        """Measure a candidate in the warm process of its process knobs, or in a new one."""
        if decision.needs_new_process:
            self._runs.end_process()
        process = self._process_for(number)
        if process is None:
            return
        candidate = self._space.candidates[number]
        began_s = self._runs.clock_s()
        knobs = {name: value for name, value in candidate.knobs.items() if name not in candidate.process_knobs}
        wanted = WantedTrial(
            candidate_number=number,
            knobs=knobs,
            samples_per_step=candidate.samples_per_step,
            rule=decision.step_rule,
            needs_energy=self._question.objective == "samples_per_joule",
            keep_disturbed=is_usually_disturbed(self._lines, number),
            is_warm=any(isinstance(line, Trial) and line.run_id == process.directory.name for line in self._lines),
            repeats=decision.step.repeats,
        )
        trial = take_trial(process, self._process_uuids, wanted)
        if trial is None:
            self._record_end(number, self._runs.wait_for_process_end(), self._runs.clock_s() - began_s)
            return
        self._write(trial)
        if trial.step_ms:  # the setting took a step, with which its FLOPs are recorded
            self._add_flops_bounds(process, candidate)
        if process.ended_by_error:
            self._runs.wait_for_process_end()
        elif not takes_warm_trials(candidate_spec(self._survey.spec, candidate.knobs).knobs):
            self._runs.end_process()

    def _add_flops_bounds(self, process: WarmProcess, tried: Candidate) -> None:
        """Add the bounds by FLOPs to the candidates, once a process has counted the FLOPs of a tried one."""
        if self._ceiling is None or any(candidate.least_s_per_sample for candidate in self._space.candidates):
            return
        if (flops := flops_of(process.directory)) is not None:
            seq_len = seq_len_of(self._question, tried)
            self._space = with_bounds(self._space, self._survey, flops, seq_len, self._ceiling)
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
        self._record_failure(number, result.run_id, outcome, failure, seconds)

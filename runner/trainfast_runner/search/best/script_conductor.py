"""Try the candidates of a user's own script: every candidate in its own run, because a script has no warm process."""

from __future__ import annotations

from trainfast_runner.results.start_time import read_start_s
from trainfast_runner.search.best.choose.decide import BestDecision
from trainfast_runner.search.best.conductor import BestConductor
from trainfast_runner.search.best.disturbances import is_usually_disturbed
from trainfast_runner.search.best.measure.trial_record import trial_of_run, with_checked_samples
from trainfast_runner.search.best.step_rule import UNTIMED_TRIAL_STEPS
from trainfast_runner.search.best.survey.script_survey import ScriptSurvey
from trainfast_runner.search.journal.best import ProcessReady, Trial
from trainfast_runner.search.speed.trial_rates import steps_for
from trainfast_runner.worker.shared.search_roles import TRIAL


class ScriptBestConductor(BestConductor):
    """Conducts the best-fit search of a script."""

    _survey: ScriptSurvey
    """`conduct_best` gives this class only plans that have one."""

    def list_candidates(self) -> None:
        """Write the candidates; their memory is unknown before two trials of like settings."""
        self._write(self._space)

    def try_candidate(self, decision: BestDecision, number: int) -> None:
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
        self.update_candidates()

    def update_candidates(self) -> None:
        """Write the candidates again if trials changed their known figures, also trials of a killed conductor."""
        updated = self._survey.predict_from_trials(self._question, self._space, self._lines)
        if updated != self._space:
            self._space = updated
            self._write(updated)

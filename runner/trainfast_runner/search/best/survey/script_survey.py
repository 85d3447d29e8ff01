"""The survey of a script's preset: every trial is a run of its own in a sandbox.

The script's memory is unknown before the first trial, whose step is traced; its FLOPs stay unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import Machine
from trainfast_runner.machine.devices_knob import CPU
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.best.survey.base import Survey
from trainfast_runner.search.best.survey.script_memory import with_fitted_memory, with_seen_samples
from trainfast_runner.search.journal.best import BestLine, BestQuestion, Candidate, Space, Trial
from trainfast_runner.search.script_runs import ScriptPlanner, with_trace
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.settings.scripts.script_preset import ScriptPreset
from trainfast_runner.settings.scripts.script_reach import LAUNCH_KNOBS
from trainfast_runner.settings.spec import RunSpec


class ScriptSurvey(Survey):
    """The survey of a script. Its `spec` has the defaults of knobs that the preset does not name."""

    def __init__(self, preset: ScriptPreset, plan: RunPlan, machine: Machine, plan_script_run: ScriptPlanner) -> None:
        named_knobs = {name: value for name, value in plan.spec.knobs.items() if name not in LAUNCH_KNOBS}
        # The ranks of a script's launcher share its global batch as those of ddp do.
        ranks: KnobValues = {"strategy": "single", "devices": None}
        if plan.world_size > 1:
            devices: KnobValue = plan.world_size if plan.device != CPU else f"{CPU}:{plan.world_size}"
            ranks = {"strategy": "ddp", "devices": devices}
        super().__init__(dataclasses.replace(plan.spec, knobs={**defaults(), **named_knobs, **ranks}), plan, machine)
        self.named = tuple(named_knobs)
        """The knobs whose present value the preset or a setting names."""
        self._preset, self._plan_script_run = preset, plan_script_run

    def refuse(self, spec: RunSpec) -> UserError | None:
        """Return the error of a value that cannot be passed to the script, or that nothing can confirm; else None."""
        flag_words = self._preset.flag_words
        if spec.knobs["precision"] == "tf32" and "precision" not in flag_words:
            return UserError("nothing in a script shows that tf32 ran", key="precision")
        try:
            self._preset.applied(list(self._preset.command), {name: spec.knobs[name] for name in self.named})
        except UserError as error:
            return error
        return None

    def plan_of(
        self, question: BestQuestion, candidate: Candidate, *, under_memory_limit: bool = False, **knobs: KnobValue
    ) -> RunPlan:
        """Return the plan of a candidate's trial, which is always under the search's limit. Raises UserError."""
        plan = self._plan_script_run({**candidate.knobs, **knobs})
        return dataclasses.replace(plan, memory_limit_bytes=tuple(question.limits_bytes) or None)

    def space(self, question: BestQuestion) -> Space:
        """Return the candidates, each in a process of its own. Raises UserError as `enumerate_space`."""
        space = super().space(question)
        alone = [
            msgspec.structs.replace(candidate, process_knobs=dict(candidate.knobs)) for candidate in space.candidates
        ]
        return msgspec.structs.replace(space, candidates=alone)

    def with_trace_if_unknown(self, plan: RunPlan, space: Space, number: int, lines: Sequence[BestLine]) -> RunPlan:
        """Return the plan, with a trace of its step unless this candidate's memory is known."""
        candidate = space.candidates[number]
        is_tried = any(isinstance(line, Trial) and line.candidate_number == number for line in lines)
        is_known = candidate.predicted_bytes is not None or "batch_size" not in candidate.knobs
        return plan if is_tried or is_known else with_trace(plan)

    def predict_from_trials(self, question: BestQuestion, space: Space, lines: Sequence[BestLine]) -> Space:
        """Return the candidates with the samples of a step that the first trial saw, and memory by the trials."""
        trials = [line for line in lines if isinstance(line, Trial) and line.outcome == "measured"]
        if not trials:
            return space
        space = with_seen_samples(space, trials[0])
        return with_fitted_memory(space, trials, question.lowest_limit_bytes, self.plan.device)

"""The survey of a script's preset: every trial is a run of its own in a sandbox.

Its memory is unknown until two batch sizes were tried with like settings; its FLOPs stay unknown.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import Machine
from trainfast_runner.machine.devices_knob import CPU
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.best.candidates import with_predictions
from trainfast_runner.search.best.survey.base import Survey
from trainfast_runner.search.candidate_spec import BATCH_KNOBS
from trainfast_runner.search.journal.best import BestLine, BestQuestion, Candidate, Space, Trial
from trainfast_runner.search.memory.fit_lines import SCRIPT_PHASE, fit_lines
from trainfast_runner.search.script_runs import ScriptPlanner
from trainfast_runner.search.speed.process_starts import KnobsKey, knobs_key
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.settings.scripts.script_preset import ScriptPreset
from trainfast_runner.settings.scripts.script_reach import LAUNCH_KNOBS
from trainfast_runner.settings.spec import RunSpec

MIN_SIZES = 2
"""Batch sizes that a line needs."""


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

    def predict_from_trials(self, question: BestQuestion, space: Space, lines: Sequence[BestLine]) -> Space:
        """Return the candidates with the samples of a step that the first trial saw, and memory by the trials."""
        trials = [line for line in lines if isinstance(line, Trial) and line.outcome == "measured"]
        if not trials:
            return space
        space = with_seen_samples(space, trials[0])
        return with_fitted_memory(space, trials, question.lowest_limit_bytes, self.plan.device)


def with_fitted_memory(space: Space, trials: Iterable[Trial], limit_bytes: int | None, device: str) -> Space:
    """Return the space with the memory of candidates that differ only in the batch from two tried candidates or more.

    Candidates that need more than the limit, with the error of the line for them, are ruled out.
    """
    peaks_by_knobs: dict[KnobsKey, dict[int, dict[str, int]]] = defaultdict(dict)
    for trial in trials:
        candidate = space.candidates[trial.candidate_number]
        if trial.peak_allocated_bytes is not None and "batch_size" in candidate.knobs:
            peaks = {SCRIPT_PHASE: trial.peak_allocated_bytes}
            peaks_by_knobs[_knobs_but_batch(candidate)].setdefault(candidate.batch_size, peaks)
    needed_bytes: dict[int, int] = {}
    limits_bytes: dict[int, int] = {}
    for number, candidate in enumerate(space.candidates):
        peaks_by_size = peaks_by_knobs.get(_knobs_but_batch(candidate), {})
        is_known = candidate.batch_size in peaks_by_size or candidate.excluded_as is not None
        if is_known or len(peaks_by_size) < MIN_SIZES:
            continue
        fit = fit_lines(peaks_by_size, device)
        need_bytes = fit.need_bytes(candidate.batch_size)
        needed_bytes[number] = round(need_bytes)
        if limit_bytes is not None and need_bytes - fit.error_at(candidate.batch_size) > limit_bytes:
            limits_bytes[number] = limit_bytes
    return with_predictions(space, needed_bytes, limits_bytes.get)


def with_seen_samples(space: Space, trial: Trial) -> Space:
    """Return the space with the samples of a step as a trial saw them: a script may accumulate by itself."""
    asked_samples = space.candidates[trial.candidate_number].samples_per_step
    if trial.samples_per_step in (0, asked_samples):
        return space
    candidates = [
        msgspec.structs.replace(
            candidate, samples_per_step=max(1, candidate.samples_per_step * trial.samples_per_step // asked_samples)
        )
        for candidate in space.candidates
    ]
    return msgspec.structs.replace(space, candidates=candidates)


def _knobs_but_batch(candidate: Candidate) -> KnobsKey:
    """Return the knobs other than batch and accumulation, as a key."""
    return knobs_key({name: value for name, value in candidate.knobs.items() if name not in BATCH_KNOBS})

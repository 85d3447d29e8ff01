"""The survey of a best-fit search: checks and plans its candidates, of a preset's model or of a script."""

from __future__ import annotations

import dataclasses
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError, lowest
from trainfast_runner.machine import training_python
from trainfast_runner.machine.calibration import Ceiling, read
from trainfast_runner.machine.cpu import cpu_name
from trainfast_runner.machine.devices import Machine, detect_machine
from trainfast_runner.machine.devices_knob import CPU
from trainfast_runner.machine.resource_limits import read_host_free_bytes
from trainfast_runner.machine.training_python import ProgramCancelled
from trainfast_runner.memory.sharding import PREDICTED_STRATEGIES
from trainfast_runner.memory.tracing import cached_models, trace_models
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_records import read_worker_lines
from trainfast_runner.records.worker_lines import ActualLine
from trainfast_runner.running import planning
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.best.candidates import enumerate_space, with_predictions
from trainfast_runner.search.best_journal import BestLine, BestQuestion, Candidate, Space, Trial
from trainfast_runner.search.fitted_memory import SCRIPT_PHASE, fit_lines, share_of_free
from trainfast_runner.search.searches import BATCH_KNOBS, KnobsKey, ScriptPlanner, candidate_spec, knobs_key
from trainfast_runner.settings.compatibility import Facts, check
from trainfast_runner.settings.device_counts import device_count
from trainfast_runner.settings.knob_values import KnobValue, KnobValues
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.settings.precisions import peak_precision
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.script_reach import LAUNCH_KNOBS
from trainfast_runner.settings.spec import RunSpec


class Survey(ABC):
    """Checks and plans the candidates of one search on this machine.

    `spec` are the settings that the search varies, `plan` is the plan of the preset's own run, which has the preset's
    batch also where `--global-batch` gives the baseline another.
    """

    has_batch = True
    """True if the present batch and accumulation are known."""

    def __init__(self, spec: RunSpec, plan: RunPlan, machine: Machine) -> None:
        self.spec, self.plan, self.machine = spec, plan, machine

    @abstractmethod
    def refuse(self, spec: RunSpec) -> UserError | None:
        """Return the error of a run that cannot start here; None when it can."""

    @abstractmethod
    def plan_of(
        self, question: BestQuestion, candidate: Candidate, *, under_memory_limit: bool = False, **knobs: KnobValue
    ) -> RunPlan:
        """Return the plan of a candidate's run with further knobs, its own limit or none. Raises UserError."""

    def space(self, question: BestQuestion) -> Space:
        """Return the candidates, their memory unpredicted. Raises UserError as `enumerate_space`."""
        return enumerate_space(self.spec, self.machine, question.vary, question.global_batch, self.refuse)

    def legal_specs(self, space: Space) -> dict[int, RunSpec]:
        """Return the run of each candidate that is not ruled out, by its number."""
        return {
            number: candidate_spec(self.spec, candidate.knobs)
            for number, candidate in enumerate(space.candidates)
            if candidate.excluded_as is None
        }


ABOVE_CEILING = 1.1
"""A training may be faster than the calibration by this factor: a boost clock, or a CPU shared while calibrating."""


def with_bounds(space: Space, survey: Survey, flops: float, seq_len: int, ceiling: Ceiling) -> Space:
    """Return the space with the least seconds of a sample, for candidates of a calibrated precision.

    `flops` are the model's of one sample of `seq_len` tokens: candidates of another length get no bound. Recomputation
    under checkpointing only adds FLOPs, so the bound still holds.
    """
    candidates = list(space.candidates)
    for number, spec in survey.legal_specs(space).items():
        tflops = ceiling.tflops.get(peak_precision(str(spec.knobs["precision"])))
        if tflops and spec.knobs["seq_len"] == seq_len:
            # The ranks of a CPU run share its cores.
            devices = device_count(spec, survey.machine) if ceiling.device == "cuda" else 1
            least_s = flops / (ABOVE_CEILING * tflops * 1e12 * devices)
            candidates[number] = msgspec.structs.replace(candidates[number], least_s_per_sample=least_s)
    return msgspec.structs.replace(space, candidates=candidates)


def flops_of(directory: Path) -> float | None:
    """Return the model's FLOPs of a sample as last counted by a run's first rank; None before the count."""
    lines = [line for line in read_worker_lines(directory).get(0, []) if isinstance(line, ActualLine)]
    return next((line.model_flops_per_sample for line in reversed(lines) if line.model_flops_per_sample), None)


def ceiling_here(home: Home, plan: RunPlan) -> Ceiling | None:
    """Return the ceiling of the plan's device; None without an undisturbed calibration."""
    ceiling = read(home).get(next(iter(plan.device_names), "") if plan.device == "cuda" else cpu_name())
    return None if ceiling is None or ceiling.disturbed else ceiling


ASKS_THE_MODEL = ("sdpa", "flash")
"""Values of `attention` that only the model's class can confirm, which takes an import of torch."""


class ModelSurvey(Survey):
    """The survey of a preset: which candidates its compatibility rules refuse, and which are too large."""

    def __init__(self, spec: RunSpec, plan: RunPlan) -> None:
        inspected = training_python.inspect(plan.python, spec.model, spec.data["objective"])
        machine = detect_machine(inspected.versions).used_by(spec.knobs["devices"])
        super().__init__(spec, plan, machine)
        self._facts = Facts(spec, machine, inspected.config, inspected.versions, inspected.executable)

    def refuse(self, spec: RunSpec) -> UserError | None:
        """Return the error of a run that cannot start here; None when it can."""
        try:
            check(replace(self._facts, spec=spec))
        except UserError as error:
            return error
        return None

    def plan_of(
        self, question: BestQuestion, candidate: Candidate, *, under_memory_limit: bool = False, **knobs: KnobValue
    ) -> RunPlan:
        """Return the plan of a candidate's run with further knobs, its own limit or none. Raises UserError."""
        limit = self.spec.knobs["memory_limit"] if under_memory_limit else None
        spec = candidate_spec(self.spec, candidate.knobs).with_overrides(memory_limit=limit, **knobs)
        # Every process takes the same GPUs, even if others have more free memory by now.
        uuids = question.device_uuids
        return planning.plan_run(spec, self.plan.python, uuids[: device_count(spec, self.machine)] if uuids else ())

    def predict_candidates(self, question: BestQuestion, cancelled: threading.Event) -> Space:
        """Return the candidates with their predicted memory; models are traced until `cancelled` is set."""
        self._ask_attentions(question)
        space = self.space(question)
        self._trace(space, cancelled)
        return self._predicted(space)

    def _ask_attentions(self, question: BestQuestion) -> None:
        """Learn which attention kernels the model has, if a candidate names one: some seconds the first time."""
        values = question.vary.get("attention", [self.spec.knobs["attention"]])
        if any(value in ASKS_THE_MODEL for value in values):
            training_objective = self.spec.data["objective"]
            inspected = training_python.inspect(self.plan.python, self.spec.model, training_objective, attention=True)
            self._facts = replace(self._facts, attentions=inspected.attentions)

    def _trace(self, space: Space, cancelled: threading.Event) -> None:
        """Trace the memory models that the legal candidates need into the cache, until `cancelled` is set."""
        specs = [spec for spec in self.legal_specs(space).values() if spec.knobs["strategy"] in PREDICTED_STRATEGIES]
        plan = self.plan
        try:
            for _ in trace_models(specs, plan.device, plan.python, cancelled=cancelled, gpus=plan.device_uuids):
                pass  # the model is in the cache now, or cannot be traced
        except (ProgramCancelled, UserError):
            return  # candidates without a model are tried unpredicted

    def _predicted(self, space: Space) -> Space:
        """Return the space with the memory that cached models predict, and without the candidates too large for it."""
        model_of = cached_models(self.plan.device, self.plan.python, next(iter(self.plan.device_names), None))
        needed_bytes: dict[int, int] = {}
        for number, spec in self.legal_specs(space).items():
            model = model_of(spec) if spec.knobs["strategy"] in PREDICTED_STRATEGIES else None
            if model is not None:
                prediction = model.predict(spec, space.candidates[number].world_size)
                needed_bytes[number] = prediction.total_bytes + (prediction.context_bytes or 0)
        return with_predictions(space, needed_bytes, self._limit_of(space))

    def _limit_of(self, space: Space) -> Callable[[int], int | None]:
        """Return a function from a candidate's number to the bytes that each of its ranks may take, None if unknown.

        They are `memory_limit`, else the free memory. On a CPU all ranks of a candidate share the free memory.
        """
        plan = self.plan
        limit_bytes = min(plan.memory_limit_bytes or (), default=None)
        if plan.device == "cpu":
            free_bytes = read_host_free_bytes()

            def host_limit(number: int) -> int:
                ranks = space.candidates[number].world_size
                if limit_bytes is not None and ranks * limit_bytes <= free_bytes:
                    return limit_bytes
                return share_of_free(free_bytes, ranks)

            return host_limit
        gpu_limit = lowest(gpu.memory_free_bytes for gpu in plan.gpus) if limit_bytes is None else limit_bytes
        return lambda number: gpu_limit


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
        self.has_batch = all(name in self.named for name in BATCH_KNOBS)
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

"""The candidates of a best-fit search: combinations of knobs with one global batch, legal or refused, and their memory.

A survey checks and plans them on this machine: `ModelSurvey` for a preset's model, `ScriptSurvey` for a user's script.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal, NamedTuple

import msgspec

from trainfast_runner.errors import UserError, lowest
from trainfast_runner.machine import training_python
from trainfast_runner.machine.calibration import Ceiling
from trainfast_runner.machine.devices import Machine, detect_machine
from trainfast_runner.machine.devices_knob import CPU
from trainfast_runner.machine.resource_limits import read_host_free_bytes
from trainfast_runner.machine.training_python import ProgramCancelled
from trainfast_runner.memory.oom import asked_and_free
from trainfast_runner.memory.sharding import PREDICTED_STRATEGIES
from trainfast_runner.memory.tracing import cached_models, trace_models
from trainfast_runner.records.result import Result
from trainfast_runner.running import planning
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.best_journal import Attempt, BestLine, BestQuestion, Candidate, Interval, Space, Trial
from trainfast_runner.search.effects import relative_error
from trainfast_runner.search.fitted_memory import share_of_free
from trainfast_runner.search.searches import (
    BATCH_KNOBS,
    MESH_KNOBS,
    ScriptPlanner,
    candidate_spec,
    takes_warm_trials,
)
from trainfast_runner.settings.compatibility import Facts, check
from trainfast_runner.settings.device_counts import data_parallel_degree, device_count, world_size
from trainfast_runner.settings.knob_values import KnobValue, KnobValues, whole_number
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, Vary, combinations_of, defaults, fewest_to_drop
from trainfast_runner.settings.precisions import peak_precision
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.script_reach import LAUNCH_KNOBS
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.units import mebibytes

Refuse = Callable[[RunSpec], UserError | None]
"""Returns the UserError of a run that cannot start here; None when it can."""


def enumerate_space(spec: RunSpec, machine: Machine, vary: Vary, size: int | None, refuse: Refuse) -> Space:
    """Return every combination of the varied values with a global batch of `size`, the baseline among them.

    None leaves the global batch free. Raises UserError for more candidates than `MAX_CANDIDATES`, and for a global
    batch that nothing varied can give.
    """
    global_batch = GlobalBatch(spec, machine, vary, size)
    count = global_batch.count()
    if count > MAX_CANDIDATES:
        raise _too_many_error(count, vary)
    base_knobs = global_batch.baseline_knobs()
    unvaried_batch_knobs = [name for name in BATCH_KNOBS if name not in vary]
    candidate_knob_names = [
        *vary,
        *(name for name in unvaried_batch_knobs if global_batch.derives_knobs or base_knobs[name] != spec.knobs[name]),
    ]
    combinations: list[KnobValues] = []
    dropped_count = 0
    for combination in combinations_of(vary):
        complete = global_batch.complete(combination)
        if complete is None:
            dropped_count += 1
        else:
            combinations.append({name: complete.get(name, base_knobs[name]) for name in candidate_knob_names})
    if not combinations and size is not None:
        raise global_batch.nearest_error()
    baseline = {name: base_knobs[name] for name in candidate_knob_names}
    if baseline not in combinations:
        combinations.insert(0, baseline)
    candidates = [_candidate(spec, machine, global_batch, knobs, refuse) for knobs in combinations]
    return Space(candidates=candidates, baseline_number=combinations.index(baseline), dropped=dropped_count)


def _candidate(
    spec: RunSpec, machine: Machine, global_batch: GlobalBatch, knobs: KnobValues, refuse: Refuse
) -> Candidate:
    run_spec = candidate_spec(spec, knobs)
    refusal = refuse(run_spec)
    batch, accumulation = (whole_number(run_spec.knobs, name) for name in BATCH_KNOBS)
    process_knobs = dict(knobs)
    if takes_warm_trials(run_spec.knobs):
        process_knobs = {name: value for name, value in knobs.items() if KNOBS_BY_NAME[name].needs_process(value)}
    return Candidate(
        knobs=knobs,
        process_knobs=process_knobs,
        world_size=processes_of(run_spec, machine) or 1,
        samples_per_step=batch * accumulation * global_batch.degree(knobs),
        excluded_as=None if refusal is None else "incompatible",
        reason="" if refusal is None else refusal.line_without_option(),
    )


def processes_of(spec: RunSpec, machine: Machine) -> int | None:
    """Return the number of processes of a run; None when the machine has too few devices."""
    try:
        return world_size(spec, machine)
    except UserError:
        return None


def with_predictions(space: Space, bytes_of: Mapping[int, int], limit_of: Callable[[int], int | None]) -> Space:
    """Return the space with the predicted bytes of some candidates (of the fullest rank), and too large ones ruled out.

    `limit_of` returns the bytes that each rank of a candidate may take; a candidate without a limit is not ruled out.
    The baseline is never ruled out: its run shows the error of the prediction.
    """
    candidates = list(space.candidates)
    for number, needed_bytes in bytes_of.items():
        candidate = candidates[number]
        predicted = msgspec.structs.replace(candidate, predicted_bytes=needed_bytes)
        limit_bytes = limit_of(number)
        if candidate.excluded_as is None and limit_bytes is not None and needed_bytes > limit_bytes:
            excess_bytes = needed_bytes - limit_bytes
            predicted = msgspec.structs.replace(predicted, excess_bytes=excess_bytes)
            if number != space.baseline_number:
                reason = excess_text(needed_bytes, limit_bytes)
                predicted = msgspec.structs.replace(predicted, excluded_as=TOO_LARGE, reason=reason)
        candidates[number] = predicted
    return msgspec.structs.replace(space, candidates=candidates)


def changes_training(candidate: Candidate, baseline: Candidate) -> list[str]:
    """Return the knobs by which a candidate trains differently from the baseline; empty if it trains the same."""
    overridden = [
        name
        for name, value in candidate.knobs.items()
        if name in KNOBS_BY_NAME and not KNOBS_BY_NAME[name].keeps_training(baseline.knobs[name], value)
    ]
    return [*overridden, *(["global batch"] if candidate.samples_per_step != baseline.samples_per_step else [])]


def _too_many_error(count: int, vary: Vary) -> UserError:
    """Return the error about too many candidates: their count, and the fewest knobs to leave out."""
    dropped_knobs, left_count = fewest_to_drop(vary, count, MAX_CANDIDATES)
    text = f"{count:,} candidates are more than {MAX_CANDIDATES:,}"
    return UserError(
        f"{text}; without {' and '.join(dropped_knobs)} there are about {left_count:,}",
        key="--vary",
        advice=f"leaving out {' and '.join(dropped_knobs)}",
        option="leaving out " + " and ".join(f"--vary {name}" for name in dropped_knobs),
    )


MAX_CANDIDATES = 5000
"""A search has at most this many candidates."""
MAX_COUNTED = 1_000_000
"""Up to this many combinations of batch, accumulation and strategy are tested one by one to count candidates."""


def default_global_batch(spec: RunSpec, machine: Machine) -> int:
    """Return the samples of one optimizer step of the preset. Raises UserError when there are too few devices."""
    preset_spec = candidate_spec(spec, {})
    batch, accumulation = (whole_number(preset_spec.knobs, name) for name in BATCH_KNOBS)
    return batch * accumulation * data_parallel_degree(preset_spec.knobs, device_count(preset_spec, machine))


class GlobalBatch:
    """The combinations of varied values that have a global batch of `size`; None leaves it free."""

    def __init__(self, spec: RunSpec, machine: Machine, vary: Vary, size: int | None) -> None:
        self._spec, self._machine, self._vary, self.size = spec, machine, vary, size
        self._degrees: dict[tuple[KnobValue, ...], int] = {}
        self._deciding = {name: values for name, values in vary.items() if name in (*BATCH_KNOBS, *MESH_KNOBS)}
        """The varied knobs on which the global batch depends."""

    @property
    def derives_knobs(self) -> bool:
        """True if the batch or the accumulation of a combination follows from its other knobs."""
        return self.size is not None and bool(self._deciding)

    def degree(self, knobs: Mapping[str, KnobValue]) -> int:
        """Return the data-parallel degree with these knobs; 1 with too few devices, which is refused later."""
        key = tuple(knobs.get(name, self._spec.knobs[name]) for name in MESH_KNOBS)
        if key not in self._degrees:
            run_spec = candidate_spec(self._spec, dict(zip(MESH_KNOBS, key, strict=True)))
            try:
                self._degrees[key] = data_parallel_degree(run_spec.knobs, device_count(run_spec, self._machine))
            except UserError:
                self._degrees[key] = 1
        return self._degrees[key]

    def complete(self, values: KnobValues) -> KnobValues | None:
        """Return a combination with the batch and accumulation of this size; None if it has another global batch."""
        if self.size is None:
            return values
        batch, accumulation = (
            whole_number(values if name in values else self._spec.knobs, name) for name in BATCH_KNOBS
        )
        per_rank, remainder = divmod(self.size, self.degree(values))
        if remainder:
            return None
        if "batch_size" in self._vary and "grad_accum" in self._vary:
            return values if batch * accumulation == per_rank else None
        if "batch_size" in self._vary:
            return None if per_rank % batch else {**values, "grad_accum": per_rank // batch}
        if per_rank % accumulation == 0:
            return {**values, "batch_size": per_rank // accumulation, "grad_accum": accumulation}
        if "grad_accum" in self._vary or per_rank % batch:
            return None
        return {**values, "batch_size": batch, "grad_accum": per_rank // batch}

    def baseline_knobs(self) -> KnobValues:
        """Return the preset's knobs at this size: its batch size, or the next smaller one that divides.

        Raises UserError if the data-parallel degree does not divide the size.
        """
        knobs = self._spec.knobs
        if self.size is None:
            return knobs
        degree = self.degree(knobs)
        per_rank, remainder = divmod(self.size, degree)
        if remainder:
            raise self._impossible_error([size for size in (per_rank * degree, (per_rank + 1) * degree) if size])
        max_batch = min(whole_number(knobs, "batch_size"), per_rank)
        batch = next(size for size in range(max_batch, 0, -1) if per_rank % size == 0)
        return {**knobs, "batch_size": batch, "grad_accum": per_rank // batch}

    def count(self) -> int:
        """Return the number of combinations of this size, without listing them; all of them beyond `MAX_COUNTED`."""
        other_count = math.prod(len(values) for name, values in self._vary.items() if name not in self._deciding)
        combination_count = math.prod(map(len, self._deciding.values()))
        if self.size is None or combination_count > MAX_COUNTED or other_count > MAX_CANDIDATES:
            return other_count * combination_count
        return other_count * len(self._possible)

    def occurring_values(self) -> dict[str, list[KnobValue]]:
        """Return the varied values without those that no combination of this size has."""
        return {
            name: [
                value
                for value in values
                if name not in self._deciding or any(knobs[name] == value for knobs in self._possible)
            ]
            for name, values in self._vary.items()
        }

    @cached_property
    def _possible(self) -> list[KnobValues]:
        """The combinations of the deciding knobs that have this size."""
        return [knobs for knobs in combinations_of(self._deciding) if self.complete(knobs) is not None]

    def nearest_error(self) -> UserError:
        """Return the error about a size that no combination has, with the nearest sizes below and above."""
        wanted_size = self.size or 0
        attainable: set[int] = set()
        for combination in combinations_of(self._deciding):
            knobs = {**self._spec.knobs, **combination}
            degree, sizes = self.degree(knobs), {name: whole_number(knobs, name) for name in BATCH_KNOBS}
            varied_names = [name for name in BATCH_KNOBS if name in self._deciding]
            if len(varied_names) == len(BATCH_KNOBS):
                attainable.add(degree * math.prod(sizes.values()))
                continue
            # A knob that is not varied makes any multiple of the other one.
            units = {degree * sizes[name] for name in varied_names or BATCH_KNOBS}
            attainable |= {
                unit * count for unit in units for count in (max(1, wanted_size // unit), wanted_size // unit + 1)
            }
        size_below = max((size for size in attainable if size < wanted_size), default=None)
        size_above = min((size for size in attainable if size > wanted_size), default=None)
        return self._impossible_error([size for size in (size_below, size_above) if size is not None])

    def _impossible_error(self, attainable: list[int]) -> UserError:
        nearest = min(attainable, key=lambda size: abs(size - (self.size or 0)), default=None)
        return UserError(
            f"--global-batch {self.size}: no batch_size x grad_accum x data-parallel degree gives it",
            key="--global-batch",
            allowed=[str(size) for size in sorted(attainable)],
            nearest=None if nearest is None else str(nearest),
        )


TOO_LARGE: Final = "too_large"
"""The `VerdictWord` on a candidate whose memory exceeds its limit."""


class Failure(NamedTuple):
    """The reason a candidate did not run; `missing_bytes` is the least memory that was missing, None if unknown."""

    reason: str
    missing_bytes: int | None = None


def failure_in(message: str) -> Failure:
    """Return the failure in an allocator's message; the first line of a message without a size."""
    asked_bytes, free_bytes = asked_and_free(message)
    if asked_bytes is None:
        return Failure(message.partition("\n")[0])
    reason = f"an allocation of {mebibytes(asked_bytes)} failed"
    if free_bytes is None or free_bytes >= asked_bytes:  # under a limit the free memory does not matter
        return Failure(reason)
    return Failure(f"{reason} with {mebibytes(free_bytes)} free", asked_bytes - free_bytes)


def oom_failure(result: Result) -> Failure:
    """Return the failure of a run that ran out of memory, by its explanation."""
    failure, oom = failure_in(result.reason), result.oom
    if oom is None or oom.missing_bytes is None:
        return failure
    return failure._replace(missing_bytes=oom.missing_bytes)


def oom_verdict(line: Attempt, candidate: Candidate) -> tuple[str, int | None]:
    """Return why a candidate that ran out of memory is too large, and by how many bytes: as predicted, else missing."""
    reason, predicted_bytes = line.reason or "ran out of memory", candidate.predicted_bytes
    if candidate.excess_bytes is not None and predicted_bytes is not None:
        needed = excess_text(predicted_bytes, predicted_bytes - candidate.excess_bytes)
        return f"{needed}; {reason}", candidate.excess_bytes
    if line.missing_bytes is not None:
        reason += f", at least {mebibytes(line.missing_bytes)} too large"
    if predicted_bytes is not None:
        reason += f"; predicted {mebibytes(predicted_bytes)}"
    return reason, line.missing_bytes


def excess_text(needed_bytes: int, limit_bytes: int) -> str:
    """Return the text of a prediction beyond the limit: `needs 60 MiB of 48 MiB: 12 MiB too large`."""
    excess = mebibytes(needed_bytes - limit_bytes)
    return f"needs {mebibytes(needed_bytes)} of {mebibytes(limit_bytes)}: {excess} too large"


UNTIMED_TRIAL_STEPS = 2
"""Steps before a trial's timed ones: from the second on the optimizer has states, and a CPU's memory is measured."""
MIN_TIMED_STEPS, MAX_TIMED_STEPS, ENOUGH_ERROR = 4, 25, 0.012
"""Timed steps of a trial, and the standard error that is enough."""
MIN_TRIAL_STEPS = UNTIMED_TRIAL_STEPS + MIN_TIMED_STEPS
"""Steps of the shortest trial."""
Judgement = Literal["more", "enough", "slow"]
"""`more` steps are needed, `enough` were taken, or the candidate is too `slow`."""


@dataclass(frozen=True)
class StepRule:
    """The number of timed steps of a trial: from `min_steps` to `max_steps`, as many as their scatter needs."""

    min_steps: int = MIN_TIMED_STEPS
    max_steps: int = MAX_TIMED_STEPS
    standard_error: float = ENOUGH_ERROR
    """The standard error of the median that is enough, as a share of the median."""
    give_up_ms: float | None = None
    """A trial whose best step is slower than this ends; None for no bound."""

    def judge(self, step_ms: Sequence[float]) -> Judgement:
        """Judge a trial by the times of its steps so far, in ms."""
        if self.give_up_ms is not None and len(step_ms) >= 2 and min(step_ms) > self.give_up_ms:
            return "slow"
        if len(step_ms) < self.min_steps:
            return "more"
        return "enough" if len(step_ms) >= self.max_steps or relative_error(step_ms) <= self.standard_error else "more"


ORDINARY_RULE = StepRule()
"""The rule of a trial that is never given up."""


def objective_at(question: BestQuestion, candidate: Candidate, rate: float, start_s: float) -> float:
    """Return tokens/s, seconds of a start and `for_steps` optimizer steps, or the rate itself.

    `rate` is in samples/s, or in samples/J if that is the objective; `start_s` is the time to the first timed step.
    """
    if question.objective == "tokens_per_s":
        return rate * seq_len_of(question, candidate)
    if question.objective == "time":
        return start_s + (question.for_steps or 1) * candidate.samples_per_step / rate
    return rate


def log_objective(question: BestQuestion, candidate: Candidate, rate: float, start_s: float) -> float:
    """Return the ln of the objective at a rate, negated for `time`: higher is better."""
    value = math.log(objective_at(question, candidate, rate, start_s))
    return -value if question.objective == "time" else value


def objective_interval(question: BestQuestion, candidate: Candidate, rate: Interval, start_s: float) -> Interval:
    """Return the objective of a rate that is known within an interval; the longest time belongs to the lowest rate."""
    ends = [objective_at(question, candidate, value, start_s) for value in (rate.low, rate.high)]
    median = objective_at(question, candidate, rate.median, start_s)
    return Interval(median=median, low=min(ends), high=max(ends))


def seq_len_of(question: BestQuestion, candidate: Candidate) -> int:
    """Return the tokens of a sample of this candidate."""
    return whole_number({"seq_len": 1, **question.knobs, **candidate.knobs}, "seq_len")


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
        """Return the error of the compatibility rules; None without one."""
        try:
            check(replace(self._facts, spec=spec))
        except UserError as error:
            return error
        return None

    def plan_of(
        self, question: BestQuestion, candidate: Candidate, *, under_memory_limit: bool = False, **knobs: KnobValue
    ) -> RunPlan:
        """Return the plan of a candidate's run on the search's GPUs. Raises UserError."""
        limit = self.spec.knobs["memory_limit"] if under_memory_limit else None
        spec = candidate_spec(self.spec, candidate.knobs).with_overrides(memory_limit=limit, **knobs)
        # Every process takes the same GPUs, even if others have more free memory by now.
        uuids = question.device_uuids
        return planning.plan_run(spec, self.plan.python, uuids[: device_count(spec, self.machine)] if uuids else ())

    def predict_candidates(self, question: BestQuestion, cancelled: threading.Event) -> Space:
        """Return the candidates with their predicted memory; models are traced until `cancelled` is set."""
        plan = self.plan
        if any(value in ASKS_THE_MODEL for value in question.vary.get("attention", [self.spec.knobs["attention"]])):
            training_objective = self.spec.data["objective"]
            inspected = training_python.inspect(plan.python, self.spec.model, training_objective, attention=True)
            self._facts = replace(self._facts, attentions=inspected.attentions)
        space = self.space(question)
        specs = {
            number: spec
            for number, spec in self.legal_specs(space).items()
            if spec.knobs["strategy"] in PREDICTED_STRATEGIES
        }
        with suppress(ProgramCancelled, UserError):  # candidates without a model are tried unpredicted
            wanted, gpus = [*specs.values()], plan.device_uuids
            for _ in trace_models(wanted, plan.device, plan.python, cancelled=cancelled, gpus=gpus):
                pass  # the model is in the cache now, or cannot be traced
        model_of = cached_models(plan.device, plan.python, next(iter(plan.device_names), None))
        needed_bytes: dict[int, int] = {}
        for number, spec in specs.items():
            model = model_of(spec)
            if model is not None:
                prediction = model.predict(spec, space.candidates[number].world_size)
                needed_bytes[number] = prediction.total_bytes + (prediction.context_bytes or 0)
        limit_bytes = min(plan.memory_limit_bytes or (), default=None)
        free_bytes = read_host_free_bytes() if plan.device == CPU else 0

        def limit_of(number: int) -> int | None:
            """Return the bytes of each rank; on a CPU all ranks of a candidate share the free memory."""
            ranks = space.candidates[number].world_size
            if plan.device == CPU and (limit_bytes is None or ranks * limit_bytes > free_bytes):
                return share_of_free(free_bytes, ranks)
            return lowest(gpu.memory_free_bytes for gpu in plan.gpus) if limit_bytes is None else limit_bytes

        return with_predictions(space, needed_bytes, limit_of)


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

    def with_seen_samples(self, space: Space, lines: Sequence[BestLine]) -> Space:
        """Return the candidates with the samples of a step as the first trial saw them.

        A script may accumulate by itself.
        """
        trial = next((line for line in lines if isinstance(line, Trial) and line.outcome == "measured"), None)
        asked_samples = 0 if trial is None else space.candidates[trial.candidate_number].samples_per_step
        if trial is None or trial.samples_per_step in (0, asked_samples):
            return space
        candidates = [
            msgspec.structs.replace(
                candidate, samples_per_step=max(1, candidate.samples_per_step * trial.samples_per_step // asked_samples)
            )
            for candidate in space.candidates
        ]
        return msgspec.structs.replace(space, candidates=candidates)

"""The question of a best-fit search: its first journal line, its candidates, and the search it continues.

Candidates are combinations of knobs with one global batch, legal or refused, and their memory. Without a global batch
the preset's own is kept, so that the training stays the same, unless the batch is varied. A survey checks and plans
candidates on this machine: `ModelSurvey` for a preset's model, `ScriptSurvey` for a user's script.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from trainfast_runner.errors import UserError, lowest, nearest
from trainfast_runner.machine import training_python
from trainfast_runner.machine.calibration import Ceiling
from trainfast_runner.machine.devices import Machine, detect_machine
from trainfast_runner.machine.devices_knob import CPU, count_asked
from trainfast_runner.machine.resource_limits import read_host_free_bytes
from trainfast_runner.machine.training_python import ProgramCancelled
from trainfast_runner.memory.oom import asked_and_free
from trainfast_runner.memory.sharding import PREDICTED_STRATEGIES
from trainfast_runner.memory.tracing import cached_models, trace_models
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_file import ClockAnchor
from trainfast_runner.running import planning
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.best_journal import (
    SEARCH_OBJECTIVES,
    UNNAMED_REASON,
    BestQuestion,
    BestRequest,
    Candidate,
    Space,
    Trial,
)
from trainfast_runner.search.effects import relative_error
from trainfast_runner.search.journal import JournalWriter
from trainfast_runner.search.searches import (
    BATCH_KNOBS,
    BEST_KIND,
    MESH_KNOBS,
    ScriptPlanner,
    SearchOptions,
    candidate_spec,
    key_of_question,
    limits_of,
    new_search,
    script_planner,
    share_of_free,
    takes_warm_trials,
    unfinished,
)
from trainfast_runner.settings.compatibility import Facts, check
from trainfast_runner.settings.device_counts import chosen_gpus, data_parallel_degree, device_count, world_size
from trainfast_runner.settings.knob_values import Knob, KnobValue, KnobValues, whole_number
from trainfast_runner.settings.knobs import (
    KNOBS,
    KNOBS_BY_NAME,
    Vary,
    combinations_of,
    defaults,
    fewest_to_drop,
    knob,
    settings_of,
)
from trainfast_runner.settings.precisions import peak_precision
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.script_reach import FRAMEWORK_KNOBS, LAUNCH_KNOBS, check_reach
from trainfast_runner.settings.spec import SET_BY_A_SEARCH, RunSpec, expand_paths, strategy_of
from trainfast_runner.units import mebibytes
from trainfast_runner.worker.catalog import STRATEGIES

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
    derived = [name for name in BATCH_KNOBS if global_batch.derives_knobs or base_knobs[name] != spec.knobs[name]]
    names = dict.fromkeys((*vary, *derived))
    completed = [global_batch.complete(combination) for combination in combinations_of(vary)]
    combinations = [{**base_knobs, **complete} for complete in completed if complete is not None]
    if not combinations and size is not None:
        raise global_batch.nearest_error()
    dropped_count = len(completed) - len(combinations)
    combinations = [{name: knobs[name] for name in names} for knobs in combinations]
    baseline = {name: base_knobs[name] for name in names}
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
"""From this many combinations on all are counted, without a look at their global batch."""


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
        per_rank, remainder = divmod(self.size, self.degree(knobs))
        if remainder:
            raise self.nearest_error()
        max_batch = min(whole_number(knobs, "batch_size"), per_rank)
        batch = next(size for size in range(max_batch, 0, -1) if per_rank % size == 0)
        return {**knobs, "batch_size": batch, "grad_accum": per_rank // batch}

    def count(self) -> int:
        """Return the number of combinations of this size, without listing them; all of them beyond `MAX_COUNTED`."""
        count = math.prod(map(len, self._vary.values()))
        if self.size is None or count > MAX_COUNTED:
            return count
        return count * len(self._possible) // math.prod(map(len, self._deciding.values()))

    def occurring_values(self) -> dict[str, list[KnobValue]]:
        """Return the varied values without those that no combination of this size has."""
        occurring = {name: {knobs[name] for knobs in self._possible} for name in self._deciding}
        return {
            name: [value for value in values if value in occurring.get(name, values)]
            for name, values in self._vary.items()
        }

    @cached_property
    def _possible(self) -> list[KnobValues]:
        """The combinations of the deciding knobs that have this size."""
        return [knobs for knobs in combinations_of(self._deciding) if self.complete(knobs) is not None]

    def nearest_error(self) -> UserError:
        """Return the error about a size that no combination has, with the nearest sizes below and above."""
        wanted, attainable = self.size or 0, set[int]()
        for combination in combinations_of(self._deciding):
            knobs = {**self._spec.knobs, **combination}
            degree, varied = self.degree(knobs), [name for name in BATCH_KNOBS if name in self._deciding]
            sizes = {name: degree * whole_number(knobs, name) for name in BATCH_KNOBS}
            if len(varied) == len(BATCH_KNOBS):
                attainable.add(math.prod(sizes.values()) // degree)
                continue
            # A knob that is not varied makes any multiple of the other one.
            for unit in {sizes[name] for name in varied or BATCH_KNOBS}:
                attainable |= {unit * max(1, wanted // unit), unit * (wanted // unit + 1)}
        below = max((size for size in attainable if size < wanted), default=None)
        above = min((size for size in attainable if size > wanted), default=None)
        sizes_near = [size for size in (below, above) if size is not None]
        nearest = min(sizes_near, key=lambda size: abs(size - wanted), default=None)
        return UserError(
            f"--global-batch {self.size}: no batch_size x grad_accum x data-parallel degree gives it",
            key="--global-batch",
            allowed=[str(size) for size in sizes_near],
            nearest=None if nearest is None else str(nearest),
        )


TOO_LARGE: Final = "too_large"
"""The `VerdictWord` on a candidate whose memory exceeds its limit."""


def oom_reason(message: str, missing_bytes: int | None = None) -> str:
    """Return an allocator's message in words, with the least memory that was missing if known."""
    asked_bytes, free_bytes = asked_and_free(message)
    reason = message.partition("\n")[0] or "ran out of memory"
    if asked_bytes is not None:
        reason = f"an allocation of {mebibytes(asked_bytes)} failed"
        if free_bytes is not None and free_bytes < asked_bytes:  # under a limit the free memory does not matter
            reason += f" with {mebibytes(free_bytes)} free"
    return reason if missing_bytes is None else f"{reason}, at least {mebibytes(missing_bytes)} too large"


def oom_verdict(reason: str, candidate: Candidate) -> str:
    """Return why a candidate that ran out of memory is too large: by the prediction, and the reason of its attempt."""
    predicted_bytes, excess_bytes = candidate.predicted_bytes, candidate.excess_bytes
    if predicted_bytes is None:
        return reason
    if excess_bytes is None:
        return f"{reason}; predicted {mebibytes(predicted_bytes)}"
    return f"{excess_text(predicted_bytes, predicted_bytes - excess_bytes)}; {reason}"


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


def objective_at(question: BestQuestion, candidate: Candidate, rate: float, start_s: float) -> float:
    """Return the seconds of a start and `for_steps` optimizer steps for the objective `time`, else the rate itself.

    `rate` is in samples/s, or in samples/J if that is the objective; `start_s` is the time to the first timed step.
    """
    if question.objective == "time":
        return start_s + (question.for_steps or 1) * candidate.samples_per_step / rate
    return rate


def log_objective(question: BestQuestion, candidate: Candidate, rate: float, start_s: float) -> float:
    """Return the ln of the objective at a rate, negated for `time`: higher is better."""
    value = math.log(objective_at(question, candidate, rate, start_s))
    return -value if question.objective == "time" else value


class Survey(ABC):
    """Checks and plans the candidates of one search on this machine.

    `spec` are the settings that the search varies, `plan` is the plan of the preset's own run, which has the preset's
    batch also where `--global-batch` gives the baseline another.
    """

    has_batch = True
    """True if the present batch and accumulation are known."""
    takes_warm_trials = True
    """False if each candidate is tried in a process of its own."""

    def __init__(self, spec: RunSpec, plan: RunPlan, machine: Machine) -> None:
        self.spec, self.plan, self.machine = spec, plan, machine

    def refuse(self, spec: RunSpec) -> UserError | None:
        """Return the error of a run that cannot start here; None when it can."""
        try:
            self.check(spec)
        except UserError as error:
            return error
        return None

    @abstractmethod
    def check(self, spec: RunSpec) -> None:
        """Raise UserError if the run cannot start here."""

    @abstractmethod
    def plan_of(
        self, question: BestQuestion, candidate: Candidate, *, under_memory_limit: bool = False, **knobs: KnobValue
    ) -> RunPlan:
        """Return the plan of a candidate's run with further knobs, its own limit or none. Raises UserError."""

    def space(self, question: BestQuestion) -> Space:
        """Return the candidates, their memory unpredicted. Raises UserError as `enumerate_space`."""
        space = enumerate_space(self.spec, self.machine, question.vary, question.global_batch, self.refuse)
        if self.takes_warm_trials:
            return space
        alone = [msgspec.structs.replace(candidate, process_knobs=candidate.knobs) for candidate in space.candidates]
        return msgspec.structs.replace(space, candidates=alone)

    def legal_specs(self, space: Space) -> dict[int, RunSpec]:
        """Return the run of each candidate that is not ruled out, by its number."""
        return {
            number: candidate_spec(self.spec, candidate.knobs)
            for number, candidate in enumerate(space.candidates)
            if candidate.excluded_as is None
        }


ABOVE_CEILING = 1.1
"""A training may be faster than the calibration by this factor: a boost clock, or a CPU shared while calibrating."""


def with_bounds(space: Space, survey: Survey, flops: float, ceiling: Ceiling) -> Space:
    """Return the space with the least seconds of a sample, for candidates of a calibrated precision.

    `flops` are the model's of one sample. Recomputation under checkpointing only adds FLOPs: the bound still holds.
    """
    candidates = list(space.candidates)
    for number, spec in survey.legal_specs(space).items():
        if tflops := ceiling.tflops.get(peak_precision(str(spec.knobs["precision"]))):
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

    def check(self, spec: RunSpec) -> None:
        """Raise the UserError of the compatibility rules."""
        check(replace(self._facts, spec=spec))

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
        limit_bytes = min(plan.memory_limit_bytes or (), default=None)
        free_bytes = read_host_free_bytes() if plan.device == CPU else 0
        candidates = list(space.candidates)

        def limit_of(ranks: int) -> int | None:
            """Return the bytes of each rank; on a CPU all ranks of a candidate share the free memory."""
            if plan.device == CPU and (limit_bytes is None or ranks * limit_bytes > free_bytes):
                return share_of_free(free_bytes, ranks)
            return lowest(gpu.memory_free_bytes for gpu in plan.gpus) if limit_bytes is None else limit_bytes

        for number, spec in specs.items():
            if (model := model_of(spec)) is None:
                continue
            prediction = model.predict(spec, candidates[number].world_size)
            needed_bytes = prediction.total_bytes + (prediction.context_bytes or 0)
            figures: dict[str, Any] = {"predicted_bytes": needed_bytes}
            limit = limit_of(candidates[number].world_size)
            if limit is not None and needed_bytes > limit:
                figures["excess_bytes"] = needed_bytes - limit
                # The baseline is tried all the same: its run shows the error of the prediction.
                if number != space.baseline_number:
                    figures |= {"excluded_as": TOO_LARGE, "reason": excess_text(needed_bytes, limit)}
            candidates[number] = msgspec.structs.replace(candidates[number], **figures)
        return msgspec.structs.replace(space, candidates=candidates)


class ScriptSurvey(Survey):
    """The survey of a script. Its `spec` has the defaults of knobs that the preset does not name."""

    takes_warm_trials = False

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

    def check(self, spec: RunSpec) -> None:
        """Raise UserError for a value that cannot be passed to the script, or that nothing can confirm."""
        if spec.knobs["precision"] == "tf32" and "precision" not in self._preset.flag_words:
            raise UserError("nothing in a script shows that tf32 ran", key="precision")
        self._preset.applied(list(self._preset.command), {name: spec.knobs[name] for name in self.named})

    def plan_of(
        self, question: BestQuestion, candidate: Candidate, *, under_memory_limit: bool = False, **knobs: KnobValue
    ) -> RunPlan:
        """Return the plan of a candidate's trial, which is always under the search's limit. Raises UserError."""
        plan = self._plan_script_run({**candidate.knobs, **knobs})
        return dataclasses.replace(plan, memory_limit_bytes=tuple(question.limits_bytes) or None)

    def with_seen_samples(self, space: Space, trial: Trial) -> Space:
        """Return the candidates with the samples of a step as the first trial saw them."""
        asked_samples, seen_samples = space.candidates[trial.candidate_number].samples_per_step, trial.samples_per_step
        candidates = []
        for candidate in space.candidates:
            samples = max(1, candidate.samples_per_step * seen_samples // asked_samples)
            candidates.append(msgspec.structs.replace(candidate, samples_per_step=samples))
        return msgspec.structs.replace(space, candidates=candidates)


def check_request(request: BestRequest, plan: RunPlan) -> None:
    """Raise UserError for an objective that does not exist, cannot be measured here, or compares unequal work."""
    objective, frees_batch = request.objective, request.global_batch is None and _varies_batch(request)
    has_counter = any(gpu.energy_mj is not None or gpu.power_w is not None for gpu in plan.watched)
    if objective not in SEARCH_OBJECTIVES:
        raise UserError(
            f"--objective {objective}: no such objective",
            key="--objective",
            allowed=SEARCH_OBJECTIVES,
            nearest=nearest(objective, SEARCH_OBJECTIVES),
        )
    if objective == "time" and request.for_steps is None:
        raise UserError("--objective time needs --for-steps N, the length of the training", key="--for-steps")
    if objective == "time" and frees_batch:
        problem = "--objective time compares equal numbers of steps: it needs --global-batch N"
        raise UserError(problem, key="--global-batch")
    if objective != "time" and request.for_steps is not None:
        raise UserError(f"--for-steps needs --objective time, not {objective}", key="--for-steps")
    if objective == "samples_per_joule" and not has_counter:
        problem = "--objective samples_per_joule needs a GPU with an energy counter, and this run watches none"
        raise UserError(problem, key="--objective", nearest="samples_per_s")
    for name, value in (("--global-batch", request.global_batch), ("--for-steps", request.for_steps)):
        if value is not None and value < 1:
            raise UserError(f"{name} {value}: at least 1", key=name)


def _varies_batch(request: BestRequest) -> bool:
    return any(name in request.vary for name in BATCH_KNOBS)


@dataclass(frozen=True)
class BestPlan:
    """A checked best-fit search."""

    question: BestQuestion
    """The first journal line, without its search's id and its key, which `open_best` adds."""
    survey: Survey
    space: Space
    """The candidates, without predictions."""

    @property
    def plan(self) -> RunPlan:
        """The plan of the preset's own run; with `--global-batch` the baseline is that run with another batch."""
        return self.survey.plan

    @property
    def legal_count(self) -> int:
        """Number of candidates that can run here."""
        return sum(candidate.excluded_as is None for candidate in self.space.candidates)


def _question(
    spec: RunSpec,
    survey: Survey,
    request: BestRequest,
    limits_bytes: Sequence[int],
    entries: Iterable[Knob] = KNOBS,
    unnamed: dict[str, str] | None = None,
) -> BestQuestion:
    """Return the first line of a search's journal, without its id and key; `spec` are the settings it records.

    Every candidate keeps the preset's global batch, or the requested one, unless the batch is varied. `unnamed` are the
    knobs left alone because their present value is missing; without a present batch the global batch is free.
    """
    batch = request.global_batch or default_global_batch(survey.spec, survey.machine)
    vary, left_alone = vary_of(survey.spec, request.vary, survey.machine, batch, survey.refuse, entries)
    is_free = not survey.has_batch or (request.global_batch is None and _varies_batch(request))
    return BestQuestion(
        search_id="",
        key="",
        **spec.record_fields(),
        objective=request.objective,
        for_steps=request.for_steps,
        budget_s=request.budget_s,
        vary=vary,
        left_alone=left_alone | (unnamed or {}),
        global_batch=None if is_free else batch,
        device=survey.plan.device,
        device_names=survey.plan.device_names,
        limits_bytes=list(limits_bytes),
        clock=ClockAnchor(monotonic_ns=time.monotonic_ns(), wall_ns=time.time_ns()),
    )


def plan_spec_best(spec: RunSpec, request: BestRequest, python: str | None = None) -> BestPlan:
    """Check a question about a preset or a script against this machine. Raises UserError; starts nothing."""
    if spec.script is None:
        return plan_preset_best(spec, request, python)
    return plan_script_best(spec.script, settings_of(spec.knobs, spec.overrides), request, python)


def plan_preset_best(spec: RunSpec, request: BestRequest, python: str | None = None) -> BestPlan:
    """Check a question against this machine and the training Python. Raises UserError; starts nothing."""
    spec = dataclasses.replace(spec, data=expand_paths(spec.data))
    # `devices` is a ceiling: the preset's own run may use fewer.
    plan = planning.plan_run(candidate_spec(spec, {}), python)
    check_request(request, plan)
    survey = ModelSurvey(spec, plan)
    question = _question(spec, survey, request, plan.memory_limit_bytes or ())
    space = survey.space(question)
    uuids = _gpus_of(survey, space)
    if uuids:
        own_uuids = uuids[: device_count(plan.spec, survey.machine)]
        plan = planning.plan_run(candidate_spec(spec, {}), python, own_uuids)
        survey = ModelSurvey(spec, plan)
        question = msgspec.structs.replace(question, device_uuids=uuids, device_names=plan.device_names)
    return BestPlan(question, survey, space)


def _gpus_of(survey: Survey, space: Space) -> list[str]:
    """Return the UUIDs of the GPUs for the whole search: those of the candidate that uses most; empty on a CPU."""
    if survey.machine.device != "cuda":
        return []
    specs = [candidate_spec(survey.spec, {}), *survey.legal_specs(space).values()]
    meshes = {tuple(spec.knobs[name] for name in MESH_KNOBS): spec for spec in specs}
    widest = max(meshes.values(), key=lambda spec: device_count(spec, survey.machine))
    return [gpu.uuid for gpu in chosen_gpus(widest.knobs, survey.machine).gpus if gpu.uuid]


def plan_script_best(
    preset: ScriptPreset, settings: Sequence[str], request: BestRequest, python: str | None = None
) -> BestPlan:
    """Check a question about a script against this machine. Raises UserError; starts nothing."""
    plan_script_run = script_planner(preset, settings, python, SET_BY_A_SEARCH)
    plan = plan_script_run({"steps": MIN_TRIAL_STEPS, "timing_warmup": UNTIMED_TRIAL_STEPS})
    check_request(request, plan)
    machine = detect_machine(plan.versions).used_by(plan.spec.knobs.get("devices"))
    survey = ScriptSurvey(preset, plan, machine, plan_script_run)
    _check_answerable(request, survey.named, preset)
    entries = [KNOBS_BY_NAME[name] for name in survey.named if survey.has_batch or name not in BATCH_KNOBS]
    unnamed = {} if request.vary else _unnamed_knobs(preset, survey)
    question = _question(plan.spec, survey, request, limits_of(plan).by_rank, entries, unnamed)
    if not question.vary:
        raise UserError(
            f"{preset.name} names the present value of no knob that keeps its training the same",
            key="--vary",
            option=f"trainfast-tui search best {preset.name} --set batch_size=8 --vary batch_size=4,8,16",
        )
    return BestPlan(question, survey, survey.space(question))


def _check_answerable(request: BestRequest, named_knobs: Sequence[str], preset: ScriptPreset) -> None:
    """Raise UserError for a question that a script's trials cannot answer."""
    takes = (*FRAMEWORK_KNOBS, *preset.flag_words)
    needed_knobs = (*request.vary, *(BATCH_KNOBS if request.global_batch is not None else ()))
    for name in (name for name in needed_knobs if name not in named_knobs):
        if knob(name).name not in takes:
            raise UserError(f"{name} has no place in {preset.name}: name its flag", key=name, allowed=takes)
        if name not in preset.flag_words:
            check_reach({name: None}, preset.framework, None)
        raise UserError(
            f"{preset.name} does not name the present {name} of its script",
            key=name,
            advice=f"naming a value of {name}",
            option=f"--set {name}=VALUE",
        )


def _unnamed_knobs(preset: ScriptPreset, survey: ScriptSurvey) -> dict[str, str]:
    """Return the mapped knobs that are left alone because a present value is missing, with the reasons."""
    reasons = {
        name: UNNAMED_REASON
        for name in preset.flag_words
        if name not in survey.named and KNOBS_BY_NAME[name].search_values
    }
    if not survey.has_batch:
        other_knob = {"batch_size": "grad_accum", "grad_accum": "batch_size"}
        reasons |= {
            name: f"without a named {other} another value changes the global batch"
            for name, other in other_knob.items()
            if name in survey.named
        }
    return reasons


MutableVary = dict[str, list[KnobValue]]
"""The values of each varied knob; illegal ones are removed."""
NEVER_VARIED = {
    "devices": "it is a ceiling: vary strategy",
    "seq_len": "samples of another length are other work",
    "memory_limit": "it is the limit that every setting has to keep",
    "steps": "it does not change the speed of a step",
    "timing_warmup": "it does not change the speed of a step",
    "watch": "it does not change the speed of a step",
}
"""Knobs that cannot be varied, each with the reason."""
LEFT_ALONE_FIRST = ("pin_memory", "workers", "attention", "optimizer", "checkpointing", "compile")
"""Knobs that are left alone first if there are too many combinations."""


def vary_of(
    spec: RunSpec,
    requested: Mapping[str, Sequence[object]],
    machine: Machine,
    global_batch: int,
    refuse: Refuse,
    entries: Iterable[Knob] = KNOBS,
) -> tuple[MutableVary, dict[str, str]]:
    """Return the values of each varied knob, and the knobs and values left alone, each with the reason.

    If none is requested, the knobs of `entries` that keep the training the same are varied over their legal
    `search_values`. Raises UserError for a knob or value that cannot be varied.
    """
    if requested:
        return {name: _requested_values(name, values) for name, values in requested.items()}, {}
    vary: MutableVary = {}
    left_alone: dict[str, str] = {}
    for entry in entries:
        present_value = spec.knobs[entry.name]
        if not entry.has_equivalent_values:
            left_alone[entry.name] = entry.training
        elif not all(entry.keeps_training(present_value, value) for value in entry.search_values):
            left_alone[entry.name] = f"{entry.text_of(present_value)} trains differently from its other values"
        elif entry.search_values:
            vary[entry.name] = _values(entry, present_value, global_batch)
    on_cpu = machine.used_by(spec.knobs["devices"]).device == "cpu"
    if on_cpu and vary.pop("pin_memory", None) is not None:
        left_alone["pin_memory"] = "a run on the CPU copies nothing to a GPU"
    _drop_illegal(spec, vary, left_alone, machine, refuse)
    occurring = GlobalBatch(spec, machine, vary, global_batch).occurring_values()
    vary = {name: values for name, values in occurring.items() if len(values) > 1}
    for name in LEFT_ALONE_FIRST:
        if name in vary and GlobalBatch(spec, machine, vary, global_batch).count() > MAX_CANDIDATES:
            del vary[name]
            left_alone[name] = f"with it there are more than {MAX_CANDIDATES:,} settings; --vary {name}=... names it"
    return vary, left_alone


def _requested_values(name: str, values: Iterable[object]) -> list[KnobValue]:
    entry = knob(name)
    if name in NEVER_VARIED:
        raise UserError(
            f"{name} cannot be varied: {NEVER_VARIED[name]}",
            key=name,
            advice=f"setting {name} for the next run",
            option=f"--set {name}=...",
        )
    distinct_values = list(dict.fromkeys(entry.read(value) for value in values))
    if not distinct_values:
        raise UserError(f"--vary {name} names no value", key=name, allowed=[entry.values.describe()])
    return distinct_values


def _values(entry: Knob, present_value: KnobValue, global_batch: int) -> list[KnobValue]:
    """Return the present value and the values to try; batch sizes only up to the global batch."""
    values = list(dict.fromkeys((present_value, *entry.search_values)))
    if entry.name == "batch_size":
        sizes = {size for size in (*values, global_batch) if isinstance(size, int)}
        return [size for size in sorted(sizes) if size <= global_batch and global_batch % size == 0]
    return values


def _drop_illegal(
    spec: RunSpec, vary: MutableVary, left_alone: dict[str, str], machine: Machine, refuse: Refuse
) -> None:
    """Leave out the values that cannot run here with any precision, or are not worth a trial on this machine."""
    precisions = list(vary.get("precision", [spec.knobs["precision"]]))

    def reason_against(name: str, value: KnobValue) -> str | None:
        if name == "workers" and isinstance(value, int) and value > machine.cores:
            return f"there are {machine.cores} cores"
        if name == "strategy" and not _has_several_devices(spec, value, machine):
            return "the run has one device"
        if name == "precision" and value == "fp16" and "bf16" in vary["precision"]:
            return "bf16 runs here and needs no loss scaling"
        settings = [{"precision": precision, name: value} for precision in precisions]
        refusals = [refuse(candidate_spec(spec, setting)) for setting in settings if name != "batch_size"]
        messages = [refusal.message for refusal in refusals if refusal is not None]
        return messages[0] if messages and len(messages) == len(refusals) else None

    for name, values in vary.items():
        # bf16 is judged before fp16, which gives way to it.
        for value in sorted((value for value in values if value != spec.knobs[name]), key=str):
            reason = reason_against(name, value)
            if reason is not None:
                left_alone[f"{name}={KNOBS_BY_NAME[name].text_of(value)}"] = reason
                values.remove(value)


def _has_several_devices(spec: RunSpec, strategy: KnobValue, machine: Machine) -> bool:
    """True if the run may use several devices, or the strategy needs one only."""
    if STRATEGIES[str(strategy)].one_device:
        return True
    if machine.used_by(spec.knobs["devices"]).device == "cpu" and strategy_of(spec.knobs).one_device:
        # A CPU runs any number of processes, so several count only if asked for.
        return (count_asked(spec.knobs["devices"]) or 1) > 1
    return (processes_of(candidate_spec(spec, {"strategy": strategy}), machine) or 1) > 1


def open_best(best_plan: BestPlan, home: Home, options: SearchOptions) -> Path:
    """Return the directory of the search this question continues, or of a new one with its first line written."""
    home.create()
    question, key = best_plan.question, best_key(best_plan)
    unfinished_search = None if options.fresh else unfinished(home, key, BEST_KIND)
    if unfinished_search is not None:
        return unfinished_search
    directory = new_search(home, question.name)
    journal = JournalWriter(directory)
    journal.write(msgspec.structs.replace(question, search_id=directory.name, key=key))
    journal.close()
    return directory


def best_key(best_plan: BestPlan) -> str:
    """Return the key of a question: of model, data, knobs, varied values, devices and versions.

    All visible GPUs are in the key; the journal has those that the search took, the freest at its beginning.
    """
    question, plan = best_plan.question, best_plan.plan
    visible = [gpu.uuid for gpu in best_plan.survey.machine.gpus]
    knobs = {name: value for name, value in question.knobs.items() if name not in SET_BY_A_SEARCH}
    search_fields = question.vary, question.global_batch, question.objective, question.for_steps, question.budget_s
    request = (question.model, question.data, knobs, search_fields, plan.device, visible, plan.python, plan.versions)
    return key_of_question(request, plan)

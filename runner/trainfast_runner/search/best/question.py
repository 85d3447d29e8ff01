"""The question of a best-fit search: its first journal line, its candidates, and the search it continues.

Candidates are combinations of knobs with one global batch, legal or refused, and their memory. Without a global batch
the preset's own is kept, so that the training stays the same, unless the batch is varied. A search of a preset's model
and one of a user's script differ in what refuses a candidate, and in how its run is planned.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from trainfast_runner.errors import UserError, lowest, nearest
from trainfast_runner.machine import warm_python
from trainfast_runner.machine.calibration import Ceiling
from trainfast_runner.machine.devices import Machine, detect_machine
from trainfast_runner.machine.hosts import Host
from trainfast_runner.machine.resource_limits import read_host_free_bytes
from trainfast_runner.machine.training_python import ProgramCancelled
from trainfast_runner.memory.model import MemoryModel, step_work
from trainfast_runner.memory.oom import sizes_in
from trainfast_runner.memory.sharding import PREDICTED_STRATEGIES
from trainfast_runner.memory.tracing import cached_models, trace_models
from trainfast_runner.records.home import Home
from trainfast_runner.running import planning
from trainfast_runner.running.placing import Placement
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search import searches
from trainfast_runner.search.best_journal import (
    SEARCH_OBJECTIVES,
    UNNAMED_REASON,
    BestQuestion,
    BestRequest,
    Candidate,
    Space,
    Trial,
)
from trainfast_runner.search.effects import MIN_TIMED_STEPS, UNTIMED_TRIAL_STEPS
from trainfast_runner.search.predicted_speed import traced_parts_s
from trainfast_runner.search.searches import BATCH_KNOBS, MESH_KNOBS
from trainfast_runner.settings.compatibility import EVERY_MODELS_ATTENTION, Facts, check
from trainfast_runner.settings.device_counts import (
    chosen_gpus,
    data_parallel_degree,
    device_count,
    global_batch,
    world_size,
)
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
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.script_reach import FRAMEWORK_KNOBS, LAUNCH_KNOBS, check_reach, has_flag
from trainfast_runner.settings.spec import SET_BY_A_SEARCH, RunSpec, expand_paths, strategy_of
from trainfast_runner.units import CPU, count_asked, mebibytes
from trainfast_runner.worker.catalog import LEVERS, STRATEGIES

MAX_CANDIDATES = 5000
"""A search has at most this many candidates."""
MEMORY_LEVERS = tuple(name for name, entry in LEVERS.items() if entry.group == "memory" and entry.is_traced)
"""Levers that are worth their time only where the plain value does not fit."""


@dataclass(frozen=True)
class Survey:
    """The settings that a search varies, the machine, and the check of a candidate's run."""

    spec: RunSpec
    machine: Machine
    check: Callable[[RunSpec], None]
    """Raises UserError for a run that cannot start here."""
    is_script: bool = False

    def run_of(self, knobs: KnobValues) -> RunSpec:
        """Return the run with these knobs."""
        return searches.candidate_spec(self.spec, knobs)

    def refusal(self, run: RunSpec) -> UserError | None:
        """Return the error of a run that cannot start here; None when it can."""
        try:
            self.check(run)
        except UserError as error:
            return error
        return None

    def count(self, counter: Callable[[RunSpec, Machine], int], run: RunSpec) -> int:
        """Return the devices or ranks of a run; 1 with too few devices, which is refused later."""
        try:
            return counter(run, self.machine)
        except UserError:
            return 1

    def legal_specs(self, space: Space) -> dict[int, RunSpec]:
        """Return the run of each candidate that is not ruled out, by its number."""
        return {
            number: self.run_of(candidate.knobs)
            for number, candidate in enumerate(space.candidates)
            if candidate.excluded_as is None
        }


class GlobalBatch:
    """The combinations of varied values that have a global batch of `size`; None leaves it free."""

    def __init__(self, survey: Survey, vary: Vary, size: int | None) -> None:
        self._survey, self._vary, self.size = survey, vary, size
        self._degrees: dict[tuple[KnobValue, ...], int] = {}
        self._deciding = {name: values for name, values in vary.items() if name in (*BATCH_KNOBS, *MESH_KNOBS)}
        """The varied knobs on which the global batch depends."""
        self._others = {name: values for name, values in vary.items() if name not in self._deciding}
        completed = map(self._complete, combinations_of(self._deciding))
        self._possible = [knobs for knobs in completed if knobs is not None]
        """The deciding combinations of this size, with the batch and accumulation that they decide."""
        other_count = math.prod(map(len, self._others.values()))
        self.count = len(self._possible) * other_count
        """Number of combinations of this size."""
        self.dropped = math.prod(map(len, self._deciding.values())) * other_count - self.count
        """Number of combinations of another size."""

    def degree(self, knobs: KnobValues) -> int:
        """Return the data-parallel degree with these knobs; 1 with too few devices."""
        mesh = {name: knobs.get(name, self._survey.spec.knobs[name]) for name in MESH_KNOBS}
        key = tuple(mesh.values())
        if key not in self._degrees:
            run = self._survey.run_of(mesh)
            self._degrees[key] = data_parallel_degree(run.knobs, self._survey.count(device_count, run))
        return self._degrees[key]

    def _complete(self, values: KnobValues) -> KnobValues | None:
        """Return a combination with the batch and accumulation of this size; None if it has another global batch."""
        if self.size is None:
            return values
        knobs = {**self._survey.spec.knobs, **values}
        batch, accumulation = (whole_number(knobs, name) for name in BATCH_KNOBS)
        per_rank, remainder = divmod(self.size, self.degree(values))
        varies_batch, varies_accumulation = (name in self._vary for name in BATCH_KNOBS)
        if not varies_batch and per_rank % accumulation == 0:
            batch = per_rank // accumulation
        elif not varies_accumulation and per_rank % batch == 0:
            accumulation = per_rank // batch
        if remainder or batch * accumulation != per_rank:
            return None
        return {**values, "batch_size": batch, "grad_accum": accumulation}

    def combinations(self) -> list[KnobValues]:
        """Return the varied and the derived knobs of each combination of this size."""
        return [{**knobs, **others} for knobs in self._possible for others in combinations_of(self._others)]

    def around(self, knobs: KnobValues) -> Iterable[KnobValues]:
        """Yield the combinations that differ from one by at most one knob besides batch and `MEMORY_LEVERS`."""
        saving = {name: values for name, values in self._others.items() if name in MEMORY_LEVERS}
        alone = {name: values for name, values in self._others.items() if name not in saving}
        changes = [{name: value} for name, values in alone.items() for value in values if value != knobs[name]]
        for of_batch, saved in itertools.product(self._possible, combinations_of(saving)):
            has_same_mesh = all(of_batch.get(name, knobs.get(name)) == knobs.get(name) for name in MESH_KNOBS)
            for change in ({}, *(changes if has_same_mesh else ())):
                yield {**knobs, **of_batch, **saved, **change}

    def baseline(self) -> KnobValues:
        """Return the preset's varied and derived knobs at this size: its batch size, or the next smaller that divides.

        Raises UserError if the data-parallel degree does not divide the size.
        """
        knobs = self._survey.spec.knobs
        named = {name: knobs[name] for name in self._vary}
        if self.size is None:
            return named
        per_rank, remainder = divmod(self.size, self.degree(knobs))
        if remainder:
            raise self.nearest_error()
        max_batch = min(whole_number(knobs, "batch_size"), per_rank)
        batch = next(size for size in range(max_batch, 0, -1) if per_rank % size == 0)
        of_batch: KnobValues = {"batch_size": batch, "grad_accum": per_rank // batch}
        # One of them beside the preset's other one would be another global batch.
        is_derived = bool(self._deciding) or any(value != knobs[name] for name, value in of_batch.items())
        return named | of_batch if is_derived else named

    def occurring_values(self) -> dict[str, list[KnobValue]]:
        """Return the varied values without those that no combination of this size has."""
        occurring = {name: {knobs[name] for knobs in self._possible} for name in self._deciding}
        return {
            name: [value for value in values if value in occurring.get(name, values)]
            for name, values in self._vary.items()
        }

    def nearest_error(self) -> UserError:
        """Return the error about a size that no combination has, with the nearest sizes below and above."""
        wanted = self.size or 0
        varied = [name for name in BATCH_KNOBS if name in self._deciding]
        settings = [{**self._survey.spec.knobs, **combination} for combination in combinations_of(self._deciding)]
        attainable = {
            self.degree(knobs) * math.prod(whole_number(knobs, name) for name in varied or ("grad_accum",))
            for knobs in settings
        }
        if len(varied) < len(BATCH_KNOBS):
            # A knob that is not varied makes any multiple of the other one.
            attainable = {unit * (wanted // unit + more) for unit in attainable for more in (0, 1)} - {0}
        near = [*sorted(size for size in attainable if size < wanted)[-1:]]
        near += sorted(size for size in attainable if size > wanted)[:1]
        return UserError(
            f"--global-batch {self.size}: no batch_size x grad_accum x data-parallel degree gives it",
            key="--global-batch",
            allowed=[str(size) for size in near],
            nearest=str(min(near, key=lambda size: abs(size - wanted))) if near else None,
        )


def default_global_batch(survey: Survey) -> int:
    """Return the samples of one optimizer step of the preset."""
    run = survey.run_of({})
    return global_batch(run.knobs, survey.count(device_count, run))


def enumerate_space(survey: Survey, vary: Vary, size: int | None, *, in_stages: bool = False) -> Space:
    """Return every combination of the varied values with a global batch of `size`, the baseline among them.

    None leaves the global batch free. `in_stages` allows more than `MAX_CANDIDATES`: those around the baseline come
    first. Raises UserError for more candidates otherwise, and for a global batch that nothing varied can give.
    """
    sizes = GlobalBatch(survey, vary, size)
    in_stages = in_stages and sizes.count > MAX_CANDIDATES
    if sizes.count > MAX_CANDIDATES and not in_stages:
        dropped_knobs, left_count = fewest_to_drop(vary, sizes.count, MAX_CANDIDATES)
        text = f"{sizes.count:,} candidates are more than {MAX_CANDIDATES:,}"
        raise UserError(
            f"{text}; without {' and '.join(dropped_knobs)} there are about {left_count:,}",
            key="--vary",
            advice=f"leaving out {' and '.join(dropped_knobs)}",
            option="leaving out " + " and ".join(f"--vary {name}" for name in dropped_knobs),
        )
    baseline = sizes.baseline()
    listed = [*sizes.around(baseline)] if in_stages else sizes.combinations()
    if not listed:
        raise sizes.nearest_error()
    combinations = [{name: knobs.get(name, value) for name, value in baseline.items()} for knobs in listed]
    if baseline not in combinations:
        combinations.insert(0, baseline)
    number = combinations.index(baseline)
    return Space(
        candidates=[_candidate(survey, knobs) for knobs in combinations],
        baseline_number=number,
        dropped=sizes.dropped,
        around=[number] if in_stages else [],
    )


def _space_of(question: BestQuestion, survey: Survey) -> Space:
    return enumerate_space(survey, question.vary, question.global_batch, in_stages=question.is_default_vary)


def lever_point(knobs: KnobValues) -> KnobValues:
    """Return the knobs that count in a space of stages: those besides batch, accumulation and `MEMORY_LEVERS`."""
    return {name: value for name, value in knobs.items() if name not in (*BATCH_KNOBS, *MEMORY_LEVERS)}


def _candidate(survey: Survey, knobs: KnobValues) -> Candidate:
    run = survey.run_of(knobs)
    refusal = survey.refusal(run)
    is_warm = not survey.is_script and searches.takes_warm_trials(run.knobs)
    return Candidate(
        knobs=knobs,
        process_knobs={
            name: value for name, value in knobs.items() if not is_warm or KNOBS_BY_NAME[name].needs_process(value)
        },
        world_size=survey.count(world_size, run),
        samples_per_step=global_batch(run.knobs, survey.count(device_count, run)),
        excluded_as=None if refusal is None else "incompatible",
        reason="" if refusal is None else refusal.line_without_option(),
    )


def changes_training(candidate: Candidate, baseline: Candidate) -> list[str]:
    """Return the knobs by which a candidate trains differently from the baseline; empty if it trains the same."""
    overridden = [
        name
        for name, value in candidate.knobs.items()
        if name in KNOBS_BY_NAME and not KNOBS_BY_NAME[name].keeps_training(baseline.knobs[name], value)
    ]
    return [*overridden, *(["global batch"] if candidate.samples_per_step != baseline.samples_per_step else [])]


TOO_LARGE: Final = "too_large"
"""The `VerdictWord` on a candidate whose memory exceeds its limit."""


def oom_reason(message: str, missing_bytes: int | None = None) -> str:
    """Return an allocator's message in words, with the least memory that was missing if known."""
    sizes = sizes_in(message)
    asked_bytes, free_bytes = sizes.get("asked"), sizes.get("free")
    reason = message.partition("\n")[0] or "ran out of memory"
    if asked_bytes is not None:
        reason = f"an allocation of {mebibytes(asked_bytes)} failed"
        if free_bytes is not None and free_bytes < asked_bytes:  # under a limit the free memory does not matter
            reason += f" with {mebibytes(free_bytes)} free"
    return reason if missing_bytes is None else f"{reason}, at least {mebibytes(missing_bytes)} too large"


def oom_verdict(reason: str, candidate: Candidate) -> str:
    """Return why a candidate that ran out of memory is too large: the reason of its attempt, and the prediction."""
    predicted_bytes = candidate.predicted_bytes
    return reason if predicted_bytes is None else f"{reason}; predicted {mebibytes(predicted_bytes)}"


def unneeded_levers(
    question: BestQuestion, candidates: Sequence[Candidate], unfit: Collection[int] = ()
) -> dict[int, str]:
    """Return the candidates with a lever that saves memory where all else fits without it, each with the reason.

    `unfit` did not fit when they ran. A request that names its knobs has none.
    """
    if not question.is_default_vary:
        return {}
    fitting = {
        (*candidate.knobs.items(),): candidate
        for number, candidate in enumerate(candidates)
        if candidate.excluded_as is None and candidate.excess_bytes is None and number not in unfit
    }
    reasons: dict[int, str] = {}
    for number, candidate in enumerate(candidates):
        for name in MEMORY_LEVERS:
            plain, value = LEVERS[name].plain, candidate.knobs.get(name, LEVERS[name].plain)
            without = fitting.get((*{**candidate.knobs, name: plain}.items(),))
            if value != plain and without is not None:
                fits = f"{name}={plain} is not too large"
                if without.predicted_bytes is None:
                    fits = f"nothing says that {name}={plain} is too large"
                reasons[number] = f"{name}={value} saves memory alone, and {fits}"
    return reasons


MIN_TRIAL_STEPS = UNTIMED_TRIAL_STEPS + MIN_TIMED_STEPS
"""Steps of the shortest trial."""


@dataclass(frozen=True)
class BestPlan:
    """A checked best-fit search."""

    question: BestQuestion
    """The first journal line, without its search's id and its key, which `open_best` adds."""
    survey: Survey
    plan: RunPlan
    """The plan of the preset's own run; with `--global-batch` the baseline is that run with another batch."""
    space: Space
    """The candidates, without predictions."""
    facts: Facts | None = None
    """Facts that the compatibility rules of a preset's model use."""
    plan_script_run: searches.ScriptPlanner | None = None
    """Plans the run of a script with further knobs; None for a preset's model."""

    @property
    def legal_count(self) -> int:
        """Number of candidates that can run here."""
        return len(self.survey.legal_specs(self.space))

    def plan_of(self, candidate: Candidate, *, under_memory_limit: bool = False, **knobs: KnobValue) -> RunPlan:
        """Return the plan of a candidate's run with further knobs. Raises UserError.

        A script's run is always under the search's limit, a model's under its `memory_limit` or none.
        """
        if self.plan_script_run is not None:
            plan = self.plan_script_run({**candidate.knobs, **knobs})
            limits_bytes = tuple(self.question.limits_bytes) or None
            return replace(plan, search_id=self.question.search_id, memory_limit_bytes=limits_bytes)
        limit = self.survey.spec.knobs["memory_limit"] if under_memory_limit else None
        spec = self.survey.run_of(candidate.knobs).with_overrides(memory_limit=limit, **knobs)
        # Every process takes the same GPUs, even if others have more free memory by now.
        uuids = self.question.device_uuids
        own_uuids = uuids[: device_count(spec, self.survey.machine)] if uuids else ()
        plan = planning.plan_run(spec, self.plan.python, own_uuids, placement=self.plan.placement)
        return replace(plan, search_id=self.question.search_id)

    def predict_candidates(self, cancelled: threading.Event, ceiling: Ceiling | None = None) -> Space:
        """Return the candidates of a model with their predicted memory, and their work at the speeds of a `ceiling`.

        Models are traced until `cancelled` is set.
        """
        assert self.facts is not None, "the memory of a script is unknown"
        plan, survey = self.plan, self._asking_the_model()
        space = self.space if survey is self.survey else _space_of(self.question, survey)
        space = self._with_predictions(space, cancelled, ceiling)
        candidate, share = space.candidates[space.baseline_number], None
        model_of = cached_models(plan.device, plan.python, next(iter(plan.device_names), None))
        baseline = self.survey.run_of(candidate.knobs)
        if candidate.host_s and (model := model_of(baseline)) is not None:
            share = attention_share(self.facts.config, baseline, model)
        return msgspec.structs.replace(space, attention_share=share)

    def grow(self, cancelled: threading.Event, space: Space, number: int, ceiling: Ceiling | None = None) -> Space:
        """Return a space of stages with the candidates around one of its own, predicted as the others are."""
        sizes = GlobalBatch(self.survey, self.question.vary, self.question.global_batch)
        known, survey = {(*one.knobs.items(),) for one in space.candidates}, self._asking_the_model()
        added = [one for one in sizes.around(space.candidates[number].knobs) if (*one.items(),) not in known]
        added = added if len(known) + len(added) <= MAX_CANDIDATES else []
        candidates = [*space.candidates, *(_candidate(survey, knobs) for knobs in added)]
        space = msgspec.structs.replace(space, candidates=candidates, around=[*space.around, number])
        return space if self.facts is None else self._with_predictions(space, cancelled, ceiling)

    def _asking_the_model(self) -> Survey:
        """Return the survey whose check knows the model's own kernels, if some value of `attention` needs them."""
        spec, asked = self.survey.spec, self.question.vary.get("attention", [self.survey.spec.knobs["attention"]])
        if self.facts is None or not set(asked) - set(EVERY_MODELS_ATTENTION):
            return self.survey
        inspected = warm_python.inspect(self.plan.python, spec.model, spec.data["objective"], attention=True)
        return replace(
            self.survey, check=_check_of(replace(self.facts, attentions=inspected.attentions), self.plan.placement)
        )

    def _with_predictions(self, space: Space, cancelled: threading.Event, ceiling: Ceiling | None) -> Space:
        """Return the space with predictions of the baseline, and of each candidate that needs its `MEMORY_LEVERS`.

        Those with fewer levers come first, as they tell whether one more is needed.
        """
        plan, candidates = self.plan, list(space.candidates)
        unpredicted: list[dict[int, RunSpec]] = [{} for _ in range(len(MEMORY_LEVERS) + 1)]
        for number, spec in self.survey.legal_specs(space).items():
            if spec.knobs["strategy"] in PREDICTED_STRATEGIES and candidates[number].predicted_bytes is None:
                unpredicted[sum(spec.knobs[name] != LEVERS[name].plain for name in MEMORY_LEVERS)][number] = spec
        for specs in unpredicted:
            unneeded = unneeded_levers(self.question, candidates).keys() - {space.baseline_number}
            specs = {number: spec for number, spec in specs.items() if number not in unneeded}
            with suppress(ProgramCancelled, UserError):  # candidates without a model are tried unpredicted
                wanted, gpus = [*specs.values()], plan.device_uuids
                for _ in trace_models(wanted, plan.device, plan.python, cancelled=cancelled, gpus=gpus):
                    pass  # the model is in the cache now, or cannot be traced
            self._predict(candidates, specs, space.baseline_number, ceiling)
        return msgspec.structs.replace(space, candidates=candidates)

    def _predict(
        self, candidates: list[Candidate], specs: Mapping[int, RunSpec], baseline_number: int, ceiling: Ceiling | None
    ) -> None:
        """Put the predictions of the traced ones of `specs` into `candidates`."""
        plan = self.plan
        model_of = cached_models(plan.device, plan.python, next(iter(plan.device_names), None))
        limit_bytes = min(plan.memory_limit_bytes or (), default=None)
        free_bytes = read_host_free_bytes() if plan.device == CPU else 0
        for number, spec in specs.items():
            if (model := model_of(spec)) is None:
                continue
            candidate = candidates[number]
            prediction = model.predict(spec, candidate.world_size)
            needed_bytes = prediction.total_bytes + (prediction.context_bytes or 0)
            if plan.device == CPU and (limit_bytes is None or candidate.world_size * limit_bytes > free_bytes):
                # All ranks share the free memory.
                limit: int | None = searches.share_of_free(free_bytes, candidate.world_size)
            else:
                limit = lowest(gpu.memory_free_bytes for gpu in plan.gpus) if limit_bytes is None else limit_bytes
            figures: dict[str, Any] = {"predicted_bytes": needed_bytes}
            if ceiling is not None:
                devices = self.survey.count(device_count, spec)
                figures |= traced_parts_s(spec, model, devices, self.survey.machine.cores, ceiling)
            if limit is not None and needed_bytes > limit:
                figures["excess_bytes"] = excess_bytes = needed_bytes - limit
                # The baseline is tried all the same: its run shows the error of the prediction.
                if number != baseline_number:
                    needs = f"needs {mebibytes(needed_bytes)} of {mebibytes(limit)}"
                    reason = f"{needs}: {mebibytes(excess_bytes)} too large"
                    figures |= {"excluded_as": TOO_LARGE, "reason": reason}
            candidates[number] = msgspec.structs.replace(candidate, **figures)


def attention_share(config: Mapping[str, Any], spec: RunSpec, model: MemoryModel) -> float | None:
    """Return the share of a step's FLOPs in which tokens attend to tokens; None if the configuration lacks a field."""
    layers, hidden = (config.get(name) for name in ("num_hidden_layers", "hidden_size"))
    batch, accum, tokens = (whole_number(spec.knobs, name) for name in (*BATCH_KNOBS, "seq_len"))
    flops = step_work(model, batch, accum).flops
    if not (isinstance(layers, int) and isinstance(hidden, int) and flops):
        return None
    # Two products forward and four backward, of 2 FLOPs an element (torchtitan's formula).
    return 12.0 * layers * hidden * tokens**2 * batch * accum / flops


def with_seen_samples(space: Space, trial: Trial) -> Space:
    """Return a script's candidates with the samples of a step as the first trial saw them."""
    asked_samples, seen_samples = space.candidates[trial.candidate_number].samples_per_step, trial.samples_per_step
    candidates = [
        msgspec.structs.replace(each, samples_per_step=max(1, each.samples_per_step * seen_samples // asked_samples))
        for each in space.candidates
    ]
    return msgspec.structs.replace(space, candidates=candidates)


def _frees_batch(request: BestRequest) -> bool:
    """True if a request varies the batch and names no global batch."""
    return request.global_batch is None and any(name in request.vary for name in BATCH_KNOBS)


def _check_request(request: BestRequest, plan: RunPlan) -> None:
    """Raise UserError for an objective that does not exist, cannot be measured here, or compares unequal work."""
    objective = request.objective
    if objective not in SEARCH_OBJECTIVES:
        raise UserError(
            f"--objective {objective}: no such objective",
            key="--objective",
            allowed=SEARCH_OBJECTIVES,
            nearest=nearest(objective, SEARCH_OBJECTIVES),
        )
    if objective == "time" and request.for_steps is None:
        raise UserError("--objective time needs --for-steps N, the length of the training", key="--for-steps")
    if objective == "time" and _frees_batch(request):
        problem = "--objective time compares equal numbers of steps: it needs --global-batch N"
        raise UserError(problem, key="--global-batch")
    if objective != "time" and request.for_steps is not None:
        raise UserError(f"--for-steps needs --objective time, not {objective}", key="--for-steps")
    has_counter = any(gpu.energy_mj is not None or gpu.power_w is not None for gpu in plan.watched)
    if objective == "samples_per_joule" and not has_counter:
        problem = "--objective samples_per_joule needs a GPU with an energy counter, and this run watches none"
        raise UserError(problem, key="--objective", nearest="samples_per_s")
    for name, value in (("--global-batch", request.global_batch), ("--for-steps", request.for_steps)):
        if value is not None and value < 1:
            raise UserError(f"{name} {value}: at least 1", key=name)


def plan_spec_best(spec: RunSpec, request: BestRequest, python: str | None = None) -> BestPlan:
    """Check a question about a preset or a script against this machine. Raises UserError; starts nothing."""
    if spec.script is None:
        return plan_preset_best(spec, request, python)
    return plan_script_best(spec.script, settings_of(spec.knobs, spec.overrides), request, python)


def plan_preset_best(
    spec: RunSpec, request: BestRequest, python: str | None = None, hosts: Sequence[Host] = ()
) -> BestPlan:
    """Check a question against this machine and the training Python. Raises UserError; starts nothing.

    With `hosts` every candidate runs on all of them.
    """
    spec = recorded = replace(spec, data=expand_paths(spec.data))
    # `devices` is a ceiling: the preset's own run may use fewer.
    plan = planning.plan_run(searches.candidate_spec(spec, {}), python, hosts=hosts)
    _check_request(request, plan)
    inspected = warm_python.inspect(plan.python, spec.model, spec.data["objective"])
    machine = detect_machine(inspected.versions).used_by(spec.knobs["devices"])
    if plan.placement is not None:
        machine, spec = plan.placement.machine(machine), plan.placement.spec(spec)
    facts = Facts(
        spec, machine, inspected.config, inspected.versions, inspected.executable, families=inspected.families
    )
    survey = Survey(spec, machine, _check_of(facts, plan.placement))
    question = _question(recorded, survey, plan, request, plan.memory_limit_bytes or ())
    space = _space_of(question, survey)
    question = msgspec.structs.replace(question, device_uuids=_gpus_of(survey, plan, space))
    return BestPlan(question, survey, plan, space, facts)


def _check_of(facts: Facts, placement: Placement | None) -> Callable[[RunSpec], None]:
    """Return the check of a run by the compatibility rules; on several nodes a run has the devices of all."""
    return lambda spec: check(replace(facts, spec=spec if placement is None else placement.spec(spec)))


def _gpus_of(survey: Survey, plan: RunPlan, space: Space) -> list[str]:
    """Return the UUIDs of the GPUs for the whole search: those of the candidate that uses most; empty on a CPU.

    Those of the preset's own run come first.
    """
    if survey.machine.device != "cuda":
        return []
    specs = [survey.run_of({}), *survey.legal_specs(space).values()]
    meshes = {tuple(spec.knobs[name] for name in MESH_KNOBS): spec for spec in specs}
    widest = max(meshes.values(), key=lambda spec: device_count(spec, survey.machine))
    uuids = [gpu.uuid for gpu in chosen_gpus(widest.knobs, survey.machine) if gpu.uuid]
    return [*dict.fromkeys((*plan.device_uuids, *uuids))][: len(uuids)]


def plan_script_best(
    preset: ScriptPreset, settings: Sequence[str], request: BestRequest, python: str | None = None
) -> BestPlan:
    """Check a question about a script against this machine. Raises UserError; starts nothing."""
    plan_script_run = searches.script_planner(preset, settings, python, SET_BY_A_SEARCH)
    plan = plan_script_run({"steps": MIN_TRIAL_STEPS, "timing_warmup": UNTIMED_TRIAL_STEPS})
    _check_request(request, plan)
    named = {name: value for name, value in plan.spec.knobs.items() if name not in LAUNCH_KNOBS}
    # The ranks of a script's launcher share its global batch as those of ddp do.
    ranks: KnobValues = {"strategy": "single", "devices": None}
    if plan.world_size > 1:
        devices: KnobValue = plan.world_size if plan.device != CPU else f"{CPU}:{plan.world_size}"
        ranks = {"strategy": "ddp", "devices": devices}

    def check_script(spec: RunSpec) -> None:
        """Raise UserError for a value that cannot be passed to the script, or that nothing can confirm."""
        if spec.knobs["precision"] == "tf32" and "precision" not in preset.flag_words:
            raise UserError("nothing in a script shows that tf32 ran", key="precision")
        asked = {name: value for name in named if has_flag(name, value := spec.knobs[name], preset)}
        preset.applied(list(preset.command), asked)

    # Knobs that the preset does not name have their defaults.
    spec = replace(plan.spec, knobs={**defaults(), **named, **ranks})
    machine = detect_machine(plan.versions).used_by(plan.spec.knobs.get("devices"))
    survey = Survey(spec, machine, check_script, is_script=True)
    _check_answerable(request, [*named], preset)
    has_batch = all(name in named for name in BATCH_KNOBS)
    entries = [KNOBS_BY_NAME[name] for name in named if has_batch or name not in BATCH_KNOBS]
    limits_bytes = searches.limits_of(plan).by_rank
    question = _question(plan.spec, survey, plan, request, limits_bytes, entries, has_batch=has_batch)
    if not request.vary:
        left_alone = question.left_alone | _unnamed_knobs(preset, [*named])
        question = msgspec.structs.replace(question, left_alone=left_alone)
    if not question.vary:
        raise UserError(
            f"{preset.name} names the present value of no knob that keeps its training the same",
            key="--vary",
            option=f"trainfast-tui search best {preset.name} --set batch_size=8 --vary batch_size=4,8,16",
        )
    space = _space_of(question, survey)
    return BestPlan(question, survey, plan, space, plan_script_run=plan_script_run)


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


def _unnamed_knobs(preset: ScriptPreset, named_knobs: Sequence[str]) -> dict[str, str]:
    """Return the mapped knobs that are left alone because a present value is missing, with the reasons."""
    reasons = {
        name: UNNAMED_REASON
        for name in preset.flag_words
        if name not in named_knobs and KNOBS_BY_NAME[name].search_values
    }
    for name, other in (BATCH_KNOBS, BATCH_KNOBS[::-1]):
        if name in named_knobs and other not in named_knobs:
            reasons[name] = f"without a named {other} another value changes the global batch"
    return reasons


def _question(
    spec: RunSpec,
    survey: Survey,
    plan: RunPlan,
    request: BestRequest,
    limits_bytes: Sequence[int],
    entries: Iterable[Knob] = KNOBS,
    *,
    has_batch: bool = True,
) -> BestQuestion:
    """Return the first line of a search's journal, without its id and key; `spec` are the settings it records.

    Every candidate keeps the preset's global batch, or the requested one, unless the batch is varied or unknown.
    """
    batch = request.global_batch or default_global_batch(survey)
    vary, left_alone = vary_of(survey, request.vary, batch, entries)
    return BestQuestion(
        **spec.record_fields(),
        objective=request.objective,
        for_steps=request.for_steps,
        budget_s=request.budget_s,
        vary=vary,
        left_alone=left_alone,
        is_default_vary=not request.vary,
        global_batch=batch if has_batch and not _frees_batch(request) else None,
        device=plan.device,
        device_names=plan.device_names,
        limits_bytes=list(limits_bytes),
    )


MutableVary = dict[str, list[KnobValue]]
"""The values of each varied knob; illegal ones are removed."""
NOT_A_SPEED = "it does not change the speed of a step"
NEVER_VARIED = {
    "devices": "it is a ceiling: vary strategy",
    "seq_len": "samples of another length are other work",
    "memory_limit": "it is the limit that every setting has to keep",
    **dict.fromkeys(("steps", "timing_warmup", "watch"), NOT_A_SPEED),
}
"""Knobs that cannot be varied, each with the reason."""


def vary_of(
    survey: Survey, requested: Mapping[str, Sequence[object]], global_batch: int, entries: Iterable[Knob] = KNOBS
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
        present_value = survey.spec.knobs[entry.name]
        if not entry.equivalent_values:
            left_alone[entry.name] = entry.training
        elif not all(entry.keeps_training(present_value, value) for value in entry.search_values):
            left_alone[entry.name] = f"{entry.text_of(present_value)} trains differently from its other values"
        elif entry.name in LEVERS and not LEVERS[entry.name].phases:
            left_alone[entry.name] = f"it acts on no part of a step; --vary {entry.name}=... names it"
        elif entry.name == "pin_memory" and survey.machine.used_by(survey.spec.knobs["devices"]).device == "cpu":
            left_alone[entry.name] = "a run on the CPU copies nothing to a GPU"
        elif entry.search_values:
            vary[entry.name] = _values(entry, present_value, global_batch)
    _drop_illegal(survey, vary, left_alone)
    occurring = GlobalBatch(survey, vary, global_batch).occurring_values()
    return {name: values for name, values in occurring.items() if len(values) > 1}, left_alone


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


def _drop_illegal(survey: Survey, vary: MutableVary, left_alone: dict[str, str]) -> None:
    """Leave out the values that cannot run here with any precision, or are not worth a trial on this machine."""
    precisions, cores = list(vary.get("precision", [survey.spec.knobs["precision"]])), survey.machine.cores

    def reason_against(name: str, value: KnobValue) -> str | None:
        if name == "workers" and isinstance(value, int) and value > cores:
            return f"there are {cores} cores"
        if name == "strategy" and not _has_several_devices(survey, value):
            return "the run has one device"
        if name == "precision" and value == "fp16" and "bf16" in vary["precision"]:
            return "bf16 runs here and needs no loss scaling"
        if name == "batch_size":
            return None
        refusals = [survey.refusal(survey.run_of({"precision": precision, name: value})) for precision in precisions]
        messages = [refusal.message for refusal in refusals if refusal is not None]
        return messages[0] if messages and len(messages) == len(refusals) else None

    for name, values in vary.items():
        # bf16 is judged before fp16, which gives way to it.
        for value in sorted((value for value in values if value != survey.spec.knobs[name]), key=str):
            reason = reason_against(name, value)
            if reason is not None:
                left_alone[f"{name}={KNOBS_BY_NAME[name].text_of(value)}"] = reason
                values.remove(value)


def _has_several_devices(survey: Survey, strategy: KnobValue) -> bool:
    """True if the run may use several devices, or the strategy needs one only."""
    knobs = survey.spec.knobs
    if STRATEGIES[str(strategy)].one_device:
        return True
    if survey.machine.used_by(knobs["devices"]).device == "cpu" and strategy_of(knobs).one_device:
        # A CPU runs any number of processes, so several count only if asked for.
        return (count_asked(knobs["devices"]) or 1) > 1
    return survey.count(world_size, survey.run_of({"strategy": strategy})) > 1


def open_best(best_plan: BestPlan, home: Home, options: searches.SearchOptions) -> Path:
    """Return the directory of the search this question continues, or of a new one with its first line written."""
    return searches.open_search(best_plan.question, best_key(best_plan), home, options)


def best_key(best_plan: BestPlan) -> str:
    """Return the key of a question, with its varied values."""
    question = best_plan.question
    asked = question.vary, question.global_batch, question.objective, question.for_steps, question.budget_s
    return searches.key_of_question(question, best_plan.plan, best_plan.survey.machine.gpus, SET_BY_A_SEARCH, asked)

"""The question of a best-fit search: its first journal line and its candidates, the search it continues, and its cost.

Without a global batch the preset's own is kept, so that the training stays the same, unless the batch is varied.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.machine.cpu import others_cores
from trainfast_runner.machine.devices import Machine, detect_machine
from trainfast_runner.machine.devices_knob import CPU, count_asked
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.records.run_file import ClockAnchor
from trainfast_runner.results.bottleneck_rules import OTHERS_CPU_PERCENT
from trainfast_runner.results.summary import read_start_s
from trainfast_runner.running import planning
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.best.candidates import (
    MAX_CANDIDATES,
    MIN_TRIAL_STEPS,
    UNTIMED_TRIAL_STEPS,
    GlobalBatch,
    ModelSurvey,
    Refuse,
    ScriptSurvey,
    Survey,
    default_global_batch,
    processes_of,
)
from trainfast_runner.search.best_journal import (
    SEARCH_OBJECTIVES,
    UNNAMED_REASON,
    BestQuestion,
    BestRequest,
    Space,
)
from trainfast_runner.search.effects import GUESSED_START_S
from trainfast_runner.search.fitted_memory import limits_of
from trainfast_runner.search.journal import JournalWriter
from trainfast_runner.search.predicted_speed import with_predicted_speed
from trainfast_runner.search.searches import (
    BATCH_KNOBS,
    BEST_KIND,
    MESH_KNOBS,
    SearchOptions,
    candidate_spec,
    key_of_question,
    knobs_key,
    new_search,
    script_planner,
    unfinished,
)
from trainfast_runner.settings.device_counts import chosen_gpus, device_count
from trainfast_runner.settings.knob_values import Knob, KnobValue
from trainfast_runner.settings.knobs import KNOBS, KNOBS_BY_NAME, knob, settings_of
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.script_reach import FRAMEWORK_KNOBS, check_reach
from trainfast_runner.settings.spec import SET_BY_A_SEARCH, RunSpec, expand_paths, strategy_of
from trainfast_runner.worker.catalog import STRATEGIES


def check_request(request: BestRequest, plan: RunPlan) -> None:
    """Raise UserError for an objective that does not exist, cannot be measured here, or compares unequal work."""
    if request.objective not in SEARCH_OBJECTIVES:
        raise UserError(
            f"--objective {request.objective}: no such objective",
            key="--objective",
            allowed=SEARCH_OBJECTIVES,
            nearest=nearest(request.objective, SEARCH_OBJECTIVES),
        )
    if "seq_len" in request.vary and request.objective != "tokens_per_s":
        raise UserError(
            f"samples of another seq_len are other work: {request.objective} cannot compare them",
            key="--objective",
            advice="the objective tokens_per_s",
            option="--objective tokens_per_s",
        )
    if request.objective == "time":
        _check_time(request)
    elif request.for_steps is not None:
        raise UserError(f"--for-steps needs --objective time, not {request.objective}", key="--for-steps")
    has_counter = any(gpu.energy_mj is not None or gpu.power_w is not None for gpu in plan.watched)
    if request.objective == "samples_per_joule" and not has_counter:
        raise UserError(
            "--objective samples_per_joule needs a GPU with an energy counter, and this run watches none",
            key="--objective",
            nearest="samples_per_s",
        )
    for name, value in (("--global-batch", request.global_batch), ("--for-steps", request.for_steps)):
        if value is not None and value < 1:
            raise UserError(f"{name} {value}: at least 1", key=name)


def _check_time(request: BestRequest) -> None:
    if request.for_steps is None:
        raise UserError("--objective time needs --for-steps N, the length of the training", key="--for-steps")
    if request.global_batch is None and any(name in request.vary for name in BATCH_KNOBS):
        raise UserError(
            "--objective time compares equal numbers of steps: it needs --global-batch N", key="--global-batch"
        )


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
    preset_batch = default_global_batch(survey.spec, survey.machine)
    batch = request.global_batch or preset_batch
    vary, left_alone = vary_of(survey.spec, request.vary, survey.machine, batch, survey.refuse, entries)
    is_varied = request.global_batch is None and any(name in request.vary for name in BATCH_KNOBS)
    return BestQuestion(
        search_id="",
        key="",
        **spec.record_fields(),
        objective=request.objective,
        for_steps=request.for_steps,
        budget_s=request.budget_s,
        vary=vary,
        left_alone=left_alone | (unnamed or {}),
        global_batch=batch if survey.has_batch and not is_varied else None,
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
    if request.objective == "tokens_per_s":
        raise UserError(
            "--objective tokens_per_s: no hook sees how many tokens a script's sample has",
            key="--objective",
            nearest="samples_per_s",
        )
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
        elif entry.search_values and not all(
            entry.keeps_training(present_value, value) for value in entry.search_values
        ):
            left_alone[entry.name] = f"{entry.text_of(present_value)} trains differently from its other values"
        elif entry.search_values:
            vary[entry.name] = _values(entry, present_value, global_batch)
    on_cpu = machine.used_by(spec.knobs["devices"]).device == "cpu"
    if on_cpu and vary.pop("pin_memory", None) is not None:
        left_alone["pin_memory"] = "a run on the CPU copies nothing to a GPU"
    _drop_illegal(spec, vary, left_alone, machine, refuse)
    vary = GlobalBatch(spec, machine, vary, global_batch).occurring_values()
    for name in [name for name, values in vary.items() if len(values) < 2]:
        del vary[name]
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


RUNS_READ_FOR_STARTS, ENOUGH_STARTS = 50, 3
"""Number of newest runs searched for similar starts, and number of starts that is enough."""
OTHERS_SEEN_S = 0.3
"""Seconds over which the load of others is measured."""
COLD_RUNS = 6
"""Cold runs of a search: two of the winner, two of the baseline, about two of the winner with a knob turned back."""
MIN_TRIAL_S = 1.0
"""Seconds of a warm trial without the start of its process, as of tiny models."""


@dataclass(frozen=True)
class Estimate:
    """The candidates of a search, and its expected time."""

    vary: dict[str, list[KnobValue]]
    left_alone: dict[str, str]
    global_batch: int | None
    candidates: int
    legal: int
    dropped: int
    processes: int
    """The fewest processes that run every value of every knob once."""
    cold_runs: int
    start_s: float
    """Seconds of the start of a process."""
    basis: str
    """The source of `start_s`, in words."""
    seconds: float
    """Seconds of the trials, within the budget, and of the cold runs."""
    grid_s: float
    """Seconds of a process for each legal candidate."""
    others_cpu_percent: float | None
    """The share of the CPU that others take now, which slows the trials; None if small, unknown, or on a GPU."""
    tries: int
    """About the number of candidates that the budget tries."""


def estimate(best_plan: BestPlan, home: Home) -> Estimate:
    """Return the number of candidates and the expected time; the trials end within the budget."""
    others_percent = _others_percent(best_plan.plan.device)
    question, space = best_plan.question, best_plan.space
    legal = [candidate for candidate in space.candidates if candidate.excluded_as is None]
    names = legal[0].knobs if legal else {}
    values = {name: {repr(candidate.knobs[name]) for candidate in legal} for name in names}
    in_process = {name: {repr(candidate.process_knobs.get(name)) for candidate in legal} for name in names}
    trials = 1 + sum(len(each) - 1 for each in values.values())
    processes = min(
        1 + sum(len(each) - 1 for each in in_process.values()),
        len({knobs_key(candidate.process_knobs) for candidate in legal}),
    )
    start_s, basis = _start(best_plan, home)
    trial_s = max(MIN_TRIAL_S, _baseline_trial_s(best_plan, home))
    # The first trial takes a process's start; each later trial takes its share of the other starts.
    per_trial_s = trial_s + start_s * (processes - 1) / max(1, trials - 1)
    left_s = question.budget_s * (1 - (others_percent or 0.0) / 100) - (start_s + trial_s)
    tries = min(len(legal), 1 + int(max(0.0, left_s) / per_trial_s))
    trials_s = start_s + trial_s + (min(trials, tries) - 1) * per_trial_s
    return Estimate(
        vary=question.vary,
        left_alone=question.left_alone,
        global_batch=question.global_batch,
        candidates=len(space.candidates),
        legal=len(legal),
        dropped=space.dropped,
        processes=processes,
        cold_runs=COLD_RUNS,
        start_s=start_s,
        basis=basis,
        seconds=trials_s + COLD_RUNS * (start_s + trial_s),
        grid_s=len(legal) * (start_s + trial_s),
        others_cpu_percent=others_percent,
        tries=tries,
    )


def _others_percent(device: str) -> float | None:
    cores = others_cores(OTHERS_SEEN_S) if device == CPU else None
    percent = 0.0 if cores is None else min(100.0, 100 * cores / len(os.sched_getaffinity(0)))
    return percent if percent >= OTHERS_CPU_PERCENT else None


def _baseline_trial_s(best_plan: BestPlan, home: Home) -> float:
    """Return the seconds of the baseline's shortest trial at its predicted speed; 0 without a prediction.

    Trials run without `memory_limit`.
    """
    baseline = best_plan.space.candidates[best_plan.space.baseline_number]
    baseline_spec = candidate_spec(best_plan.survey.spec, baseline.knobs).with_overrides(memory_limit=None)
    speed = with_predicted_speed(dataclasses.replace(best_plan.plan, spec=baseline_spec), home).predicted_speed
    return 0.0 if speed is None else MIN_TRIAL_STEPS * baseline.samples_per_step / speed.median


def _start(best_plan: BestPlan, home: Home) -> tuple[float, str]:
    """Return the seconds from the start of a process of this model or script to its steady steps, and their source."""
    question, is_script = best_plan.question, best_plan.plan.script is not None
    starts_s: list[float] = []
    for directory in map(home.directory, home.newest_run_ids(RUNS_READ_FOR_STARTS)):
        run = read_run_file(directory)
        if run is None or run.device != best_plan.plan.device or (run.script is not None) != is_script:
            continue
        is_same = run.preset == question.preset if is_script else run.model == question.model
        if is_same and len(starts_s) < ENOUGH_STARTS and (start_s := read_start_s(directory)):
            starts_s.append(start_s)
    subject = "script" if is_script else "model"
    if not starts_s:
        return GUESSED_START_S, f"assumed: no run of this {subject} was timed here"
    count = "a run" if len(starts_s) == 1 else f"{len(starts_s)} runs"
    return statistics.median(starts_s), f"as {count} of this {subject} took"

"""Open a best-fit search: an unfinished one of the same question, or a new one; estimate its time before it starts."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cpu import others_cores
from trainfast_runner.machine.devices_knob import CPU
from trainfast_runner.records.home import Home, newest_search_directories
from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.records.run_file import SCHEMA, RunFile
from trainfast_runner.results.bottleneck_rules import OTHERS_CPU_PERCENT
from trainfast_runner.results.summary import read_start_s
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.best.candidates import MIN_TRIAL_STEPS
from trainfast_runner.search.best.plan import BestPlan
from trainfast_runner.search.best.trial import USUAL_DISTURBANCES
from trainfast_runner.search.best_journal import BestEnded, BestQuestion, EarlierEffect, read_best_journal
from trainfast_runner.search.journal import JournalWriter
from trainfast_runner.search.measured_speeds import GUESSED_START_S
from trainfast_runner.search.predicted_speed import with_predicted_speed
from trainfast_runner.search.searches import (
    BEST_KIND,
    SearchOptions,
    candidate_spec,
    first_line,
    key_of_question,
    knobs_key,
    new_search,
    unfinished,
)
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.spec import SET_BY_A_SEARCH
from trainfast_runner.units import duration


def open_best(best_plan: BestPlan, home: Home, options: SearchOptions) -> Path:
    """Return the directory of the search this question continues, or of a new one with its first line written.

    Raises UserError if the budget of a new search does not pay for the baseline by the figures of earlier runs.
    """
    home.create()
    key = best_key(best_plan)
    unfinished_search = find_unfinished(best_plan, home, options)
    if unfinished_search is not None:
        return unfinished_search
    check_new_budget(best_plan, home)
    directory = new_search(home, best_plan.question.name)
    journal = JournalWriter(directory)
    # A script has no model by which its searches could be compared.
    ignores_earlier = options.fresh or best_plan.plan.script is not None
    earlier = [] if ignores_earlier else earlier_effects(home, best_plan.question, own_directory=directory)
    journal.write(msgspec.structs.replace(best_plan.question, search_id=directory.name, key=key, earlier=earlier))
    journal.close()
    return directory


def find_unfinished(best_plan: BestPlan, home: Home, options: SearchOptions) -> Path | None:
    """Return the directory of the unfinished search that this question continues; None for a new search."""
    return None if options.fresh else unfinished(home, best_key(best_plan), BEST_KIND)


def check_new_budget(best_plan: BestPlan, home: Home) -> None:
    """Raise UserError if the budget does not pay for the baseline by the figures of earlier runs."""
    plan, samples_per_step = baseline_trial(best_plan)
    check_budget(best_plan.question.budget_s, plan, samples_per_step, home)


def baseline_trial(best_plan: BestPlan) -> tuple[RunPlan, int]:
    """Return the plan of the baseline's trial, which runs without `memory_limit`, and the samples of its step."""
    baseline = best_plan.space.candidates[best_plan.space.baseline_number]
    baseline_spec = candidate_spec(best_plan.survey.spec, baseline.knobs).with_overrides(memory_limit=None)
    return dataclasses.replace(best_plan.plan, spec=baseline_spec), baseline.samples_per_step


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
BUDGET_PER_COST = 5
"""Chosen, not measured: a suggested budget is this many times the cost of the baseline."""
START_KNOBS = ("strategy", "engine", "compile")
"""The knobs that change the start of a process by many seconds."""


def earlier_starts(home: Home, is_alike: Callable[[RunFile], bool]) -> list[float]:
    """Return the start times in seconds of the newest similar runs, at most `ENOUGH_STARTS`; empty without any.

    Raises UserError when the home cannot be listed.
    """
    starts_s: list[float] = []
    for directory in map(home.directory, home.newest_run_ids(RUNS_READ_FOR_STARTS)):
        run = read_run_file(directory)
        if run is not None and is_alike(run) and (seconds := read_start_s(directory)):
            starts_s.append(seconds)
        if len(starts_s) == ENOUGH_STARTS:
            break
    return starts_s


def check_budget(budget_s: float, plan: RunPlan, samples_per_step: int, home: Home) -> None:
    """Raise UserError if the start of the baseline's process and the steps of its trial take longer than the budget.

    The shortest earlier start counts, and the highest predicted speed. Without an earlier start nothing is refused.
    """
    starts_s = earlier_starts(home, lambda run: _starts_alike(run, plan))
    if not starts_s:
        return
    shortest_s = min(starts_s)
    steps_s = trial_seconds(plan, samples_per_step, home) or 0.0
    cost_s = shortest_s + steps_s
    if cost_s > budget_s:
        steps_text = f", {MIN_TRIAL_STEPS} steps take {steps_s:.1f} s" if steps_s else ""
        raise budget_error(budget_s, cost_s, f": a process starts in {shortest_s:.1f} s{steps_text}")


def trial_seconds(plan: RunPlan, samples_per_step: int, home: Home) -> float | None:
    """Return the seconds of a trial's fewest steps at the highest predicted speed; None without a prediction."""
    speed = with_predicted_speed(plan, home).predicted_speed
    return None if speed is None else MIN_TRIAL_STEPS * samples_per_step / speed.high


def budget_error(budget_s: float, cost_s: float, detail: str) -> UserError:
    """Return the refusal of a budget below the cost of the baseline.

    `detail` is appended to the message, punctuation included.
    """
    suggested_s = BUDGET_PER_COST * cost_s
    return UserError(
        f"the budget of {duration(budget_s)} is below the cost of the baseline{detail}",
        key="--budget",
        advice=f"a budget of {duration(suggested_s)} or more",
        option=f"--budget {suggested_s:.0f}s or more",
    )


def _starts_alike(run: RunFile, plan: RunPlan) -> bool:
    """True if a run is of the plan's model and device, and its process starts in the same way."""
    knobs = plan.spec.knobs
    return (
        run.script is None
        and (run.model, run.device, run.device_names) == (plan.spec.model, plan.device, plan.device_names)
        and all(run.knobs.get(name) == knobs[name] for name in START_KNOBS)
    )


SEARCHES_READ_FOR_EFFECTS = 50
"""Number of newest searches whose effects are read."""


def earlier_effects(home: Home, question: BestQuestion, own_directory: Path) -> list[EarlierEffect]:
    """Return the newest effect of each value of a varied knob, by answered searches other than `own_directory`.

    Only searches of the same model, data, objective and device names count, and only gains of the rate in samples/s or
    samples/J: not those of `time`, which includes process starts, nor of seq_len, which are in tokens/s.
    Raises UserError when the searches cannot be listed.
    """
    if question.objective == "time":
        return []
    effects: dict[tuple[str, str], EarlierEffect] = {}
    for directory in newest_search_directories(home, SEARCHES_READ_FOR_EFFECTS):
        if directory == own_directory or first_line(directory).kind != BEST_KIND:
            continue
        lines = read_best_journal(directory)
        end = newest(lines, BestEnded)
        earlier_question = lines[0] if lines else None
        if not isinstance(earlier_question, BestQuestion) or not _is_same_training(earlier_question, question):
            continue
        if end is None or end.state != "answered" or end.answer is None:
            continue
        for effect in end.answer.effects:
            # That search only copied the effect from an earlier one.
            if effect.earlier:
                continue
            if effect.knob != "seq_len" and effect.value in question.vary.get(effect.knob, ()):
                earlier_effect = EarlierEffect(
                    knob=effect.knob,
                    value=effect.value,
                    before=effect.before,
                    gain_percent=effect.gain_percent,
                    search_id=directory.name,
                )
                effects.setdefault((effect.knob, repr(effect.value)), earlier_effect)
    return list(effects.values())


def _is_same_training(earlier: BestQuestion, question: BestQuestion) -> bool:
    """True if an earlier search was of the same training on the same device."""
    return earlier.schema <= SCHEMA and _training_on_device(earlier) == _training_on_device(question)


def _training_on_device(question: BestQuestion) -> tuple[object, ...]:
    return question.model, question.data, question.device, question.device_names, question.objective


COLD_RUNS = 6
"""Cold runs of a search: two of the winner, two of the baseline, about two of the winner with a knob turned back."""
OTHERS_SEEN_S = 0.3
"""Seconds over which the load of others is measured."""
TRIAL_S = 1.0
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
    grid_s: float
    """Seconds of a process for each legal candidate."""
    others_cpu_percent: float | None
    """The share of the CPU that others take now, which slows the trials; None if small, unknown, or on a GPU."""
    tries: int
    """About the number of candidates that the budget tries."""


def estimate(best_plan: BestPlan, home: Home, options: SearchOptions) -> Estimate:
    """Return the number of candidates and the expected time; the trials end within the budget.

    Raises UserError for a budget that the search itself would refuse.
    """
    if find_unfinished(best_plan, home, options) is None:
        check_new_budget(best_plan, home)
    return _estimate(best_plan, home, _others_percent(best_plan.plan.device))


def estimate_beside_others(best_plan: BestPlan, home: Home) -> Estimate | None:
    """Return the estimate of a checked search; None unless others take much of the CPU that trains."""
    others_percent = _others_percent(best_plan.plan.device)
    return None if others_percent is None else _estimate(best_plan, home, others_percent)


def _estimate(best_plan: BestPlan, home: Home, others_percent: float | None) -> Estimate:
    question, space = best_plan.question, best_plan.space
    legal = [candidate for candidate in space.candidates if candidate.excluded_as is None]
    levels = {name: {repr(candidate.knobs[name]) for candidate in legal} for name in (legal[0].knobs if legal else ())}
    trials = 1 + sum(len(values) - 1 for values in levels.values())
    by_knob = [
        {repr(candidate.process_knobs[name]) for candidate in legal if name in candidate.process_knobs}
        for name in levels
    ]
    min_processes = 1 + sum(max(0, len(values) - 1) for values in by_knob)
    processes = min(min_processes, len({knobs_key(candidate.process_knobs) for candidate in legal}))
    start_s, basis = _start(best_plan, home)
    trial_s = max(TRIAL_S, trial_seconds(*baseline_trial(best_plan), home) or 0.0)
    # Each new process takes its start; the trials that others disturb are void until so many were.
    per_trial_s = trial_s + start_s * (processes - 1) / max(1, trials - 1)
    first_s = start_s + trial_s * (1 if others_percent is None else 1 + USUAL_DISTURBANCES)
    left_s = question.budget_s * (1 - (others_percent or 0.0) / 100) - first_s
    trials_s = min(question.budget_s, processes * start_s + trials * TRIAL_S)
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
        seconds=trials_s + COLD_RUNS * (start_s + TRIAL_S),
        grid_s=len(legal) * (start_s + TRIAL_S),
        others_cpu_percent=others_percent,
        tries=min(len(legal), 1 + int(max(0.0, left_s) / per_trial_s)),
    )


def _others_percent(device: str) -> float | None:
    cores = others_cores(OTHERS_SEEN_S) if device == CPU else None
    percent = 0.0 if cores is None else min(100.0, 100 * cores / len(os.sched_getaffinity(0)))
    return percent if percent >= OTHERS_CPU_PERCENT else None


def _start(best_plan: BestPlan, home: Home) -> tuple[float, str]:
    """Return the seconds from the start of a process of this model or script to its steady steps, and their source."""
    subject = "model" if best_plan.plan.script is None else "script"
    starts_s = earlier_starts(
        home, lambda run: run.device == best_plan.plan.device and _is_same_subject(run, best_plan)
    )
    if not starts_s:
        return GUESSED_START_S, f"assumed: no run of this {subject} was timed here"
    count = "a run" if len(starts_s) == 1 else f"{len(starts_s)} runs"
    return statistics.median(starts_s), f"as {count} of this {subject} took"


def _is_same_subject(run: RunFile, best_plan: BestPlan) -> bool:
    """True if a run is of the same model, or of the same script by its preset."""
    if best_plan.plan.script is not None:
        return run.script is not None and run.preset == best_plan.question.preset
    return run.script is None and run.model == best_plan.question.model

"""A best-fit search in words, for screens, the command line and reports: its question, its state and its answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trainfast_runner.search.searches import BATCH_KNOBS
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.units import CPU, chance_text, counted
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import DOUBT_SIGN, FigureHeading, figure_headings, pair_lines, table
from trainfast_tui.text.keys import ASK_BATCH, ASK_BUDGET, ASK_OBJECTIVE, ASK_VARY, key_of
from trainfast_tui.text.next_run_words import typed_overrides

if TYPE_CHECKING:
    from trainfast_runner.search.best.answer import BestSoFar
    from trainfast_runner.search.best.question import BestPlan
    from trainfast_runner.search.best_journal import BestAnswer, BestRequest, Interval, Space


MAX_LISTED = 5
"""Runner-ups and candidates that were not tried are listed up to this many."""
EFFECT_HEADER = ("value", "instead of", FigureHeading("gave (95 % CI)"), "from")
PARETO_HEADER = ("fastest in its memory", *figure_headings("rate", "peak"))


def answer_lines(so_far: BestSoFar, search_id: str) -> list[str]:
    """Return the answer in lines: the best first, then the effects, the Pareto settings and the rest."""
    answer = so_far.answer
    if answer is None or so_far.space is None:
        return [fmt.plain(line) for line in _without_answer(so_far, search_id)]
    lines = pair_lines(best_answer_rows(so_far, answer))
    if answer.effects:
        lines += ["", *table(EFFECT_HEADER, effect_rows(answer))]
    if answer.pareto_numbers:
        lines += ["", *table(PARETO_HEADER, pareto_rows(so_far, answer))]
    counts = count_rows(so_far)
    continues = [("cancelled", f"the same command continues {search_id}")] if _is_cancelled(so_far) else []
    lines += ["", *pair_lines([*counts, *continues])]
    return [fmt.plain(line) for line in lines]


def _is_cancelled(so_far: BestSoFar) -> bool:
    return so_far.ended is not None and so_far.ended.state == "cancelled"


def best_answer_rows(so_far: BestSoFar, answer: BestAnswer) -> Iterator[tuple[str, str]]:
    """Yield the best setting and the baseline with their figures, the gain, the ties, and the notes on the claim."""
    assert so_far.space is not None
    assert so_far.ended is not None
    baseline, noise, tried = so_far.space.baseline_number, answer.within_percent, answer.tried_in_budget
    if tried is not None:
        yield "budget", budget_words(tried, len(so_far.candidates))
    if noise is not None:
        yield "no winner", f"{noise_words(noise)}: no setting is faster beyond it"
    for doubt in so_far.answer_doubts:
        yield f"{DOUBT_SIGN} doubtful", doubt.text
    label = best_label(answer, so_far.ended.state)
    yield label, _side_words(so_far, answer.best_number, answer.best_rate, answer.best_value, answer.best_run_ids)
    if answer.best_number != baseline:
        rate, value = answer.baseline_rate, answer.baseline_value
        yield "baseline", _side_words(so_far, baseline, rate, value, answer.baseline_run_ids)
        yield "gain", gain_text(answer.gain_percent)
    elif noise is not None:
        yield "gain", "none beyond the noise: the baseline is kept"
    else:
        no_gain_words = "none" if is_final(answer, so_far.ended.state) else "none so far"
        yield "gain", f"{no_gain_words}: the baseline is the best"
    changed = answer.changes_training
    training_words = ", ".join(filter(None, ("the same as the baseline", precision_words(so_far, answer))))
    yield "trains", f"differently, by {', '.join(changed)}" if changed else training_words
    for line in answer.diagnosis:
        yield "bottleneck", f"of the baseline: {line}"
    if answer.unused_lever:
        yield "left alone", answer.unused_lever
    for note in answer.notes:
        yield "note", note
    yield from _shortened("within the noise", [candidate_text(so_far, tie) for tie in answer.tied_numbers])


def precision_words(so_far: BestSoFar, answer: BestAnswer) -> str:
    """Return words for a best setting in another precision than the baseline's; empty for the same precision."""
    assert so_far.space is not None
    numbers = so_far.space.baseline_number, answer.best_number
    baseline_precision, precision = (so_far.candidate(number).knobs.get("precision") for number in numbers)
    if precision == baseline_precision:
        return ""
    return f"counting precision={precision} as the same as {baseline_precision}"


def _side_words(
    so_far: BestSoFar, number: int, rate: Interval | None, value: Interval | None, run_ids: Sequence[str]
) -> str:
    """Return a setting with its rate, its objective where that is another figure, and its runs."""
    words = f"{candidate_text(so_far, number)}: {rate_text(rate)}"
    if value is not None and so_far.objective != "samples_per_s":
        words += f", {objective_words(so_far.objective, so_far.for_steps, value)}"
    return f"{words}, runs {' and '.join(run_ids)}" if run_ids else f"{words}, not confirmed"


def _shortened(label: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    for words in texts[:MAX_LISTED]:
        yield label, words
    if len(texts) > MAX_LISTED:
        yield label, f"and {len(texts) - MAX_LISTED} more"


def effect_rows(answer: BestAnswer) -> Iterator[tuple[str, ...]]:
    """Yield the gain of each value over the baseline's, below `EFFECT_HEADER`."""
    for effect in answer.effects:
        text_of = KNOBS_BY_NAME[effect.knob].text_of
        basis = "a run without it" if effect.measured else "all trials"
        yield f"{effect.knob}={text_of(effect.value)}", text_of(effect.before), gain_text(effect.gain_percent), basis


def pareto_rows(so_far: BestSoFar, answer: BestAnswer) -> Iterator[tuple[str, ...]]:
    """Yield each setting that is the fastest in its memory, below `PARETO_HEADER`."""
    rates = {verdict.candidate_number: verdict.rate for verdict in answer.verdicts}
    for number in answer.pareto_numbers:
        knobs = candidate_text(so_far, number)
        yield knobs, rate_text(rates.get(number)), fmt.size(so_far.peak_bytes(number))


def count_rows(so_far: BestSoFar) -> Iterator[tuple[str, str]]:
    """Yield the number of each verdict, the settings not tried or void, why the search stopped, and its time."""
    dropped_count = so_far.space.dropped if so_far.space is not None else 0
    note = f"; another global batch: {counted(dropped_count, 'combination')}" if dropped_count else ""
    counts = verdict_counts(verdict.verdict for verdict in so_far.verdicts)
    yield "settings", f"{len(so_far.candidates):,}: {counts}{note}"
    not_tried = [verdict for verdict in so_far.verdicts if verdict.verdict == "not_tried"]
    not_tried_words = [f"{candidate_text(so_far, verdict.candidate_number)}: {verdict.reason}" for verdict in not_tried]
    yield from _shortened("not tried", not_tried_words)
    void = [trial for trial in so_far.attempts if trial.outcome == "void"]
    yield from _shortened("void", [f"{candidate_text(so_far, line.candidate_number)}: {line.reason}" for line in void])
    if so_far.ended is not None:
        if so_far.ended.stopped_because:
            yield "stopped because", so_far.ended.stopped_because
        trials, runs = len(so_far.trials), len(so_far.attempts) - len(so_far.trials)
        counts = f"{counted(trials, 'trial')}, {counted(runs, 'run')}"
        yield "took", f"{fmt.duration(so_far.ended.seconds)}, {counts}"


def _without_answer(so_far: BestSoFar, search_id: str) -> Iterator[str]:
    ended = so_far.ended
    if _is_cancelled(so_far):
        void = [trial.reason for trial in so_far.trials if trial.outcome == "void"]
        end_words = f"before a measurement counted ({void[-1]})" if void else "before anything was measured"
        yield f"cancelled {end_words}; the same command continues {search_id}"
    elif ended is not None:
        missing = ended.missing_bytes
        yield f"{ended.reason}{'' if missing is None else f': the smallest setting is {fmt.size(missing)} too large'}"
        if counts := verdict_counts(verdict.verdict for verdict in so_far.verdicts):
            yield f"{counted(len(so_far.candidates), 'setting')}: {counts}"


ABOUT_SEARCH = (
    "Finds the fastest settings that fit, by short trials of real steps in warm processes; the best and your own"
    " settings are then confirmed in fresh ones."
)
ABOUT_SCRIPT_SEARCH = (
    "Finds the fastest settings of the script that fit: each trial is a process of its own, which ends after a few"
    " steps and whose checkpoints and trackers are off; the best and your own settings are then confirmed."
)
START_HINT = f"{key_of('best', 'apply')} starts the search; {key_of('best', 'leave')} goes back."
TO_NAME = "give it a value, or name the values to vary"
EVERY_KNOB = "every knob that keeps the training the same; mixed precision counts as the same"


def vary_text(vary: Mapping[str, Sequence[KnobValue]]) -> str:
    """Return the varied knobs as they are typed: `batch_size=4,8 precision=fp32,bf16`."""
    return " ".join(f"{name}={','.join(map(KNOBS_BY_NAME[name].text_of, values))}" for name, values in vary.items())


def best_question_rows(request: BestRequest, own_batch: int | None, *, fresh: bool) -> list[tuple[str, str]]:
    """Return key, name and value of each part of the question; `own_batch` is the global batch of the knobs, if known.

    A `fresh` search uses no earlier one.
    """
    if request.global_batch is not None:
        batch = counted(request.global_batch, "sample")
    elif any(name in request.vary for name in BATCH_KNOBS):
        batch = "free: follows the varied batch"
    else:
        batch = f"{'' if own_batch is None else counted(own_batch, 'sample') + ', '}as the knobs are set"
    steps = "" if request.for_steps is None else f": {counted(request.for_steps, 'step')}"
    rows = [
        (ASK_VARY, "vary", vary_text(request.vary) or EVERY_KNOB),
        (ASK_BATCH, "global batch", batch),
        (ASK_OBJECTIVE, "objective", f"{objective_of(request.objective).hint}{steps}"),
        (ASK_BUDGET, "time budget", f"{fmt.duration(request.budget_s)}, plus the runs that confirm the best"),
        ("fresh", "fresh", "yes: starts over" if fresh else "no: continues an unfinished search"),
    ]
    return [(f"{key_of('best', action)} {name}", words) for action, name, words in rows]


def varied_line(vary: Mapping[str, list[Any]], global_batch: int | None) -> str:
    """Return the knobs that a search varies, with their values."""
    varied = "; ".join(f"{name} {', '.join(map(KNOBS_BY_NAME[name].text_of, values))}" for name, values in vary.items())
    batch_words = f" at a global batch of {global_batch:,}" if global_batch is not None else ""
    return f"varying {varied or 'nothing'}{batch_words}"


def left_alone_lines(left_alone: Mapping[str, str]) -> list[str]:
    """Return the knobs that a search leaves alone, those with the same reason in one line."""
    from trainfast_runner.search.best_journal import UNNAMED_REASON

    by_reason: dict[str, list[str]] = {}
    for name, reason in left_alone.items():
        by_reason.setdefault(reason, []).append(name)
    lines = []
    for reason, names in by_reason.items():
        listed = ", ".join(names)
        # A refusal begins with the name already.
        words = reason if reason.startswith(f"{listed} ") else f"{listed}: {reason}"
        lines.append(f"left alone: {words}{f'; {TO_NAME}' if reason == UNNAMED_REASON else ''}")
    return lines


def question_lines(vary: Mapping[str, list[Any]], left_alone: Mapping[str, str], global_batch: int | None) -> list[str]:
    """Return the knobs that a search varies, and then those that it leaves alone."""
    return [varied_line(vary, global_batch), *left_alone_lines(left_alone)]


def estimate_lines(plan: BestPlan) -> list[str]:
    """Return the number of candidates and the longest time of a search."""
    dropped, budget = plan.space.dropped, fmt.duration(plan.question.budget_s)
    dropped_words = f", {dropped:,} with another global batch left out" if dropped else ""
    legal = f"{len(plan.space.candidates):,}, {plan.legal_count:,} of them can run here{dropped_words}"
    rows = [
        ("settings", f"{legal}; the baseline is one{'; more follow around each leader' if plan.space.around else ''}"),
        ("takes", f"{budget} of trials, then the cold runs that confirm the answer"),
    ]
    return [*busy_lines(plan.plan.device), *pair_lines(rows)]


OTHERS_SEEN_S = 0.3


def busy_lines(device: str) -> list[str]:
    """Return the share of the CPU that others take from trials on it; empty if it is small. Looks for 0.3 s."""
    from trainfast_runner.machine.cpu import others_percent
    from trainfast_runner.results.bottleneck_rules import OTHERS_CPU_PERCENT

    percent = others_percent(OTHERS_SEEN_S) if device == CPU else None
    if percent is None or percent < OTHERS_CPU_PERCENT:
        return []
    left = fmt.percent(100 - percent)
    return [f"others take {fmt.percent(percent)} of the CPU: this budget tries about {left} of what it would alone"]


VOID_CAUSES = {
    "other_processes": "machine busy: ",
    "shared_gpu": "GPU shared: ",
    "heat": "GPU too hot: ",
    "power_brake": "GPU braked: ",
}
"""Words before the number of void settings, by the kind of doubt that voided most."""


def candidate_words(space: Space, number: int, *, short: bool = False) -> str:
    """Return a candidate as the knobs in which it differs from the baseline.

    With `short` the accumulation is left out where it follows from the batch at one global batch.
    """
    candidate, baseline = space.candidates[number], space.candidates[space.baseline_number]
    overrides = {name: value for name, value in candidate.knobs.items() if value != baseline.knobs.get(name)}
    if short and "batch_size" in overrides and candidate.samples_per_step == baseline.samples_per_step:
        overrides.pop("grad_accum", None)
    return " ".join(typed_overrides(overrides)) or "the baseline"


def end_words(so_far: BestSoFar) -> str:
    """Return the answer of an ended search, or what is missing for one."""
    ended = so_far.ended
    if ended is not None and ended.answer is not None:
        return _answer_words(so_far, ended.answer)
    missing = ended.missing_bytes if ended is not None else None
    too_large = f": the smallest is {fmt.size(missing)} too large" if missing else ""
    return f"no setting fits{too_large}; {key_of('best', ASK_VARY)} varies other knobs"


def is_doubtful(search: BestSoFar) -> bool:
    """True for an answer that is not final, or whose figures are in doubt."""
    answer = search.answer
    if search.state != "answered" or answer is None:
        return False
    return not is_final(answer, search.state) or bool(search.answer_doubts)


class Role(NamedTuple):
    """The role of a step of a best-fit search."""

    noun: str
    """For a table or a line."""
    short: str
    """For a narrow cell."""
    doing: str
    """The verb while the step goes on."""


ROLES = {
    "trial": Role("trial", "trial", "trying"),
    "race": Role("race", "race", "racing"),
    "confirm": Role("confirm", "confirm", "confirming in a fresh process"),
    "limit": Role("limit", "at limit", "running under memory_limit"),
    "turn_back": Role("turn back", "turn back", "turning back"),
}


def role_of(role: str) -> Role:
    """Return the row of a role; one of a newer version is named by itself."""
    words = role.replace("_", " ")
    return ROLES.get(role) or Role(words, words, "running")


def doing_words(so_far: BestSoFar) -> str:
    """Return the step under way and its candidate in words."""
    step, space = so_far.newest_step, so_far.space
    if step is None or step.candidate_number is None or space is None or not so_far.is_under_way:
        return "deciding the next step"
    knob = f" {step.knob} of" if step.knob else ""
    return f"{role_of(step.action).doing}{knob} {candidate_words(space, step.candidate_number)}"


def _answer_words(so_far: BestSoFar, answer: BestAnswer) -> str:
    assert so_far.space is not None
    tried_count = answer.tried_in_budget
    budget = "" if tried_count is None else f"{_unfinished_words(so_far, tried_count)}; "
    if answer.within_percent is not None:
        return f"{budget}no winner: {noise_words(answer.within_percent)}"
    if answer.best_number == so_far.space.baseline_number and tried_count is None:
        return "the baseline itself is the fastest"
    if tried_count is not None:
        budget += "best so far: "
    words = candidate_words(so_far.space, answer.best_number)
    if (gain := answer.gain_percent) is not None and answer.best_number != so_far.space.baseline_number:
        words += f": {gain_text(gain)}"
    return budget + words


ADDS_TIME = f"; {key_of('best', ASK_BUDGET)} adds time"
"""Names a key of the search's own screen."""


def _unfinished_words(so_far: BestSoFar, tried_count: int) -> str:
    """Return why the budget did not pay for every setting: those that are void, else how many were tried."""
    measured = {line.candidate_number for line in so_far.attempts if line.outcome != "void"}
    void = [line for line in so_far.trials if line.outcome == "void"]
    void_numbers = {line.candidate_number for line in void} - measured
    kinds = [doubt.kind for line in void for doubt in line.doubts if doubt.kind in VOID_CAUSES]
    words = VOID_CAUSES[max(kinds, key=kinds.count)] if kinds else ""
    if void_numbers:
        words += f"{len(void_numbers)} of {counted(len(void_numbers | measured), 'setting')} void"
    else:
        words += budget_words(tried_count, len(so_far.candidates))
    return words + ADDS_TIME


def best_words(so_far: BestSoFar) -> str:
    """Return the objective of the best setting so far with its 95 % interval; empty before anything was measured."""
    return "" if so_far.best is None else objective_words(so_far.objective, so_far.for_steps, so_far.best.value)


def chance_words(so_far: BestSoFar) -> str:
    """Return the most promising trial with its price and its chance; empty before two settings were measured.

    With one measurement both are assumptions. A price beyond the budget is never paid.
    """
    step, question = so_far.newest_step, so_far.question
    measured = {so_far.attempts[index].candidate_number for index in so_far.rates}
    if step is None or step.chance is None or step.action != "trial" or len(measured) < 2:
        return ""
    words = ["next"]
    if step.next_number is not None and so_far.space is not None:
        words = [f"next: {candidate_words(so_far.space, step.next_number, short=True)}"]
    if step.price_s is not None:
        is_dear = question is not None and step.price_s > question.budget_s - so_far.spent_s()
        words.append(f"about {fmt.duration(step.price_s)}{', beyond the budget' if is_dear else ''}")
    return ", ".join([*words, f"{chance_text(step.chance)} chance of 2 % or more"])


VERDICTS = ("measured", "beaten", "bound", "too_large", "incompatible", "failed", "not_tried")


class Objective(NamedTuple):
    """Words of an objective. `unit` is empty for `time`, whose unit depends on the figure (`unit_of`)."""

    unit: str
    judged_by: str
    """The criterion that a report names."""
    best: str
    """Completes: which settings train the model ...?"""
    hint: str
    """The line of the dialog that asks for the objective."""


JOULE_HINT = "the most samples a joule; needs a GPU with an energy counter"
TIME_HINT = "the least time for a start and a number of steps"
OBJECTIVES = {
    "samples_per_s": Objective("samples/s", "samples/s", "fastest", "the most samples a second"),
    "samples_per_joule": Objective("samples/J", "samples a joule", "with the least energy a sample", JOULE_HINT),
    "time": Objective("", "the time of a cold start and the steps", "to the last step in the least time", TIME_HINT),
}
"""The words of each objective by its name."""
TIME_UNITS = ((7200.0, 3600.0, "h"), (120.0, 60.0, "min"), (0.0, 1.0, "s"))
"""Least seconds, seconds of the unit and its name, the largest unit first."""


def candidate_text(so_far: BestSoFar, number: int) -> str:
    """Return all knobs of a candidate as they are typed."""
    return " ".join(typed_overrides(so_far.candidate(number).knobs))


def rate_text(rate: Interval | None) -> str:
    """Return a rate with its 95 % interval: `123 samples/s (120 to 126)`."""
    if rate is None:
        return fmt.ABSENT
    return f"{fmt.per_second(rate.median, 'samples')} ({fmt.interval(rate.low, rate.high)})"


def gain_text(percent: Interval | None) -> str:
    """Return a gain with its 95 % interval: `+34.1 % (+31.0 % to +37.2 %)`."""
    if percent is None:
        return "unknown"
    low, high = fmt.signed_percent(percent.low), fmt.signed_percent(percent.high)
    return f"{fmt.signed_percent(percent.median)} ({low} to {high})"


def is_final(answer: BestAnswer | None, state: str) -> bool:
    """True if the search has ended with its answer, and not because its budget was spent."""
    return state == "answered" and (answer is None or answer.tried_in_budget is None)


def best_label(answer: BestAnswer | None, state: str) -> str:
    """Return the label of the best setting: `best so far`, or `chosen` where the noise decides against a winner."""
    label = "best" if answer is None or answer.within_percent is None else "chosen"
    return label if is_final(answer, state) else f"{label} so far"


def noise_words(percent: float) -> str:
    """Return the noise that decides instead of a winner: `within 8.0 %, the noise of this machine`."""
    return f"within {fmt.percent(percent, 1)}, the noise of this machine"


def budget_words(tried: int, candidates: int) -> str:
    """Return the number of candidates tried within the budget: `2 of 28 tried when the budget ended`."""
    return f"{tried:,} of {candidates:,} tried when the budget ended"


def verdict_counts(verdicts: Iterable[str]) -> str:
    """Return the number of each verdict in words: `12 measured, 17 beaten`."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[name]:,} {name.replace('_', ' ')}" for name in VERDICTS if counts[name])


def objective_of(name: str) -> Objective:
    """Return the words of an objective; an unknown one is named by itself."""
    return OBJECTIVES.get(name, Objective(name, name, f"best by {name}", name))


def unit_of(objective: str, median: float) -> tuple[str, float]:
    """Return the unit in which a figure of this size is shown, and the divisor of the figure."""
    if objective != "time":
        return objective_of(objective).unit, 1.0
    return next((name, divisor_s) for from_s, divisor_s, name in TIME_UNITS if median >= from_s)


def objective_words(objective: str, for_steps: int | None, value: Interval) -> str:
    """Return a figure with its 95 % interval: `123 samples/s (120 to 126)`, `12.3 min (12.1 to 12.5) for 800 steps`."""
    unit, divisor = unit_of(objective, value.median)
    words = figure_with_interval_text(value, divisor, f" {unit}")
    return words if for_steps is None else f"{words} for {counted(for_steps, 'step')}"


def figure_with_interval_text(value: Interval, divisor: float, unit: str = "") -> str:
    """Return a figure divided by `divisor`, with its interval if it has one: `123 (120 to 126)`."""
    words = f"{fmt.number(value.median / divisor)}{unit}"
    if value.low == value.high:
        return words
    return f"{words} ({fmt.interval(value.low / divisor, value.high / divisor)})"

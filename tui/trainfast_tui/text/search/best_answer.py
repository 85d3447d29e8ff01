"""The answer of a best-fit search in words, for the command line and for a report: rows of a label and its words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.units import counted
from trainfast_tui.text import format as fmt
from trainfast_tui.text.search.best_figures import (
    best_label,
    budget_words,
    gain_text,
    is_final,
    noise_words,
    objective_words,
    rate_text,
    typed_knobs,
    verdict_counts,
)
from trainfast_tui.text.signs import DOUBT_SIGN
from trainfast_tui.text.tables import FigureHeading, figure_headings, pair_lines, table

if TYPE_CHECKING:
    from trainfast_runner.search.best.best_so_far import BestSoFar
    from trainfast_runner.search.journal.best import BestAnswer, CandidateVerdict, Interval

MAX_LISTED = 5
"""Runner-ups and candidates that were not tried are listed up to this many."""
EFFECT_HEADER = ("value", "instead of", FigureHeading("gave (95 % CI)"), "measured by")
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
        lines += ["", *table(PARETO_HEADER, _pareto_rows(so_far, answer))]
    counts = count_rows(so_far, answer.verdicts)
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
    for note in answer.notes:
        yield "note", note
    yield from _shortened("within the noise", [typed_knobs(so_far.candidate(tie).knobs) for tie in answer.tied_numbers])


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
    words = f"{typed_knobs(so_far.candidate(number).knobs)}: {rate_text(rate)}"
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
        basis = "turned back in a run" if effect.measured else "earlier searches" if effect.earlier else "the trials"
        yield f"{effect.knob}={text_of(effect.value)}", text_of(effect.before), gain_text(effect.gain_percent), basis


def _pareto_rows(so_far: BestSoFar, answer: BestAnswer) -> Iterator[tuple[str, ...]]:
    rates = {verdict.candidate_number: verdict.rate for verdict in answer.verdicts}
    for number in answer.pareto_numbers:
        knobs = typed_knobs(so_far.candidate(number).knobs)
        yield knobs, rate_text(rates.get(number)), fmt.size(so_far.peak_bytes(number))


def count_rows(so_far: BestSoFar, verdicts: Sequence[CandidateVerdict]) -> Iterator[tuple[str, str]]:
    """Yield the number of each verdict, the settings not tried or disturbed, why the search stopped, and its time."""
    dropped_count = so_far.space.dropped if so_far.space is not None else 0
    note = f"; another global batch: {counted(dropped_count, 'combination')}" if dropped_count else ""
    yield "settings", f"{len(so_far.candidates):,}: {verdict_counts(verdict.verdict for verdict in verdicts)}{note}"
    not_tried = [verdict for verdict in verdicts if verdict.verdict == "not_tried"]
    not_tried_words = [
        f"{typed_knobs(so_far.candidate(verdict.candidate_number).knobs)}: {verdict.reason}" for verdict in not_tried
    ]
    yield from _shortened("not tried", not_tried_words)
    void = [trial for trial in so_far.attempts if trial.outcome == "void"]
    yield from _shortened(
        "void", [f"{typed_knobs(so_far.candidate(line.candidate_number).knobs)}: {line.reason}" for line in void]
    )
    if so_far.disturbed_count:
        yield "disturbed", f"{counted(so_far.disturbed_count, 'measurement')}, by other processes or a throttled GPU"
    if so_far.ended is not None:
        if so_far.ended.stopped_because:
            yield "stopped because", so_far.ended.stopped_because
        trials, runs = len(so_far.trials), len(so_far.attempts) - len(so_far.trials)
        counts = f"{counted(trials, 'trial')}, {counted(runs, 'run')}"
        yield "took", f"{fmt.duration(so_far.ended.seconds)}, {counts}"


def _without_answer(so_far: BestSoFar, search_id: str) -> Iterator[str]:
    from trainfast_runner.search.best.choose.answer import verdicts_without_answer

    ended = so_far.ended
    if _is_cancelled(so_far):
        void = [trial.reason for trial in so_far.trials if trial.outcome == "void"]
        end_words = f"before a measurement counted ({void[-1]})" if void else "before anything was measured"
        yield f"cancelled {end_words}; the same command continues {search_id}"
    elif ended is not None:
        missing = ended.missing_bytes
        yield f"{ended.reason}{'' if missing is None else f': the smallest setting is {fmt.size(missing)} too large'}"
        if counts := verdict_counts(verdict.verdict for verdict in verdicts_without_answer(so_far.lines)):
            yield f"{counted(len(so_far.candidates), 'setting')}: {counts}"

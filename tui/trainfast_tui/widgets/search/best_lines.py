"""The measurements of a best-fit search, and its answer, as rows of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_tui.text import format as fmt
from trainfast_tui.text.lines import Line, Piece, Tone, labelled
from trainfast_tui.text.search.best_answer import precision_words
from trainfast_tui.text.search.best_figures import figure_with_interval_text, gain_text, unit_of, verdict_counts
from trainfast_tui.text.search.best_state import candidate_words
from trainfast_tui.text.search.outcomes import outcome_of, role_of
from trainfast_tui.text.signs import DOUBT_SIGN
from trainfast_tui.widgets.bar import bar

if TYPE_CHECKING:
    from trainfast_runner.search.best.best_so_far import BestSoFar
    from trainfast_runner.search.journal.best import BestAnswer, ColdRun, Effect, Trial

RATE_CELLS, STEPS_CELLS, TOOK_CELLS, PROCESS_CELLS = 26, 6, 12, 11
"""Cells of the columns right of the candidate."""
NARROW_RATE_CELLS, NARROW_TOOK_CELLS, NARROW_PROCESS_CELLS = 22, 9, 9
WIDE_COLUMNS_FROM = 100
"""Width of the table from which its columns are wide and its words long."""
MIN_EFFECT_CELLS, GAIN_CELLS = 16, 50
"""The least cells of the names of effects, and those that names leave to the bars and gains."""
MIN_BAR_CELLS, MAX_BAR_CELLS = 6, 40
BASIS_CELLS = 18
"""Cells that the bar of an effect leaves to its basis and to gaps."""
LABEL_CELLS = 18
"""Cells of the labels below the answer."""


def trial_lines(so_far: BestSoFar, width: int) -> list[Line]:
    """Return a title, and a row for each trial or run in their order."""
    title = f"{_unit(so_far)[0]} (95 % CI)"
    rows = [_row((" ", "text"), ("setting", title, "steps", "took", "process"), width, "muted")]
    for index, attempt in enumerate(so_far.attempts):
        rows.append(_attempt_row(so_far, index, attempt, width))
        if attempt.reason and attempt.outcome not in ("oom", "slow"):
            rows += labelled(("  └ ", "muted"), fmt.with_sizes(attempt.reason), width, "muted")
    return rows


def _unit(so_far: BestSoFar) -> tuple[str, float]:
    """Return the unit of the table and its divisor, chosen for the first figure and kept for all."""
    first = next(iter(so_far.values.values()), None)
    return unit_of(so_far.objective, first.median if first is not None else 0.0)


def _attempt_row(so_far: BestSoFar, index: int, attempt: Trial | ColdRun, width: int) -> Line:
    from trainfast_runner.search.journal.best import Trial

    outcome = outcome_of(attempt.outcome)
    sign: Piece = (DOUBT_SIGN, "warning") if attempt.counts_disturbed else (outcome.sign, outcome.tone)
    words = "" if attempt.outcome in ("measured", "slow") else outcome.noun
    assert so_far.space is not None
    candidate = candidate_words(so_far.space, attempt.candidate_number, short=width < WIDE_COLUMNS_FROM)
    value, divisor = so_far.values.get(index), _unit(so_far)[1]
    if value is not None:
        words = figure_with_interval_text(value, divisor)
    if isinstance(attempt, Trial):
        steps = f"{len(attempt.step_ms)}" if attempt.step_ms else fmt.ABSENT
        process = "repeat" if attempt.repeats else "warm" if attempt.warm else "new"
    else:
        if attempt.knob is not None:
            candidate = f"{attempt.knob} of {candidate}"
        steps, process = fmt.ABSENT, role_of(attempt.role).short if width >= WIDE_COLUMNS_FROM else "cold"
    if attempt.outcome == "slow":
        words = f"{words}, given up" if width >= WIDE_COLUMNS_FROM else words
    elif attempt.outcome == "void" and words != "void":
        words = f"void: {words}"
    return _row(sign, (candidate, words, steps, fmt.duration(attempt.seconds), process), width)


def _row(sign: Piece, cells: tuple[str, str, str, str, str], width: int, tone: Tone = "text") -> Line:
    """Return a sign and the cells of candidate, rate, steps, time and process."""
    candidate, *figures, process = cells
    widths = (
        (RATE_CELLS, STEPS_CELLS, TOOK_CELLS, PROCESS_CELLS)
        if width >= WIDE_COLUMNS_FROM
        else (NARROW_RATE_CELLS, STEPS_CELLS, NARROW_TOOK_CELLS, NARROW_PROCESS_CELLS)
    )
    room = max(12, width - 2 - sum(widths))
    right = "".join(fmt.to_width(cell, cell_width, "right") for cell, cell_width in zip(figures, widths, strict=False))
    last = fmt.to_width(f"  {process}", widths[3])
    return [(f"{sign[0]} ", sign[1]), (fmt.to_width(candidate, room) + right + last, tone)]


def waiting_line(so_far: BestSoFar, width: int) -> Line:
    """Return the candidate under way, with its reason; empty without one."""
    step, space = so_far.newest_step, so_far.space
    if step is None or step.candidate_number is None or space is None or not so_far.is_under_way:
        return []
    return [
        ("▸ ", "accent"),
        (candidate_words(space, step.candidate_number, short=width < WIDE_COLUMNS_FROM), "title"),
        (f"  {step.why}", "muted"),
    ]


def effect_lines(answer: BestAnswer, width: int) -> list[Line]:
    """Return a row for each value of a knob: a bar of its gain over the baseline's value, and the gain's interval."""
    if not answer.effects:
        return []
    names = [_effect_name(effect) for effect in answer.effects]
    label_width = min(max(map(len, names)), max(MIN_EFFECT_CELLS, width - GAIN_CELLS))
    gains = [effect.gain_percent for effect in answer.effects]
    words = [gain_text(gain) for gain in gains]
    bar_room = width - label_width - max(map(len, words)) - BASIS_CELLS
    bar_width = max(MIN_BAR_CELLS, min(MAX_BAR_CELLS, bar_room))
    largest = max(gain.median for gain in gains)
    largest = largest if largest > 0 else 1.0
    rows: list[Line] = [[("gained over the baseline's value (95 % CI)", "muted")]]
    for name, text, effect in sorted(
        zip(names, words, answer.effects, strict=True), key=lambda row: -row[2].gain_percent.median
    ):
        gain = effect.gain_percent
        tone: Tone = "success" if gain.low > 0 else "error" if gain.high < 0 else "secondary"
        basis = "  in a run" if effect.measured else "  earlier" if effect.earlier else ""
        # Only a gain has a bar: one as long for a loss would look like a gain.
        share = max(gain.median, 0.0) / largest
        rows.append(
            [
                (fmt.to_width(name, label_width + 1), "text"),
                *bar(share, bar_width, tone),
                (f" {text}", tone),
                (basis, "muted"),
            ]
        )
    return rows


def _effect_name(effect: Effect) -> str:
    text_of = KNOBS_BY_NAME[effect.knob].text_of
    return f"{effect.knob}={text_of(effect.value)} for {text_of(effect.before)}"


def footnote_lines(so_far: BestSoFar, answer: BestAnswer, width: int, max_ties: int) -> list[Line]:
    """Return the runner-ups within the noise, the verdict counts, and the notes on the claim."""
    assert so_far.space is not None
    rows: list[Line] = []
    for number in answer.tied_numbers[:max_ties]:
        rows.append([_label("within the noise"), (candidate_words(so_far.space, number), "text")])
    if len(answer.tied_numbers) > max_ties:
        rows.append([_label("within the noise"), (f"and {len(answer.tied_numbers) - max_ties} more", "text")])
    counts = verdict_counts(verdict.verdict for verdict in answer.verdicts)
    rows += labelled(_label("settings"), f"{len(answer.verdicts):,}: {counts}", width)
    if so_far.ended is not None:
        rows += labelled(_label("stopped because"), so_far.ended.stopped_because, width)
    if answer.changes_training:
        words = f"trains differently from the baseline, by {', '.join(answer.changes_training)}"
        rows += labelled(_label("note", "warning"), words, width)
    elif words := precision_words(so_far, answer):
        rows += labelled(_label("note"), f"trains the same as the baseline, {words}", width)
    for note in answer.notes:
        rows += labelled(_label("note"), note, width)
    return rows


def _label(text: str, tone: Tone = "muted") -> Piece:
    return f"{text:<{LABEL_CELLS}}", tone

"""A best-fit search in words: its answer, what each knob gave, and what became of every candidate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from trainfast_runner.settings.knobs import BY_NAME
from trainfast_tui.text import format as fmt
from trainfast_tui.text.comparison import setting_text
from trainfast_tui.text.tables import pairs, table

Fields = Mapping[str, Any]
VERDICTS = ("measured", "beaten", "bound", "too_large", "incompatible", "failed", "not_tried")
BY_COMMAND = "--set {knob}=VALUE names it"
BY_KEYS = "Enter on it in the list of knobs types one"
"""Words on how to name a script's present value: on the command line, and in the app."""
MOST_LISTED = 5
"""Runner-ups and candidates that were not tried are listed up to this many."""
KEPT = "none beyond the noise: the baseline is kept"
"""The gain where the noise of the machine keeps the baseline."""


def knob_words(knobs: Fields) -> str:
    """Knobs as they are typed: `batch_size=8 precision=bf16`."""
    return " ".join(f"{name}={setting_text(name, value)}" for name, value in knobs.items())


def rate_words(rate: Fields | None) -> str:
    """A rate with its 95 % interval: `123 samples/s (120 to 126)`."""
    if rate is None:
        return fmt.ABSENT
    return f"{fmt.per_second(rate['median'], 'samples')} ({fmt.number(rate['low'])} to {fmt.number(rate['high'])})"


def gain_words(percent: float, low: float, high: float) -> str:
    """A gain with its 95 % interval: `+34.1 % (+31.0 % to +37.2 %)`."""
    return f"{fmt.signed_percent(percent)} ({fmt.signed_percent(low)} to {fmt.signed_percent(high)})"


def noise_words(percent: float) -> str:
    """The noise that decides instead of a winner: `within 8.0 %, the noise of this machine`."""
    return f"within {fmt.percent(percent, 1)}, the noise of this machine"


def budget_words(tried: int, candidates: int) -> str:
    """Return the number of candidates tried within the budget: `2 of 28 tried when the budget ended`."""
    return f"{tried} of {candidates} tried when the budget ended"


def answer_lines(report: Fields) -> list[str]:
    """The answer of `best_report` in lines: the winner first, then the effects, the Pareto settings and the rest."""
    if report["best"] is None:
        return [fmt.plain(line) for line in _without_answer(report)]
    lines = pairs(_answer_rows(report))
    if report["effects"]:
        lines += ["", *_effects(report["effects"])]
    if report["pareto"]:
        lines += ["", *_pareto(report["pareto"])]
    lines += ["", *pairs(_rest_rows(report))]
    return [fmt.plain(line) for line in lines]


def _answer_rows(report: Fields) -> Iterable[tuple[str, str]]:
    best, baseline = report["best"], report["baseline"]
    is_same = best["knobs"] == baseline["knobs"]
    noise = report["within_percent"]
    tried = report["tried_in_budget"]
    so_far = "" if report["state"] == "answered" and tried is None else " so far"
    if tried is not None:
        yield "budget", budget_words(tried, report["candidates"])
    if noise is not None:
        yield "no winner", f"{noise_words(noise)}: no setting is faster beyond it"
    label = "fastest" if noise is None else "chosen"
    yield label + so_far, f"{knob_words(best['knobs'])}: {_side_words(best, report)}"
    if is_same:
        none = "none: the baseline itself is the fastest" if tried is None else "none so far: the best is the baseline"
        yield "gain", KEPT if noise is not None else none
    else:
        yield "baseline", f"{knob_words(baseline['knobs'])}: {_side_words(baseline, report)}"
        yield "gain", "unknown" if report["gain"] is None else gain_words(**report["gain"])
    changed = report["changes_training"]
    yield "trains", f"differently, by {', '.join(changed)}" if changed else "the same as the baseline"
    for note in report["notes"]:
        yield "note", note


def _side_words(side: Fields, report: Fields) -> str:
    words = rate_words(side["samples_per_s"])
    value = side["value"]
    if value is not None and report["objective"] != "samples_per_s":
        interval = f"{fmt.number(value['low'])} to {fmt.number(value['high'])}"
        words += f", {report['objective']} {fmt.number(value['median'])} ({interval})"
    return f"{words}, runs {' and '.join(side['run_ids'])}" if side["run_ids"] else f"{words}, not confirmed"


def _effects(effects: Iterable[Fields]) -> list[str]:
    rows = []
    for one in effects:
        show = BY_NAME[one["knob"]].text_of
        by = "turned back in a run" if one["measured"] else "earlier searches" if one["earlier"] else "the trials"
        rows.append([f"{one['knob']}={show(one['value'])}", show(one["from"]), gain_words(**one["gain"]), by])
    return table(["setting", "instead of", "gave (95 % CI)", "measured by"], rows)


def _pareto(settings: Iterable[Fields]) -> list[str]:
    rows = [
        [knob_words(one["knobs"]), rate_words(one["samples_per_s"]), fmt.size(one["peak_allocated_bytes"])]
        for one in settings
    ]
    return table(["fastest in its memory", "rate", "peak"], rows, right=(2,))


def measurements(number: int) -> str:
    """`1 measurement`, `12 measurements`."""
    return f"{number} measurement{'' if number == 1 else 's'}"


def count_words(verdicts: Iterable[str]) -> str:
    """The number of each verdict: `12 measured, 17 beaten`."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[name]} {name.replace('_', ' ')}" for name in VERDICTS if counts[name])


def _rest_rows(report: Fields) -> Iterable[tuple[str, str]]:
    ties = [knob_words(knobs) for knobs in report["ties"]]
    for words in ties[:MOST_LISTED]:
        yield "within the noise", words
    if len(ties) > MOST_LISTED:
        yield "within the noise", f"and {len(ties) - MOST_LISTED} more"
    words = count_words(one["verdict"] for one in report["verdicts"])
    dropped = f"; {report['dropped']} combinations have another global batch" if report["dropped"] else ""
    yield "candidates", f"{report['candidates']}: {words}{dropped}"
    not_tried = [one for one in report["verdicts"] if one["verdict"] == "not_tried"]
    for one in not_tried[:MOST_LISTED]:
        yield "not tried", f"{knob_words(one['knobs'])}: {one['reason']}"
    if len(not_tried) > MOST_LISTED:
        yield "not tried", f"and {len(not_tried) - MOST_LISTED} more"
    if report["disturbed"]:
        yield "disturbed", f"{measurements(report['disturbed'])}, by other processes or a throttled GPU"
    if report["stopped_because"]:
        yield "stopped because", report["stopped_because"]
    if report["state"] == "cancelled":
        yield "cancelled", f"the same command continues {report['search_id']}"
    yield "took", f"{fmt.duration(report['seconds'])}, {len(report['trials'])} trials, {len(report['races'])} runs"


def _without_answer(report: Fields) -> list[str]:
    if report["state"] == "cancelled":
        void = [one["reason"] for one in report["trials"] if one["outcome"] == "void"]
        when = f"before a measurement counted ({void[-1]})" if void else "before anything was measured"
        return [f"cancelled {when}; the same command continues {report['search_id']}"]
    missing, counts = report["missing_bytes"], count_words(one["verdict"] for one in report["verdicts"])
    excess = "" if missing is None else f": the smallest setting is {fmt.size(missing)} too large"
    return [f"{report['reason']}{excess}", *([f"{report['candidates']} candidates: {counts}"] if counts else [])]


def question_lines(
    vary: Mapping[str, list[Any]],
    left_alone: Mapping[str, str],
    global_batch: int | None,
    *,
    to_name: str = BY_COMMAND,
) -> list[str]:
    """The knobs that a search varies and those that it leaves alone, with the reasons.

    `to_name` says how the missing present value of a `{knob}` is named.
    """
    from trainfast_runner.search.best.journal import UNNAMED

    varied = "; ".join(f"{name} {', '.join(map(BY_NAME[name].text_of, values))}" for name, values in vary.items())
    at = f" at a global batch of {global_batch}" if global_batch is not None else ""
    lines = [f"varying {varied or 'nothing'}{at}"]
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_alone.items():
        words = f"{reason}; {to_name.format(knob=name)}" if reason == UNNAMED else reason
        by_reason.setdefault(words, []).append(name)
    return [*lines, *(_left_alone(", ".join(names), reason) for reason, names in by_reason.items())]


def _left_alone(names: str, reason: str) -> str:
    """A refusal begins with the setting that it is about: no second name goes before it."""
    return f"left alone: {reason}" if reason.startswith(f"{names} ") else f"left alone: {names}: {reason}"


def estimate_lines(estimate: Fields, *, to_name: str = BY_COMMAND) -> list[str]:
    """The lines of `search best --dry-run`."""
    dropped = f", {estimate['dropped']} with another global batch left out" if estimate["dropped"] else ""
    legal = f"{estimate['candidates']}, {estimate['legal']} of them can run here{dropped}; the baseline is one"
    lines = question_lines(estimate["vary"], estimate["left_alone"], estimate["global_batch"], to_name=to_name)
    start = f"{fmt.duration(estimate['start_s'])} a process, {estimate['basis']}"
    rows = [
        ("candidates", legal),
        ("processes", f"{estimate['processes']} for trials and about {estimate['cold_runs']} cold runs; {start}"),
        (
            "takes",
            f"about {fmt.duration(estimate['seconds'])}; each candidate by itself: {fmt.duration(estimate['grid_s'])}",
        ),
    ]
    return [fmt.plain(line) for line in [*lines, *pairs(rows)]]

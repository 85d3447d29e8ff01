"""A best-fit search as blocks of a report: its question, its answer, the candidates, and the gain of each knob."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainfast_runner.search.best.journal import (
    BestEnded,
    BestLine,
    BestQuestion,
    Candidate,
    Found,
    Interval,
    Race,
    Space,
    Trial,
    read_best_journal,
)
from trainfast_tui.report.bar_picture import Whisker, whisker_picture
from trainfast_tui.report.document import Block, Heading, Listing, Prose, grid, pairs_grid
from trainfast_tui.report.exports import export_blocks
from trainfast_tui.report.machine_blocks import machine_blocks
from trainfast_tui.report.pareto_blocks import MeasuredCandidate, pareto_blocks
from trainfast_tui.report.recorded import ReportedRun
from trainfast_tui.report.run_blocks import ABSENT_NOTE, run_sections
from trainfast_tui.text.comparison import setting
from trainfast_tui.text.format import count, duration, milliseconds, number, percent, signed_percent, size

OBJECTIVES = {
    "samples_per_s": "samples/s",
    "tokens_per_s": "tokens/s",
    "samples_per_joule": "samples a joule",
    "time": "the time of a cold start and the steps",
}

BEST_BY = {
    "samples_per_s": "fastest",
    "tokens_per_s": "fastest by tokens",
    "samples_per_joule": "with the least energy a sample",
    "time": "to the last step in the least time",
}


@dataclass(frozen=True)
class BestJournal:
    """The lines of a best-fit search that a report shows; `space` and `ended` are None before they are written."""

    question: BestQuestion
    space: Space | None
    trials: Sequence[Trial]
    races: Sequence[Race]
    ended: BestEnded | None

    @property
    def found(self) -> Found | None:
        """The answer, or the best so far of a cancelled search."""
        return self.ended.found if self.ended is not None else None

    def candidate(self, place: int) -> Candidate:
        """Return a candidate by its number; a journal that numbers more than it lists gives an empty one."""
        listed = self.space.candidates if self.space is not None else []
        return listed[place] if 0 <= place < len(listed) else Candidate(knobs={})

    def peak_bytes(self, place: int) -> int | None:
        """Return the highest peak that a candidate was measured with."""
        made: list[Trial | Race] = [*self.trials, *self.races]
        return max((line.peak_allocated_bytes or 0 for line in made if line.candidate == place), default=0) or None


def best_journal(directory: Path) -> BestJournal | None:
    """Read the journal; None if it is not one of a best-fit search."""
    lines: list[BestLine] = read_best_journal(directory)
    question = next((line for line in lines if isinstance(line, BestQuestion)), None)
    if question is None:
        return None
    return BestJournal(
        question,
        next((line for line in reversed(lines) if isinstance(line, Space)), None),
        [line for line in lines if isinstance(line, Trial)],
        [line for line in lines if isinstance(line, Race)],
        next((line for line in reversed(lines) if isinstance(line, BestEnded)), None),
    )


def cold_runs(journal: BestJournal) -> list[str]:
    """Return the runs that confirmed the answer: the baseline's, then the winner's."""
    found = journal.found
    return [] if found is None else list(dict.fromkeys([*found.baseline_run_ids, *found.best_run_ids]))


def best_search_report(journal: BestJournal, runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the whole report; `runs` are those of `cold_runs` that are still on the disk."""
    blocks: list[Block] = [*_question(journal.question), *(machine_blocks(runs) if runs else ())]
    blocks += [Heading("Answer"), *_answer(journal)]
    found = journal.found
    if found is not None:
        blocks += [*_pareto(journal, found), *_effects(found), *_verdicts(journal, found)]
    blocks += _tried(journal)
    if not runs:
        return [*blocks, Prose("No run that confirmed an answer is on the disk: no machine, chart or export here.")]
    space = journal.space
    is_baseline = found is not None and space is not None and found.best == space.baseline
    winner = [run for run in runs if found is not None and run.directory.name in found.best_run_ids]
    return [
        *blocks,
        Prose(_roles(runs, winner, is_baseline)),
        *run_sections(runs),
        *export_blocks(winner[:1] or runs[:1]),
    ]


def knob_words(knobs: Mapping[str, Any]) -> str:
    """Return settings as they are typed."""
    return " ".join(f"{name}={setting(name, value)}" for name, value in knobs.items())


def _roles(runs: Sequence[ReportedRun], winner: Sequence[ReportedRun], is_baseline: bool) -> str:
    others = [run.label for run in runs if run not in winner]
    best = "the best, which is the baseline" if is_baseline else "the best"
    sides = [(others, "the baseline"), ([run.label for run in winner], best)]
    return "; ".join(f"{' and '.join(those)}: {what}, in a fresh process" for those, what in sides if those) + "."


def _question(question: BestQuestion) -> Iterator[Block]:
    limit = min(question.limits_bytes, default=None)
    fits = f" within {size(limit)} a rank" if limit is not None else ""
    names = f" ({', '.join(question.device_names)})" if question.device_names else ""
    best = BEST_BY.get(question.objective, f"best by {question.objective}")
    yield Prose(f"Which settings train {question.name} {best} on {question.device}{names} and fit{fits}?")
    if question.title:
        yield Prose(f"{question.name}: {question.title}.")
    steps = f" ({count(question.for_steps)} steps)" if question.for_steps is not None else ""
    rows = [("judged by", OBJECTIVES.get(question.objective, question.objective) + steps)]
    batch = "free" if question.global_batch is None else count(question.global_batch, "samples")
    rows += [("global batch", batch), ("budget", duration(question.budget_s))]
    rows += [
        (f"{name} varied", ", ".join(setting(name, value) for value in values))
        for name, values in question.vary.items()
    ]
    rows += [(f"{name} left alone", reason) for name, reason in question.left_alone.items()]
    yield pairs_grid("", rows)
    if question.earlier:
        yield Prose("Effects that earlier searches found on this device, as a start:")
        earlier = [
            (
                one.knob,
                setting(one.knob, one.before),
                setting(one.knob, one.value),
                _gain(one.gain_percent),
                one.search_id,
            )
            for one in question.earlier
        ]
        yield grid(("knob", "from", "to", "gain", "search"), earlier, right=(3,))


def _answer(journal: BestJournal) -> Iterator[Block]:
    ended, found, space = journal.ended, journal.found, journal.space
    if ended is None:
        yield Prose("The search has no answer yet: the same command continues it.")
        return
    if ended.state != "answered":
        so_far = "; the best so far" if found is not None else ""
        yield Prose(f"{ended.state.replace('_', ' ').capitalize()}: {ended.reason}{so_far}.")
    if ended.missing_bytes is not None:
        yield Prose(f"At least {size(ended.missing_bytes)} are missing.")
    if found is None or space is None:
        return
    if found.within_percent is not None:
        noise = percent(found.within_percent, 1)
        yield Prose(f"Within {noise}, the noise of this machine: smaller differences than that are not claimed.")
    rows = [
        ("best", knob_words(journal.candidate(found.best).knobs)),
        ("", _rate(found.best_rate)),
        ("baseline", knob_words(journal.candidate(space.baseline).knobs)),
        ("", _rate(found.baseline_rate)),
        ("gain", "the baseline is the best" if found.best == space.baseline else _gain(found.gain_percent)),
    ]
    if journal.question.objective != "samples_per_s":
        words = OBJECTIVES.get(journal.question.objective, journal.question.objective)
        rows += [(f"{words}, best", _interval(found.best_value)), ("baseline", _interval(found.baseline_value))]
    rows += [("cannot be told from the best", knob_words(journal.candidate(place).knobs)) for place in found.ties]
    if found.changes_training:
        rows.append(("changes the training", ", ".join(found.changes_training)))
    rows += [
        ("candidates", f"{count(len(space.candidates))}, and {count(space.dropped)} of another global batch left out"),
        ("ended because", ended.stopped_because or ended.reason),
        ("took", duration(ended.seconds)),
    ]
    yield pairs_grid("", rows)
    if found.notes:
        yield Listing(tuple(found.notes))


def _rate(rate: Interval | None) -> str:
    return "not measured" if rate is None else f"{_interval(rate)} samples/s"


def _interval(one: Interval | None) -> str:
    return "not measured" if one is None else f"{number(one.median)} (95 % CI: {number(one.low)} to {number(one.high)})"


def _gain(gain: Interval | None) -> str:
    """Return a gain in percent with its interval."""
    if gain is None:
        return "not measured"
    return f"{signed_percent(gain.median)} (95 % CI: {gain.low:+.1f} to {gain.high:+.1f} %)"


def _pareto(journal: BestJournal, found: Found) -> list[Block]:
    baseline = journal.space.baseline if journal.space is not None else None
    measured = [
        MeasuredCandidate(one.candidate, knob_words(journal.candidate(one.candidate).knobs), one.rate, peak)
        for one in found.verdicts
        if one.rate is not None and (peak := journal.peak_bytes(one.candidate)) is not None
    ]
    limit = min(journal.question.limits_bytes, default=None)
    return pareto_blocks(measured, found.best, baseline, found.pareto, limit)


def _effects(found: Found) -> Iterator[Block]:
    if not found.effects:
        return
    yield Heading("Gain of each knob")
    rows, whiskers = [], []
    for one in found.effects:
        source = "fresh processes" if one.measured else "earlier searches" if one.earlier else "the trials' model"
        before, value = setting(one.knob, one.before), setting(one.knob, one.value)
        rows.append((one.knob, before, value, _gain(one.gain_percent), source))
        gain = one.gain_percent
        words = signed_percent(gain.median)
        tone = "success" if gain.low > 0 else "error" if gain.high < 0 else "muted"
        whiskers.append(Whisker(f"{one.knob}: {before} to {value}", gain.low, gain.median, gain.high, words, tone))
    yield grid(("knob", "from", "to", "gain", "measured by"), rows, right=(3,))
    picture = whisker_picture("gain of each value over the baseline's", "percent, with the 95 % CI", whiskers, percent)
    if picture is not None:
        yield picture


def _verdicts(journal: BestJournal, found: Found) -> Iterator[Block]:
    yield Heading("Every candidate")
    header = ("", "settings", "verdict", "samples/s", "predicted", "peak", "reason")
    rows = []
    for one in found.verdicts:
        candidate = journal.candidate(one.candidate)
        memory = [size(candidate.predicted_bytes), size(journal.peak_bytes(one.candidate))]
        rate = _interval(one.rate) if one.rate is not None else number(None)
        words = [one.verdict.replace("_", " "), rate, *memory, one.reason]
        rows.append([count(one.candidate), knob_words(candidate.knobs), *words])
    yield grid(header, rows, right=(0, 3, 4, 5))
    yield Prose(ABSENT_NOTE)


def _tried(journal: BestJournal) -> Iterator[Block]:
    """Yield the trials in warm processes and the runs in fresh ones, in their order."""
    yield Heading("Trials and runs")
    made: list[Trial | Race] = [*journal.trials, *journal.races]
    rows = [_try(journal, line) for line in sorted(made, key=lambda line: line.t_ns)]
    if not rows:
        yield Prose("Nothing was measured.")
        return
    header = ("settings", "as", "outcome", "samples/s", "step", "steps", "peak", "took", "run", "reason")
    yield grid(header, rows, right=(3, 4, 5, 6, 7))


def _try(journal: BestJournal, line: Trial | Race) -> list[str]:
    if isinstance(line, Trial):
        role = "warm trial" if line.warm else "first trial of a process"
        role += ", repeated" if line.repeats else ""
        step_ms = sorted(line.step_ms)[len(line.step_ms) // 2] if line.step_ms else None
        rate = 1e3 * line.samples_per_step / step_ms if step_ms else None
        times = [number(rate), milliseconds(step_ms), count(len(line.step_ms))]
    else:
        turned = f" of {line.knob}" if line.knob else ""
        role, times = f"{line.role.replace('_', ' ')}{turned}", [number(line.samples_per_s), number(None), number(None)]
    rest = [size(line.peak_allocated_bytes), duration(line.seconds), line.run_id, line.reason]
    return [knob_words(journal.candidate(line.candidate).knobs), role, line.outcome, *times, *rest]

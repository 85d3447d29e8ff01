"""A batch search in words, for screens, the command line and reports: its question, its state and its answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from trainfast_runner.records.home import LIVE_STATES, UNFINISHED_STATES
from trainfast_runner.search.batch_journal import CONFIRM_STEP
from trainfast_runner.units import counted
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import LabelledText, count, duration, pair_lines, per_second, plain, size
from trainfast_tui.text.keys import key_of
from trainfast_tui.text.memory_words import change_options, changes_title, effect_words, phase_words
from trainfast_tui.text.next_run_words import typed_overrides

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.search.batch_journal import BatchAnswer, BatchEnded, BatchSnapshot
    from trainfast_runner.settings.spec import RunSpec


def batch_answer_rows(search: BatchSnapshot, answer: BatchAnswer) -> Iterator[tuple[str, str]]:
    """Yield the labels and words of a search's answer."""
    question = search.question
    assert question is not None
    confirmed = (
        f"confirmed by {answer.confirmation_run_id}" if answer.confirmation_run_id else "no confirmation run on record"
    )
    if answer.samples_per_s is not None:
        condition = question.measured_under
        condition_words = f" (under {condition})" if condition is not None else ""
        confirmed += f" at {per_second(answer.samples_per_s, 'samples')}{condition_words}"
    yield "largest batch", f"{count(answer.max_batch)}, {confirmed}; {answer.certainty}"
    if answer.widths_note:
        yield "widths", answer.widths_note
    rank_words = f" on rank {answer.tightest_rank}, the tightest" if question.world_size > 1 else ""
    limit = f"{size(answer.limit_bytes)} ({question.limit_words})" if question.limit_words else size(answer.limit_bytes)
    yield "leaves free", f"{size(answer.headroom_bytes)} of {limit}{rank_words}"
    yield "aligned", count(answer.aligned_batch) if answer.aligned_batch else "none below 8"
    recommended = "none" if answer.recommended_batch is None else count(answer.recommended_batch)
    yield "recommended", f"{recommended}: {answer.recommended_why}"
    phase = phase_words(answer.phase) if answer.phase else "a step"
    yield "memory", f"{size(answer.fixed_bytes)} and {size(answer.bytes_per_sample)} a sample in {phase}"
    if answer.fastest_batch is not None:
        rate = per_second(answer.fastest_samples_per_s, "samples")
        yield "fastest tried", f"{count(answer.fastest_batch)}, {rate}"
    refuted = [count(probe.batch_size) for probe in search.probes if search.refuted_by(probe)]
    if refuted:
        yield "refuted", f"{' and '.join(refuted)}: fitted in a probe, ran out of memory in a confirmation run"
    assert search.ended is not None
    outcomes = [probe.outcome for probe in search.probes if probe.outcome != "void"]
    tried = f"{counted(len(outcomes), 'size')} tried, {outcomes.count('oom'):,} out of memory"
    yield "took", f"{duration(search.ended.seconds)}, {tried}"


def batch_answer_lines(search: BatchSnapshot, ended: BatchEnded) -> list[str]:
    """Return the answer in lines; without one the end of the search, with the changes as they are typed."""
    if ended.answer is not None:
        return pair_lines(batch_answer_rows(search, ended.answer))
    if ended.state == "cancelled":
        return [f"cancelled; the same command continues {search.directory.name}"]
    missing = "" if ended.missing_bytes is None else f": at least {size(ended.missing_bytes)} are missing"
    lines = [ended.reason + missing]
    if ended.changes:
        lines.append(changes_title(ended.changes))
        lines += [f"  {change_options(change)}: {effect_words(change)}" for change in ended.changes]
    return [plain(line) for line in lines]


ABOUT_SEARCH = (
    "Finds the largest batch that fits: sizes are tried with real steps in a warm process, and the largest is confirmed"
    " in a fresh one."
)
ABOUT_SCRIPT_SEARCH = (
    "Finds the largest batch of the script: each size is a process of its own, which ends after a few steps and whose"
    " checkpoints and trackers are off; the largest is confirmed in another."
)
LABEL_CELLS = 9
"""Cells of the labels of the question."""
START_HINT = f"{key_of('batch', 'apply')} starts the search; {key_of('batch', 'leave')} goes back."
CONTINUE_HINT = f"{key_of('batch', 'apply')} continues the unfinished search; {key_of('batch', 'leave')} goes back."


def limit_notice(spec: RunSpec, machine: Machine | None, ranks: int | None, free_bytes: int) -> str:
    """Name the limit of a search on a CPU without `memory_limit`; empty if a limit is set or a GPU sets it.

    `ranks` are the processes of a run; None if they are refused, which the search itself reports. `free_bytes` is the
    host's free memory.
    """
    if machine is None or ranks is None or spec.knobs.get("memory_limit") is not None:
        return ""
    if machine.used_by(spec.knobs.get("devices")).device != "cpu":
        return ""
    from trainfast_runner.search.searches import FREE_SHARE, share_of_free

    each_process = "" if ranks == 1 else f" for each of {ranks} processes"
    limit = f"{fmt.size(share_of_free(free_bytes, ranks))} of this machine's memory{each_process}"
    share = f"{fmt.percent(100 * FREE_SHARE)} of the {fmt.size(free_bytes)} free; set memory_limit to lower it"
    return f"No memory_limit: the search uses up to {limit}, set as a real limit: {share}."


def batch_question_rows(spec: RunSpec, limit: str, earlier: BatchSnapshot | None) -> list[LabelledText]:
    """Return the rows that ask whether to start a batch search.

    `limit` is the notice about the search's limit; `earlier` is the newest search of these knobs, or None.
    """
    overrides = {key: spec.knobs[key] for key in spec.overrides if key in spec.knobs and key != "memory_limit"}
    own_limit = spec.knobs.get("memory_limit")
    limit = limit or ("the device's free memory" if own_limit is None else f"memory_limit={own_limit}")
    rows, hint = [("knobs", ", ".join(typed_overrides(overrides)) or "as the preset")], START_HINT
    if earlier is not None and earlier.probes and earlier.state in (*LIVE_STATES, *UNFINISHED_STATES):
        hint, sizes = CONTINUE_HINT, ", ".join(f"{probe.batch_size:,}" for probe in earlier.probes)
        rows.append(("sizes", f"continues the search that has tried {sizes}"))
        if earlier.asked.limits_bytes:
            limit = f"{limits_words(earlier.asked.limits_bytes)}, as it began ({earlier.asked.limit_words})"
    rows.append((f"{key_of('batch', 'limit')} limit", limit))
    return [
        ("", ABOUT_SEARCH if spec.script is None else ABOUT_SCRIPT_SEARCH, "muted"),
        ("", hint, "title"),
        *((f"{label:<{LABEL_CELLS}}", words, "text") for label, words in rows),
    ]


def limits_words(limits_bytes: Iterable[int]) -> str:
    """Return the different limits of the ranks: `8.00 GiB + 16.0 GiB a rank`."""
    return " + ".join(fmt.size(limit_bytes) for limit_bytes in dict.fromkeys(limits_bytes)) + " a rank"


def doing_words(search: BatchSnapshot) -> str:
    """Return the step under way in words."""
    step = search.newest_step
    if step is not None and step.action in ("probe", CONFIRM_STEP):
        verb = "probing" if step.action == "probe" else "confirming in a fresh process"
        return f"{verb}: batch_size {step.batch_size:,}"
    if step is not None and not any(probe.outcome == "fits" for probe in search.probes):
        return "batch_size 1 does not fit: tracing which knobs would make it fit"
    return "working"


def end_words(search: BatchSnapshot) -> str:
    """Return the answer of an ended search, or what is missing for one."""
    answer, ended = search.answer, search.ended
    if answer is not None:
        seen, too_large = answer.widths, answer.too_large
        widths = f" with batches up to {seen.widest:,} wide" if seen is not None and not seen.has_widest else ""
        if too_large is not None and too_large > answer.max_batch + 1:
            words = f"batch_size {answer.max_batch:,} fits, confirmed in a fresh process{widths}"
            return f"{words}; {too_large:,} does not"
        return f"batch_size {answer.max_batch:,} is the largest that fits, confirmed in a fresh process{widths}"
    missing = ended.missing_bytes if ended is not None else None
    return f"batch_size 1 does not fit{f': {fmt.size(missing)} too much' if missing else ''}"

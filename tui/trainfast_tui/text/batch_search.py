"""A batch search in words: its state, its answer, and the settings to apply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainfast_runner.records.run_file import CONFIRM, TRIAL
from trainfast_runner.records.search_states import UNFINISHED_STATES
from trainfast_tui.text import format as fmt
from trainfast_tui.text.cooling import search_cooling_words
from trainfast_tui.text.lines import LabelledText
from trainfast_tui.text.overrides import typed_overrides

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.search.batch.batch_follower import BatchSnapshot
    from trainfast_runner.settings.spec import RunSpec


ABOUT = (
    "Finds the largest batch that fits: sizes are tried with real steps in a warm process, and the largest is confirmed"
    " in a fresh one."
)
ABOUT_SCRIPT = (
    "Finds the largest batch of the script: each size is a process of its own, which ends after a few steps and whose"
    " checkpoints and trackers are off; the largest is confirmed in another."
)
ENTER_STARTS = "Enter starts the search; Esc goes back."
ENTER_RESUMES = "Enter resumes the unfinished search; Esc goes back."


@dataclass(frozen=True, slots=True)
class Offer:
    """An offer at the end of a search: knobs as they are typed, and the reason to take them."""

    label: str
    settings: tuple[tuple[str, str], ...]
    why: str


def offers(search: BatchSnapshot | None) -> tuple[Offer, ...]:
    """Return the batch sizes found, the recommended one first; if nothing fits, the changes that would help."""
    ended = search.ended if search is not None else None
    if ended is None:
        return ()
    if ended.answer is None:
        return tuple(
            Offer(
                f"change {index}",
                tuple(change.settings.items()),
                f"{change.saves}; speed: {change.costs}" if change.costs else change.saves,
            )
            for index, change in enumerate(ended.changes, 1)
        )
    answer = ended.answer
    confirmation = answer.proof_run_id
    multiple = "the largest multiple of 64" if (answer.aligned_batch or 0) >= 512 else "a multiple of 8"
    batches = [
        ("recommended", answer.recommended_batch, answer.recommended_why),
        ("aligned", answer.aligned_batch, multiple),
        ("largest", answer.max_batch, f"confirmed by {confirmation}" if confirmation else "the largest that fits"),
        ("fastest", answer.fastest_batch, f"{fmt.per_second(answer.fastest_samples_per_s, 'samples')}, of those tried"),
    ]
    return tuple(Offer(label, (("batch_size", str(batch)),), why) for label, batch, why in batches if batch is not None)


def limit_notice(spec: RunSpec, machine: Machine | None, ranks: int | None) -> str:
    """Name the limit of a search on a CPU without `memory_limit`; empty if a limit is set or a GPU sets it.

    `ranks` are the processes of a run; None if they are refused, which the search itself tells.
    """
    if machine is None or ranks is None or spec.knobs.get("memory_limit") is not None:
        return ""
    if machine.used_by(spec.knobs.get("devices")).device != "cpu":
        return ""
    from trainfast_runner.memory.available import host_free_bytes
    from trainfast_runner.search.limits import share_of_free

    each = fmt.size(share_of_free(host_free_bytes(), ranks))
    whose = "of this machine's memory" if ranks == 1 else f"of this machine's memory for each of {ranks} processes"
    return f"No memory_limit: this searches up to {each} {whose}, set as a real limit. memory_limit makes it less."


def batch_question_rows(spec: RunSpec, limit: str, earlier: BatchSnapshot | None) -> list[LabelledText]:
    """Return the rows that ask whether to start a batch search.

    `limit` is the notice of its limit, `earlier` the newest search of these knobs, None without one.
    """
    about = ABOUT if spec.script is None else ABOUT_SCRIPT
    enter = ENTER_STARTS if earlier is None or not _is_resumable(earlier) else ENTER_RESUMES
    rows: list[LabelledText] = [("", about, "muted"), ("", enter, "title")]
    changed = ", ".join(typed_overrides({key: spec.knobs[key] for key in spec.overrides if key in spec.knobs}))
    rows.append(("knobs    ", changed or "as the preset", "text"))
    own_limit = spec.knobs.get("memory_limit")
    limit = limit or ("what the device has free" if own_limit is None else f"memory_limit={own_limit}")
    if (
        earlier is not None
        and _is_resumable(earlier)
        and earlier.question is not None
        and earlier.question.limits_bytes
    ):
        each = " + ".join(fmt.size(limit) for limit in dict.fromkeys(earlier.question.limits_bytes))
        limit = f"{each} a rank, as it began ({earlier.question.limit_words})"
    rows.append(("limit    ", limit, "text"))
    return [*rows, ("time     ", _time_words(earlier), "text")]


def _is_resumable(earlier: BatchSnapshot) -> bool:
    """True if a search of the same knobs would continue this one."""
    return bool(earlier.probes) and (earlier.ended is None or earlier.state in UNFINISHED_STATES)


def _time_words(earlier: BatchSnapshot | None) -> str:
    """Return what an earlier search tells of the time."""
    if earlier is None or not earlier.probes:
        return "not known before the first sizes have run"
    tried = ", ".join(f"{probe.batch_size:,}" for probe in earlier.probes)
    if earlier.ended is None or _is_resumable(earlier):
        return f"resumes the search that has tried {tried}"
    return f"the search before took {fmt.duration(earlier.ended.seconds)} for the sizes {tried}"


def expected_s(search: BatchSnapshot) -> float | None:
    """Predict the seconds of the steps under way from the largest size that fitted; None before one did."""
    step = search.next
    fitting = [probe for probe in search.probes if probe.outcome == "fits" and probe.step_ms is not None]
    if step is None or step.batch_size is None or not fitting:
        return None
    last = max(fitting, key=lambda probe: probe.batch_size)
    share = step.batch_size / last.batch_size
    if step.action == "probe":
        return share * last.seconds
    return None if search.proof_steps is None else share * search.proof_steps * (last.step_ms or 0.0) / 1e3


def batch_search_words(search: BatchSnapshot, now_ns: int | None = None) -> str:
    """Describe the search at `now_ns` (CLOCK_MONOTONIC), or its end, in one line."""
    step = search.next
    if search.cooling is not None and search.state in ("running", "starting"):
        return search_cooling_words(search.cooling, now_ns)
    if search.waits_for is not None and search.state in ("running", "starting"):
        return f"waiting for {fmt.plain(search.waits_for)} to end"
    if search.state == "running" and step is not None and step.action in ("probe", CONFIRM):
        verb = "probing" if step.action == "probe" else "confirming in a fresh process"
        return f"{verb}: batch_size {step.batch_size:,}"
    if search.state == "running" and step is not None and not any(probe.outcome == "fits" for probe in search.probes):
        return "batch_size 1 does not fit: tracing which knobs would make it fit"
    words = {
        "starting": "starting: the model is built, and its memory predicted",
        "running": "working",
        "pausing": f"pausing after {_under_way(search)}",
        "paused": "paused: no process is running",
        "interrupted": "interrupted: no process works on it; f5 resumes",
        "cancelled": "cancelled; its journal is kept, f5 resumes",
    }
    from trainfast_runner.search.journal.lines import CANCELLED

    ended = search.ended
    if ended is not None and ended.answer is not None:
        most, too_large = ended.answer.max_batch, ended.answer.too_large
        if too_large is not None and too_large > most + 1:
            return f"batch_size {most:,} fits, confirmed in a fresh process; {too_large:,} does not"
        return f"batch_size {most:,} is the largest that fits, confirmed in a fresh process"
    if search.state == "nothing_fits" and ended is not None:
        missing = f": {fmt.size(ended.missing_bytes)} too much" if ended.missing_bytes else ""
        return f"batch_size 1 does not fit{missing}"
    if search.state == "failed" and ended is not None:
        return f"failed: {fmt.plain(ended.reason)}"
    if search.state == "cancelled" and ended is not None and ended.reason not in ("", CANCELLED):
        return f"stopped early: {fmt.plain(ended.reason)}; its journal is kept, f5 resumes"
    return words.get(search.state, search.state)


def _under_way(search: BatchSnapshot) -> str:
    """Name the process that a pause waits for."""
    if search.next is None:
        return "the model is built and its memory predicted"
    return "this confirmation run" if search.next.action == CONFIRM else "this probe"


def warm_words(role: str | None, tried: Sequence[int]) -> str:
    """Name a warm process by what it tried: `a search's probe at batch_size 62, after 7`."""
    if role == TRIAL:
        return "a search's trial of a setting" if len(tried) == 1 else f"a search's trials of {len(tried)} settings"
    if not tried:
        return "a search's probe"
    *before, last = (f"{batch:,}" for batch in tried)
    after = f", after {' and '.join(filter(None, (', '.join(before[:-1]), before[-1])))}" if before else ""
    return f"a search's probe at batch_size {last}{after}"

"""The question of a batch search before it starts: its rows, its limit, and its expected time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trainfast_runner.records.search_states import UNFINISHED_STATES
from trainfast_tui.text import format as fmt
from trainfast_tui.text.keys import key_of
from trainfast_tui.text.lines import LabelledText
from trainfast_tui.text.overrides import typed_overrides

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.search.batch.batch_follower import BatchSnapshot
    from trainfast_runner.settings.spec import RunSpec

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
    from trainfast_runner.search.memory.limits import share_of_free

    each_process = "" if ranks == 1 else f" for each of {ranks} processes"
    limit = f"{fmt.size(share_of_free(free_bytes, ranks))} of this machine's memory{each_process}"
    return f"No memory_limit: the search uses up to {limit}, set as a real limit; set memory_limit to lower it."


def batch_question_rows(spec: RunSpec, limit: str, earlier: BatchSnapshot | None) -> list[LabelledText]:
    """Return the rows that ask whether to start a batch search.

    `limit` is the notice about the search's limit; `earlier` is the newest search of these knobs, or None.
    """
    continues = earlier is not None and _can_be_continued(earlier)
    overrides = {key: spec.knobs[key] for key in spec.overrides if key in spec.knobs}
    rows = [
        ("knobs", ", ".join(typed_overrides(overrides)) or "as the preset"),
        ("limit", (_limit_of(earlier) if continues else "") or limit or _own_limit(spec)),
        ("time", _time_words(earlier)),
    ]
    return [
        ("", ABOUT_SEARCH if spec.script is None else ABOUT_SCRIPT_SEARCH, "muted"),
        ("", CONTINUE_HINT if continues else START_HINT, "title"),
        *((f"{label:<{LABEL_CELLS}}", words, "text") for label, words in rows),
    ]


def limits_words(limits_bytes: Iterable[int]) -> str:
    """Return the different limits of the ranks: `8.00 GiB + 16.0 GiB a rank`."""
    return " + ".join(fmt.size(limit_bytes) for limit_bytes in dict.fromkeys(limits_bytes)) + " a rank"


def _can_be_continued(earlier: BatchSnapshot) -> bool:
    """True if a search of the same knobs would continue this one."""
    return bool(earlier.probes) and (earlier.ended is None or earlier.state in UNFINISHED_STATES)


def _limit_of(earlier: BatchSnapshot | None) -> str:
    """Return the limit with which an earlier search began; empty if its journal has none."""
    question = earlier.question if earlier is not None else None
    if question is None or not question.limits_bytes:
        return ""
    return f"{limits_words(question.limits_bytes)}, as it began ({question.limit_words})"


def _own_limit(spec: RunSpec) -> str:
    """Return the limit that the knobs set, or the device."""
    limit = spec.knobs.get("memory_limit")
    return "the device's free memory" if limit is None else f"memory_limit={limit}"


def _time_words(earlier: BatchSnapshot | None) -> str:
    """Return the time that an earlier search took, or the sizes that it has tried."""
    if earlier is None or not earlier.probes:
        return "not known before the first sizes have run"
    sizes = ", ".join(f"{probe.batch_size:,}" for probe in earlier.probes)
    if earlier.ended is None or _can_be_continued(earlier):
        return f"continues the search that has tried {sizes}"
    return f"the search before took {fmt.duration(earlier.ended.seconds)} for the sizes {sizes}"

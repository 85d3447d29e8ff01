"""The question of a best-fit search: its parts, the knobs that it varies or leaves alone, and its expected time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainfast_runner.search.candidate_spec import BATCH_KNOBS
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.units import counted
from trainfast_tui.text import format as fmt
from trainfast_tui.text.keys import ASK_BATCH, ASK_BUDGET, ASK_OBJECTIVE, ASK_VARY, key_of
from trainfast_tui.text.search.best_figures import OBJECTIVES
from trainfast_tui.text.tables import pair_lines

if TYPE_CHECKING:
    from trainfast_runner.search.best.planning.estimate import Estimate
    from trainfast_runner.search.best.planning.request import BestRequest

ABOUT_SEARCH = (
    "Finds the fastest settings that fit, by short trials of real steps in warm processes; the best and your own"
    " settings are then confirmed in fresh ones."
)
ABOUT_SCRIPT_SEARCH = (
    "Finds the fastest settings of the script that fit: each trial is a process of its own, which ends after a few"
    " steps and whose checkpoints and trackers are off; the best and your own settings are then confirmed."
)
START_HINT = f"{key_of('best', 'apply')} starts the search; {key_of('best', 'leave')} goes back."
NAMED_BY_COMMAND = "--set {knob}=VALUE names it"
NAMED_BY_KEYS = f"press {key_of('main', 'KnobPanel.type_value')} on the knob to type a value"
"""Words on how to name a script's present value: on the command line, and in the app."""
EVERY_KNOB = "every knob that keeps the training the same; mixed precision counts as the same"
AS_KNOBS_ARE_SET = "as the knobs are set"
FRESH_WORDS = "yes: starts over, without the effects of earlier searches"
NOT_FRESH_WORDS = "no: continues an unfinished search; effects of earlier ones choose the first trials"


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
        batch = AS_KNOBS_ARE_SET if own_batch is None else f"{counted(own_batch, 'sample')}, {AS_KNOBS_ARE_SET}"
    steps = "" if request.for_steps is None else f": {counted(request.for_steps, 'step')}"
    rows = [
        (ASK_VARY, "vary", vary_text(request.vary) or EVERY_KNOB),
        (ASK_BATCH, "global batch", batch),
        (ASK_OBJECTIVE, "objective", f"{OBJECTIVES[request.objective].hint}{steps}"),
        (ASK_BUDGET, "time budget", f"{fmt.duration(request.budget_s)}, plus the runs that confirm the best"),
        ("fresh", "fresh", FRESH_WORDS if fresh else NOT_FRESH_WORDS),
    ]
    return [(f"{key_of('best', action)} {name}", words) for action, name, words in rows]


def varied_line(vary: Mapping[str, list[Any]], global_batch: int | None) -> str:
    """Return the knobs that a search varies, with their values."""
    varied = "; ".join(f"{name} {', '.join(map(KNOBS_BY_NAME[name].text_of, values))}" for name, values in vary.items())
    batch_words = f" at a global batch of {global_batch:,}" if global_batch is not None else ""
    return f"varying {varied or 'nothing'}{batch_words}"


def left_alone_lines(left_alone: Mapping[str, str], *, to_name: str = NAMED_BY_COMMAND) -> list[str]:
    """Return the knobs that a search leaves alone, those with the same reason in one line.

    `to_name` says how the missing present value of a `{knob}` is named.
    """
    from trainfast_runner.search.journal.best import UNNAMED_REASON

    by_reason: dict[str, list[str]] = {}
    for name, reason in left_alone.items():
        words = f"{reason}; {to_name.format(knob=name)}" if reason == UNNAMED_REASON else reason
        by_reason.setdefault(words, []).append(name)
    return [_left_alone(", ".join(names), reason) for reason, names in by_reason.items()]


def question_lines(
    vary: Mapping[str, list[Any]],
    left_alone: Mapping[str, str],
    global_batch: int | None,
    *,
    to_name: str = NAMED_BY_COMMAND,
) -> list[str]:
    """Return the knobs that a search varies, and then those that it leaves alone."""
    return [varied_line(vary, global_batch), *left_alone_lines(left_alone, to_name=to_name)]


def _left_alone(names: str, reason: str) -> str:
    """Return the names with the reason, which a refusal begins with the name already."""
    return f"left alone: {reason}" if reason.startswith(f"{names} ") else f"left alone: {names}: {reason}"


def estimate_lines(estimate: Estimate) -> list[str]:
    """Return the number of candidates, the processes and the expected time of a search."""
    dropped_words = f", {estimate.dropped:,} with another global batch left out" if estimate.dropped else ""
    legal = f"{estimate.candidates:,}, {estimate.legal:,} of them can run here{dropped_words}; the baseline is one"
    start = f"{fmt.duration(estimate.start_s)} a process, {estimate.basis}"
    rows = [
        ("settings", legal),
        ("processes", f"{estimate.processes} for trials and about {estimate.cold_runs} cold runs; {start}"),
        (
            "takes",
            f"about {fmt.duration(estimate.seconds)}; each setting by itself: {fmt.duration(estimate.grid_s)}",
        ),
    ]
    return [*busy_lines(estimate), *pair_lines(rows)]


def busy_lines(estimate: Estimate) -> list[str]:
    """Return the share of the CPU that others take, and the settings that the budget then tries; empty without any."""
    if estimate.others_cpu_percent is None:
        return []
    tries = "one setting" if estimate.tries <= 1 else f"{estimate.tries:,} of {estimate.legal:,} settings"
    return [f"others take {fmt.percent(estimate.others_cpu_percent)} of the CPU: this budget tries about {tries}"]

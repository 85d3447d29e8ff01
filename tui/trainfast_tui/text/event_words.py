"""The timeline in words: each event with its sign and tone, and the events of a run with its compilations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.machine.telemetry import throttle
from trainfast_runner.machine.telemetry.binding import takes_long
from trainfast_runner.records.run_states import state_text
from trainfast_tui.text import format as fmt
from trainfast_tui.text.lines import Tone
from trainfast_tui.text.shades import shade_of

if TYPE_CHECKING:
    from trainfast_runner.records.run_lines import Event, Step
    from trainfast_runner.running.follower import RunSnapshot

EVENTS_KEPT = 500
OTHER_REASON_LETTER = "O"
"""The sign of a throttle reason that has no cause, and so no letter of a shade."""
Describe = Callable[["Event"], tuple[str, Tone, str]]


class DescribedEvent(msgspec.Struct, frozen=True):
    """An event as it is shown: its time, its sign of one cell, its tone and its words."""

    t_ns: int
    """CLOCK_MONOTONIC."""
    sign: str
    tone: Tone
    words: str


class EventDescriber:
    """Describes events in the order given; the end of a throttle or a loss names its duration."""

    def __init__(self) -> None:
        self._began: dict[tuple[str, int | None, str], int] = {}

    def describe(self, events: Iterable[Event]) -> list[DescribedEvent]:
        """Describe these events, which follow those described before; one without a description is left out."""
        described: list[DescribedEvent] = []
        for event in events:
            describe = DESCRIPTIONS.get(event.kind)
            if describe is None:
                continue
            sign, tone, words = describe(event)
            subject, _, edge = event.kind.rpartition("_")
            # The end of a throttle has the reason it began with; the return of a GPU has none.
            key = (subject, event.device, (event.detail or "") if subject == "throttle" else "")
            if edge in ("on", "lost"):
                self._began[key] = event.t_ns
            elif (began_ns := self._began.pop(key, None)) is not None:
                words += f", after {fmt.duration((event.t_ns - began_ns) / 1e9)}"
            described.append(DescribedEvent(event.t_ns, sign, tone, words))
        return described


def events_of_run(run: RunSnapshot) -> list[DescribedEvent]:
    """Return the newest events of a run, in order."""
    events = [*EventDescriber().describe(run.events), *_compilations(run.steps)]
    return sorted(events, key=lambda event: event.t_ns)[-EVENTS_KEPT:]


def _compilations(steps: Sequence[Step]) -> list[DescribedEvent]:
    return [
        DescribedEvent(
            step.begin_ns,
            "c",
            "accent",
            f"step {step.step} compiled: it took {fmt.duration(step.step_ms / 1e3)}",
        )
        for step in steps
        if step.compiling
    ]


def _gpu_lost(event: Event) -> tuple[str, Tone, str]:
    """Describe a GPU that was lost, or that answers too slowly."""
    reason = event.detail or "it does not answer"
    return "✗", "error", f"{_device(event)} {'does not answer' if takes_long(reason) else 'was lost'}: {reason}"


def _device(event: Event) -> str:
    return "GPU" if event.device is None else f"GPU {event.device}"


def _throttle(event: Event, *, is_beginning: bool) -> tuple[str, Tone, str]:
    reason = event.detail or ""
    cause = throttle.CAUSE_BY_REASON.get(reason)
    letter = shade_of(cause).letter if cause is not None else OTHER_REASON_LETTER
    tone: Tone = "error" if throttle.severity(reason) == "warning" else "warning"
    words = f"{_device(event)}: {'' if is_beginning else 'no longer: '}{throttle.cause_text(reason)}"
    return (letter, tone, words) if is_beginning else (letter.lower(), "muted", words)


def _process(event: Event) -> tuple[str, Tone, str]:
    process_words = event.detail or (f"process {event.pid}" if event.pid is not None else "another process")
    appeared_tone: Tone = "warning" if event.kind == "foreign_process" else "primary"
    if event.state == "left":
        return "-", "muted", f"{_device(event)}: {process_words}"
    return "+", appeared_tone, f"{_device(event)}: {process_words}"


def _state(event: Event) -> tuple[str, Tone, str]:
    words = state_text(event.state or "")
    reason = fmt.with_sizes(event.reason or words)
    return "│", "primary", reason if reason.startswith(words) else f"{words}: {reason}"


def _detail(sign: str, tone: Tone, words: str) -> Describe:
    return lambda event: (sign, tone, f"{words}: {event.detail}" if event.detail else words)


DESCRIPTIONS: dict[str, Describe] = {
    "throttle_on": lambda event: _throttle(event, is_beginning=True),
    "throttle_off": lambda event: _throttle(event, is_beginning=False),
    "xid": lambda event: ("X", "error", f"{_device(event)}: Xid error {event.detail or ''}".rstrip()),
    "gpu_lost": _gpu_lost,
    "gpu_back": lambda event: ("✓", "success", f"{_device(event)} answers again"),
    "foreign_process": _process,
    "process": _process,
    "state": _state,
    "stop_requested": lambda event: ("■", "warning", "asked to stop"),
    "kill_sent": lambda event: ("■", "error", "SIGKILL sent"),
    "rank_gone": lambda event: ("✗", "error", "a rank ended" if event.rank is None else f"rank {event.rank} ended"),
    "output_trimmed": _detail("…", "muted", "the middle of output.log was dropped"),
    "steps_trimmed": _detail("…", "warning", "the middle of a rank's step records was dropped"),
    "telemetry_thinned": _detail("…", "warning", "older device samples were thinned"),
    "no_step": lambda event: ("!", "warning", event.detail or ""),
    "trouble": _detail("!", "warning", "trouble"),
}
"""Sign, tone and words of each kind of event that is shown."""

"""The timeline in words: each event with its sign and tone, and the events of a run with its compilations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.machine.telemetry import throttle
from trainfast_runner.records.run_directory import state_text
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import Tone, plain

if TYPE_CHECKING:
    from trainfast_runner.records.run_lines import Event, Step
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_runner.running.planning import RunPlan


EVENTS_KEPT = 500
Describe = Callable[["Event"], tuple[str, Tone, str]]


class DescribedEvent(msgspec.Struct, frozen=True):
    """An event as it is shown: its time, its sign of one cell, its tone and its words."""

    t_ns: int
    """CLOCK_MONOTONIC."""
    sign: str
    tone: Tone
    words: str


def events_of_run(run: RunSnapshot | None) -> list[DescribedEvent]:
    """Return the newest events of a run, in order; the end of a throttle or a loss names its duration."""
    if run is None:
        return []
    described = _compilations(run.steps)
    begun_ns: dict[tuple[str, int | None, str], int] = {}
    for event in run.events:
        describe = DESCRIPTIONS.get(event.kind)
        if describe is None:
            continue
        sign, tone, words = describe(event)
        subject, _, edge = event.kind.rpartition("_")
        # The end of a throttle has the reason it began with; the return of a GPU has none.
        key = (subject, event.device, (event.detail or "") if subject == "throttle" else "")
        if edge in ("on", "lost"):
            begun_ns[key] = event.t_ns
        elif (began_ns := begun_ns.pop(key, None)) is not None:
            words += f", after {fmt.duration((event.t_ns - began_ns) / 1e9)}"
        described.append(DescribedEvent(event.t_ns, sign, tone, words))
    return sorted(described, key=lambda event: event.t_ns)[-EVENTS_KEPT:]


def _compilations(steps: Sequence[Step]) -> list[DescribedEvent]:
    return [
        DescribedEvent(
            step.begin_ns, "c", "accent", f"step {step.step:,} compiled: it took {fmt.duration(step.step_ms / 1e3)}"
        )
        for step in steps
        if step.compiling
    ]


def _device(event: Event) -> str:
    return "GPU" if event.device is None else f"GPU {event.device}"


def _throttle(event: Event, *, is_beginning: bool) -> tuple[str, Tone, str]:
    reason = event.detail or ""
    cause = throttle.CAUSE_BY_REASON.get(reason)
    letter = shade_of(cause).letter if cause is not None else "O"
    tone: Tone = "error" if throttle.severity(reason) == "warning" else "warning"
    words = f"{_device(event)}: {'' if is_beginning else 'no longer: '}{throttle.cause_text(reason)}"
    return (letter, tone, words) if is_beginning else (letter.lower(), "muted", words)


def _process(event: Event) -> tuple[str, Tone, str]:
    process_words = event.detail or (f"process {event.pid}" if event.pid is not None else "another process")
    if event.state == "left":
        return "-", "muted", f"{_device(event)}: {process_words}"
    return "+", "warning", f"{_device(event)}: {process_words}"


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
    "gpu_lost": lambda event: ("✗", "error", f"{_device(event)} does not answer: {event.detail or 'no reason'}"),
    "gpu_back": lambda event: ("✓", "success", f"{_device(event)} answers again"),
    "foreign_process": _process,
    "state": _state,
    "stop_requested": lambda event: ("■", "warning", "asked to stop"),
    "kill_sent": lambda event: ("■", "error", "SIGKILL sent"),
    "rank_gone": lambda event: ("✗", "error", "a rank ended" if event.rank is None else f"rank {event.rank} ended"),
    "output_trimmed": _detail("…", "muted", "the middle of output.log was dropped"),
    "steps_trimmed": _detail("…", "warning", "the middle of a rank's step records was dropped"),
    "telemetry_trimmed": _detail("…", "warning", "the middle of the device samples was dropped"),
    "no_step": lambda event: ("!", "warning", event.detail or ""),
    "trouble": _detail("!", "warning", "trouble"),
}
"""Sign, tone and words of each kind of event that is shown."""


class Shade(msgspec.Struct, frozen=True):
    """The drawing of one cause of throttling."""

    cause: str
    letter: str
    """Stands below the chart, a letter for each throttled cell."""
    glyph: str
    """Fills the free cells of the chart."""
    words: str
    """The words of the legend."""
    tone: Tone
    """The colour of the glyph."""


SHADES: tuple[Shade, ...] = (
    Shade("thermal", "T", "░", "throttled by heat", "error"),
    Shade("brake", "B", "▒", "power brake", "error"),
    Shade("hardware", "H", "╱", "hardware slowdown", "error"),
    Shade("power", "P", "·", "at the power limit", "warning"),
    Shade("sync_boost", "S", "┊", "sync boost", "secondary"),
)
"""The worst first: of two causes at once the worse is drawn."""

_BY_CAUSE = {shade.cause: shade for shade in SHADES}


def shade_of(cause: str) -> Shade:
    """Return the shade of a cause that `throttle.causes_of` names."""
    return _BY_CAUSE[cause]


def severity_rank(shade: Shade) -> int:
    """Return the rank of the shade, 0 for the worst."""
    return SHADES.index(shade)


START_WORDS = {
    "import": "importing the training stack",
    "data": "preparing the data",
    "compile": "compiling an extension",
    "model": "building the model",
    "train": "first step",
}
"""Words by the phase that the worker writes."""


def start_words(phase: str, detail: str | None) -> str:
    """Return the phase of a run without steps, with its detail, in words."""
    words = START_WORDS.get(phase, phase or "starting the training process")
    return words + (f" ({detail})" if detail else "")


def importing_words(executable: str) -> str:
    """Return the reason a trace waits while this Python imports the training stack; empty once imported."""
    return f"importing torch and transformers in {executable} (first time: some seconds)" if executable else ""


def wait_words(waits_for: str | None) -> str:
    """Return the wait of a live search for the run `waits_for`; empty if it waits for none."""
    return f"waiting for {plain(waits_for)} to end" if waits_for is not None else ""


def launch_notices(plan: RunPlan) -> Iterator[str]:
    """Yield a line on a model that is cut across nodes, on the knobs that a script may replace, and the reason that its
    steps will not be seen."""
    script = plan.script
    if plan.spans_nodes:
        # HF's guide to several GPUs: tensor parallelism needs the links within a node.
        yield "one copy of the model spans nodes: their link is far slower than that within a node"
    if script is None:
        return
    if script.unconfirmed:
        names = ", ".join(script.unconfirmed)
        yield f"{names}: set without a flag, so the script may keep its own; the result lists what ran"
    if script.hooks_blocked and not script.steps_from_log:
        yield plain(f"its steps are not seen: {script.hooks_blocked}")

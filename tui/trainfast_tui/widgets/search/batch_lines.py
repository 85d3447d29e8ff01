"""The table of a batch search: the probes, the confirmation runs and the step under way, in lines."""

from __future__ import annotations

from collections.abc import Sequence

from trainfast_runner.records.run_states import state_text
from trainfast_runner.search.batch.batch_follower import BatchSnapshot
from trainfast_runner.search.batch.report import measured_under
from trainfast_runner.search.journal.batch import ConfirmationRun, Probe, refuted_by
from trainfast_runner.units import counted
from trainfast_tui.text import format as fmt
from trainfast_tui.text.lines import Line, Tone, labelled
from trainfast_tui.text.memory_words import phase_words
from trainfast_tui.text.search.outcomes import REFUTED, outcome_of
from trainfast_tui.text.signs import DOUBT_SIGN

PHASE_COLUMNS = (("forward_backward", "fwd+bwd"), ("optimizer", "optimizer"))
STEP_COLUMNS = (("step", "memory"), ("", ""))
"""Columns of a script's search: its hooks see no phases of memory."""
WIDE_CELLS: tuple[int, ...] = (8, 12, 12, 12, 12, 12)
NARROW_CELLS: tuple[int, ...] = (7, 10, 10, 10, 10, 11)
"""Cells of each column before the outcome."""
WIDE_CELLS_FROM, ALL_CELLS_FROM = 100, 76
"""Columns from which cells are wide, and below which some are left out."""


def table_lines(search: BatchSnapshot, width: int) -> list[Line]:
    """Return a title, a row for each probe and confirmation run in their order, and one for the step under way."""
    rows: list[Line] = []
    # On a CPU every step of a preset's search measures memory: its speeds rank against no others.
    sign = f"{DOUBT_SIGN} " if search.question is not None and measured_under(search.question) is not None else ""
    columns = STEP_COLUMNS if any("step" in probe.phase_peaks for probe in search.probes) else PHASE_COLUMNS
    for probe in search.probes:
        rows.append(_probe_row(probe, search, columns, sign, width))
        if probe.outcome == "void" and probe.reason:
            # The person has to fix the reason, so it is shown in full.
            rows += labelled((" " * 10, "text"), probe.reason, width, "warning")
    for confirmation in search.confirmations:
        rows.append(_confirmation_row(confirmation, columns, sign, width))
        if confirmation.state not in ("finished", "oom") and confirmation.reason:
            rows += labelled((" " * 10, "text"), confirmation.reason, width, "error")
    step = search.newest_step
    if search.state in ("running", "pausing") and step is not None and step.batch_size is not None:
        verb = "probing…" if step.action == "probe" else "confirming…"
        if search.waits_for:
            verb = "waiting…"
        rows.append(_row([f"▸{step.batch_size:,}"], [(verb, "secondary")], width))
    title = ["batch", *(name for _, name in columns), "step", "samples/s", "took"]
    return [_row(title, [("outcome", "muted")], width, "muted"), *rows]


def _row(cells: Sequence[str], end: Line, width: int, tone: Tone = "text") -> Line:
    widths = WIDE_CELLS if width >= WIDE_CELLS_FROM else NARROW_CELLS
    padded = [*cells, *([""] * (len(widths) - len(cells)))]
    if width < ALL_CELLS_FROM:
        # The outcome matters more than the time.
        widths, padded = (*widths[:3], widths[4]), [*padded[:3], padded[4]]
    texts = [" " + fmt.to_width(cell, cell_width - 1, "right") for cell, cell_width in zip(padded, widths, strict=True)]
    return [("".join(texts), tone), ("  ", "text"), *end]


def _rate(samples_per_s: float | None, sign: str) -> str:
    """Return samples per second, with the sign of a speed that ranks against no other."""
    return (sign if samples_per_s is not None else "") + fmt.number(samples_per_s)


def _probe_row(probe: Probe, search: BatchSnapshot, columns: Sequence[tuple[str, str]], sign: str, width: int) -> Line:
    outcome = outcome_of(REFUTED if refuted_by(probe, search.confirmations) is not None else probe.outcome)
    words = "OOM" if width < WIDE_CELLS_FROM and probe.outcome == "oom" else outcome.noun
    phase_piece = f" in {phase_words(probe.phase)}" if probe.phase and probe.outcome == "oom" else ""
    rank = ""
    if len(search.memory_fits) > 1 and probe.rank is not None:
        rank = f", rank {probe.rank} fullest" if probe.outcome == "fits" else f" on rank {probe.rank}"
    retries = f", {counted(probe.alloc_retries, 'allocator retry', 'allocator retries')}" if probe.alloc_retries else ""
    cells = [
        f"{probe.batch_size:,}",
        *(fmt.size(probe.phase_peaks.get(key)) if key else "" for key, _ in columns),
        fmt.milliseconds(probe.step_ms),
        _rate(probe.samples_per_s, sign),
        fmt.duration(probe.seconds),
    ]
    return _row(cells, [(f"{outcome.sign} {words}{phase_piece}{rank}{retries}", outcome.tone)], width)


def _confirmation_row(confirmation: ConfirmationRun, columns: Sequence[tuple[str, str]], sign: str, width: int) -> Line:
    is_confirmed = confirmation.state == "finished"
    if is_confirmed:
        words = f"confirmed: {confirmation.run_id}" if width >= WIDE_CELLS_FROM else "confirmed"
    elif confirmation.state == "oom":
        words = "out of memory in the confirmation run"
    else:
        words = f"confirmation run {state_text(confirmation.state)}"
    optimizer_bytes = max((rank.phase_peaks.get("optimizer", 0) for rank in confirmation.ranks), default=0) or None
    cells = [
        f"{confirmation.batch_size:,}",
        fmt.size(confirmation.peak_allocated_bytes),
        fmt.size(optimizer_bytes) if columns is PHASE_COLUMNS else "",
        fmt.milliseconds(confirmation.step_ms),
        _rate(confirmation.samples_per_s, sign),
        fmt.duration(confirmation.seconds),
    ]
    return _row(cells, [(f"{'✓' if is_confirmed else '✗'} {words}", "success" if is_confirmed else "error")], width)

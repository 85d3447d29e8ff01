"""The steps of a run as a table: phases, and the watched GPUs' readings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainfast_runner.machine.telemetry.throttle import CAUSES
from trainfast_runner.worker.shared.phases import STEP_PHASES
from trainfast_tui.cli.printing.output import print_line, print_table
from trainfast_tui.text.format import ABSENT, celsius, count, fraction, joules, milliseconds
from trainfast_tui.text.tables import figure_headings, without_empty_columns

StepRecord = dict[str, Any]
"""A step's fields and those of its `StepConditions`, as `step_record` returns them."""
CAUSE_HEADS = {"thermal": "HEAT", "power": "POWER CAP", "brake": "BRAKE", "sync_boost": "SYNC BOOST"}


def print_steps(steps: Sequence[StepRecord]) -> None:
    """Print a line for each step, without empty columns; throttled time is in milliseconds of the step."""
    if not steps:
        print_line("no step is on record")
        return
    rows = [[cell(step) for _, cell in STEP_COLUMNS] for step in steps]
    header = figure_headings(*(heading for heading, _ in STEP_COLUMNS))
    print_table(*without_empty_columns(header, rows, empty=ABSENT))
    sources = sorted({source for step in steps for source in (step["sources"] or {}).values()})
    if sources:
        print_line(f"throttled time from: {', '.join(sources)}")


def _phase(name: str) -> Callable[[StepRecord], str]:
    return lambda step: milliseconds(step[f"{name}_ms"])


def _throttled(cause: str) -> Callable[[StepRecord], str]:
    return lambda step: milliseconds((step["throttled_ms"] or {}).get(cause))


STEP_COLUMNS: tuple[tuple[str, Callable[[StepRecord], str]], ...] = (
    ("STEP", lambda step: count(step["step"]) + (" warm-up" if step["warmup"] else "")),
    ("TOOK", _phase("step")),
    *((name.upper(), _phase(name)) for name in STEP_PHASES),
    *((CAUSE_HEADS[cause.name], _throttled(cause.name)) for cause in CAUSES),
    ("CLOCK LOSS", lambda step: fraction(step["clock_loss_fraction"], 1)),
    ("ENERGY", lambda step: joules(step["energy_joules"])),
    ("A SAMPLE", lambda step: joules(step["joules_per_sample"])),
    ("TEMP AT START", lambda step: celsius(step["temperature_c"])),
)

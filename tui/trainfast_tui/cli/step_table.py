"""The steps of a run as a table: phases, and the watched GPUs' readings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainfast_runner.machine.telemetry.throttle import CAUSES
from trainfast_runner.records.run_lines import Step
from trainfast_runner.results.bottleneck.step_conditions import StepConditions
from trainfast_tui.cli.output import print_line, print_table
from trainfast_tui.text.format import ABSENT, celsius, count, joules, milliseconds, percent

Joined = tuple[Step, StepConditions | None]
Column = tuple[str, Callable[[Joined], str]]

CAUSE_HEADS = {"thermal": "HEAT", "power": "POWER CAP", "brake": "BRAKE", "sync_boost": "SYNC BOOST"}


def print_steps(steps: Sequence[Joined]) -> None:
    """Print a line for each step, without empty columns; throttled time is in milliseconds of the step."""
    if not steps:
        print_line("no step is on record")
        return
    rows = [[cell(step) for _, cell in COLUMNS] for step in steps]
    kept = [column for column in range(len(COLUMNS)) if any(row[column] != ABSENT for row in rows)]
    print_table(
        [COLUMNS[column][0] for column in kept], [[row[column] for column in kept] for row in rows], range(len(kept))
    )
    sources = sorted({source for _, joined in steps if joined for source in joined.sources.values()})
    if sources:
        print_line(f"throttled time from: {', '.join(sources)}")


def _phase(name: str) -> Callable[[Joined], str]:
    return lambda one: milliseconds(getattr(one[0], f"{name}_ms"))


def _throttled(cause: str) -> Callable[[Joined], str]:
    return lambda one: milliseconds(one[1].throttled_ms.get(cause)) if one[1] else ABSENT


def _clock_loss(one: Joined) -> str:
    fraction = one[1].clock_loss_fraction if one[1] else None
    return ABSENT if fraction is None else percent(100 * fraction, 1)


COLUMNS: tuple[Column, ...] = (
    ("STEP", lambda one: count(one[0].step) + (" warm-up" if one[0].warmup else "")),
    ("TOOK", _phase("step")),
    *((name.upper(), _phase(name)) for name in ("data", "forward", "backward", "optimizer", "other")),
    *((CAUSE_HEADS[cause.name], _throttled(cause.name)) for cause in CAUSES),
    ("CLOCK LOSS", _clock_loss),
    ("ENERGY", lambda one: joules(one[1].energy_joules if one[1] else None)),
    ("A SAMPLE", lambda one: joules(one[1].joules_per_sample if one[1] else None)),
    ("TEMP AT START", lambda one: celsius(one[1].temperature_c if one[1] else None)),
)

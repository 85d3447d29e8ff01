"""The steps of a run as a table: phases, and the watched GPUs' readings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from trainfast_runner.machine.telemetry.throttle import CAUSES
from trainfast_runner.records.run_lines import Step
from trainfast_runner.results.device_conditions.step_conditions import StepConditions
from trainfast_tui.cli.output import print_line, print_table
from trainfast_tui.text.format import ABSENT, celsius, count, fraction, joules, milliseconds


class JoinedStep(NamedTuple):
    """A step, and the conditions of its devices during it; None where they were not sampled."""

    step: Step
    conditions: StepConditions | None


Column = tuple[str, Callable[[JoinedStep], str]]

CAUSE_HEADS = {"thermal": "HEAT", "power": "POWER CAP", "brake": "BRAKE", "sync_boost": "SYNC BOOST"}


def print_steps(steps: Sequence[JoinedStep]) -> None:
    """Print a line for each step, without empty columns; throttled time is in milliseconds of the step."""
    if not steps:
        print_line("no step is on record")
        return
    rows = [[cell(step) for _, cell in COLUMNS] for step in steps]
    filled = [column for column in range(len(COLUMNS)) if any(row[column] != ABSENT for row in rows)]
    header = [COLUMNS[column][0] for column in filled]
    print_table(header, [[row[column] for column in filled] for row in rows], range(len(filled)))
    sources = sorted({source for joined in steps if joined.conditions for source in joined.conditions.sources.values()})
    if sources:
        print_line(f"throttled time from: {', '.join(sources)}")


def _phase(name: str) -> Callable[[JoinedStep], str]:
    return lambda joined: milliseconds(getattr(joined.step, f"{name}_ms"))


def _throttled(cause: str) -> Callable[[JoinedStep], str]:
    return lambda joined: milliseconds(joined.conditions.throttled_ms.get(cause)) if joined.conditions else ABSENT


def _clock_loss(joined: JoinedStep) -> str:
    return fraction(joined.conditions.clock_loss_fraction if joined.conditions else None, 1)


COLUMNS: tuple[Column, ...] = (
    ("STEP", lambda joined: count(joined.step.step) + (" warm-up" if joined.step.warmup else "")),
    ("TOOK", _phase("step")),
    *((name.upper(), _phase(name)) for name in ("data", "forward", "backward", "optimizer", "other")),
    *((CAUSE_HEADS[cause.name], _throttled(cause.name)) for cause in CAUSES),
    ("CLOCK LOSS", _clock_loss),
    ("ENERGY", lambda joined: joules(joined.conditions.energy_joules if joined.conditions else None)),
    ("A SAMPLE", lambda joined: joules(joined.conditions.joules_per_sample if joined.conditions else None)),
    ("TEMP AT START", lambda joined: celsius(joined.conditions.temperature_c if joined.conditions else None)),
)

"""The steps of a run as a table: phases, and what the watched GPUs did meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainfast_runner.machine.telemetry.throttle_causes import CAUSES
from trainfast_runner.records.run_file import Step
from trainfast_runner.results.bottleneck.step_conditions import StepConditions
from trainfast_tui.cli.output import say, say_table
from trainfast_tui.text.format import ABSENT, celsius, count, joules, milliseconds, percent

Joined = tuple[Step, StepConditions | None]
Column = tuple[str, Callable[[Joined], str]]

CAUSE_HEADS = {"thermal": "HEAT", "power": "POWER CAP", "brake": "BRAKE", "sync_boost": "SYNC BOOST"}


def say_steps(steps: Sequence[Joined]) -> None:
    """One line a step; columns that no step has are left out. Throttled time is in milliseconds of that step."""
    if not steps:
        say("no step is on record")
        return
    rows = [[cell(one) for _, cell in COLUMNS] for one in steps]
    kept = [place for place in range(len(COLUMNS)) if any(row[place] != ABSENT for row in rows)]
    say_table([COLUMNS[place][0] for place in kept], [[row[place] for place in kept] for row in rows], range(len(kept)))
    sources = sorted({source for _, joined in steps if joined for source in joined.sources.values()})
    if sources:
        say(f"throttled time from: {', '.join(sources)}")


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

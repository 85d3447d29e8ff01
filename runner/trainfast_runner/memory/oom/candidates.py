"""Specs of a run that ran out of memory, each with changes that free memory and is worth a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

from trainfast_runner.errors import UserError
from trainfast_runner.memory.oom.fixes import MIN_SEQ_LEN, Fix, useful_first
from trainfast_runner.settings.spec import RunSpec, with_setting

Settings = dict[str, str]
"""The text of each changed knob."""


def specs_with_one_change(spec: RunSpec, applicable: Iterable[Fix], phase: str | None) -> list[RunSpec]:
    """Return the specs of all single changes but a smaller batch, the most useful first."""
    return _specs(spec, [{fix.knob: fix.value} for fix in useful_first(applicable, phase)])


def specs_with_several_changes(spec: RunSpec, applicable: Iterable[Fix]) -> list[RunSpec]:
    """Return the specs of several changes at once, the strongest first, for a run that no single change makes fit."""
    applicable = [fix for fix in applicable if fix.knob != "batch_size"]
    shorter = [{fix.knob: value} for fix in applicable if fix.knob == "seq_len" for value in values_of(fix)[1:]]
    pairs = [{first.knob: first.value, second.knob: second.value} for first, second in pairs_of_knobs(applicable)]
    all_of_them = strongest_settings(applicable)
    return _specs(spec, [*all_of_them, *shorter, *pairs, *({**all_of_them[0], **change} for change in shorter)])


def strongest_settings(applicable: Iterable[Fix]) -> list[Settings]:
    """Every memory-saving knob but batch and sequence at its strongest value, once with each smaller optimizer.

    The optimizer of the lowest peak depends on the model. A shorter sequence would be another task.
    """
    keeping_task = [fix for fix in applicable if fix.knob not in ("batch_size", "seq_len")]
    others = {fix.knob: fix.value for fix in keeping_task if fix.knob != "optimizer"}
    optimizers = [{fix.knob: fix.value} for fix in reversed(keeping_task) if fix.knob == "optimizer"] or [{}]
    return [{**others, **optimizer} for optimizer in optimizers]


def pairs_of_knobs(applicable: Iterable[Fix]) -> Iterator[tuple[Fix, Fix]]:
    """Yield every two changes of different knobs."""
    return ((first, second) for first, second in combinations(applicable, 2) if first.knob != second.knob)


def values_of(fix: Fix) -> list[str]:
    """The change's value; of a shorter sequence its halves too, down to the shortest proposed."""
    values = [fix.value]
    while fix.knob == "seq_len" and int(values[-1]) // 2 >= MIN_SEQ_LEN:
        values.append(str(int(values[-1]) // 2))
    return values


def spec_with(spec: RunSpec, settings: Settings) -> RunSpec | None:
    """The spec with these settings; None if one is refused."""
    try:
        for name, value in settings.items():
            spec = with_setting(spec, f"{name}={value}")
    except UserError:
        return None
    return spec


def _specs(spec: RunSpec, changes: list[Settings]) -> list[RunSpec]:
    """The different specs with these settings; a smaller batch needs no trace of its own."""
    specs: list[RunSpec] = []
    for settings in changes:
        changed = None if "batch_size" in settings else spec_with(spec, settings)
        if changed is not None and changed != spec and changed not in specs:
            specs.append(changed)
    return specs

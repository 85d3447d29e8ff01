"""Specs of a run that ran out of memory, each with changes that free memory and is worth a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

from trainfast_runner.errors import UserError
from trainfast_runner.memory.oom.knob_changes import MIN_SEQ_LEN, KnobChange, useful_first
from trainfast_runner.settings.spec import RunSpec, with_setting

Settings = dict[str, str]
"""The text of each changed knob."""


def specs_with_one_change(spec: RunSpec, applicable: Iterable[KnobChange], phase: str | None) -> list[RunSpec]:
    """Return the specs of all single changes but a smaller batch, the most useful first."""
    return _specs(spec, [{change.knob: change.value} for change in useful_first(applicable, phase)])


def specs_with_several_changes(spec: RunSpec, applicable: Iterable[KnobChange]) -> list[RunSpec]:
    """Return the specs of several changes at once, the strongest first, for a run that no single change makes fit."""
    applicable = [change for change in applicable if change.knob != "batch_size"]
    shorter_lengths = [
        {change.knob: value} for change in applicable if change.knob == "seq_len" for value in values_of(change)[1:]
    ]
    pairs = [{first.knob: first.value, second.knob: second.value} for first, second in pairs_of_knobs(applicable)]
    all_of_them = strongest_settings(applicable)
    return _specs(
        spec, [*all_of_them, *shorter_lengths, *pairs, *({**all_of_them[0], **length} for length in shorter_lengths)]
    )


def strongest_settings(applicable: Iterable[KnobChange]) -> list[Settings]:
    """Every memory-saving knob but batch and sequence at its strongest value, once with each smaller optimizer.

    The optimizer of the lowest peak depends on the model. A shorter sequence would be another task.
    """
    keeping_task = [change for change in applicable if change.knob not in ("batch_size", "seq_len")]
    others = {change.knob: change.value for change in keeping_task if change.knob != "optimizer"}
    optimizers = [{change.knob: change.value} for change in reversed(keeping_task) if change.knob == "optimizer"]
    return [{**others, **optimizer} for optimizer in optimizers or [{}]]


def pairs_of_knobs(applicable: Iterable[KnobChange]) -> Iterator[tuple[KnobChange, KnobChange]]:
    """Yield every two changes of different knobs."""
    return ((first, second) for first, second in combinations(applicable, 2) if first.knob != second.knob)


def values_of(change: KnobChange) -> list[str]:
    """The change's value; of a shorter sequence its halves too, down to the shortest proposed."""
    values = [change.value]
    while change.knob == "seq_len" and int(values[-1]) // 2 >= MIN_SEQ_LEN:
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

"""The step records of a run joined to the watched devices' conditions, for `runs show --steps`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.records.run_lines import Step
from trainfast_runner.records.run_records import RunRecords, read_records
from trainfast_runner.results.device_conditions.step_conditions import StepConditions, join_of
from trainfast_runner.settings.device_counts import ranks_with_samples


def read_joined_steps(directory: Path) -> list[tuple[Step, StepConditions | None]]:
    """Every readable step of the lowest rank, in order; None beside a step of a run that watches no device."""
    records = read_records(directory)
    steps = records.first_rank_steps
    conditions = {condition.step: condition for condition in _conditions(records, steps)}
    return [(step, conditions.get(step.step)) for step in steps]


def as_record(step: Step, conditions: StepConditions | None) -> dict[str, Any]:
    """One object with the step's fields and those of `StepConditions`, null when unknown."""
    absent = dict.fromkeys(StepConditions.__struct_fields__)
    return {**absent, **(msgspec.structs.asdict(conditions) if conditions else {}), **msgspec.structs.asdict(step)}


def _conditions(records: RunRecords, steps: list[Step]) -> list[StepConditions]:
    run = records.run
    if run is None or not run.watch_uuids:
        return []
    join = join_of(records.device_samples, run.watch_uuids, samples_factor=ranks_with_samples(run))
    for step in steps:
        join.add(step)
    return [_without_watched_losses(step, run.device_uuids) for step in join.joined(final=True)]


def _without_watched_losses(conditions: StepConditions, used_uuids: Collection[str]) -> StepConditions:
    """A step loses time to the devices it trains on alone, as in the result: not to one that is only watched."""
    devices = tuple(
        device if device.uuid in used_uuids else msgspec.structs.replace(device, lost_ms=dict.fromkeys(device.lost_ms))
        for device in conditions.devices
    )
    return msgspec.structs.replace(conditions, devices=devices)

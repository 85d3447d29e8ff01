"""Compare settings: the same model, the same value of a knob, the same batch search."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from trainfast_runner.machine.devices_knob import CPU, asks_for_cpu
from trainfast_runner.records.run_file import RecordedSpec
from trainfast_runner.settings.set_by_searches import SET_BY_A_BATCH_SEARCH
from trainfast_runner.settings.spec import RunSpec

if TYPE_CHECKING:
    from trainfast_runner.search.batch.batch_follower import BatchSnapshot


def asks_for_same(name: str, reference: object, value: object) -> bool:
    """True if a run with this value of a knob would equal a run with `reference`.

    An unset `devices` or `watch` equals every recorded value; paths are equal if they lead to the same place.
    """
    if name == "offload_path" and isinstance(reference, str) and isinstance(value, str):
        return os.path.abspath(os.path.expanduser(value)) == os.path.abspath(os.path.expanduser(reference))
    if name == "devices" and value == CPU:
        return asks_for_cpu(reference)
    return reference == value or (name in ("devices", "watch") and value is None)


def has_same_model(record: RecordedSpec, spec: RunSpec) -> bool:
    """True if the record names the same preset and model, whatever its knobs."""
    return (record.preset, record.variant, record.model) == (spec.preset, spec.variant, spec.model)


def has_same_settings(search: BatchSnapshot, spec: RunSpec) -> bool:
    """True if the search was for these knobs, apart from the knobs that a search sets itself."""
    question = search.question
    return (
        question is not None
        and has_same_model(question, spec)
        and (spec.script is None or not set(question.knobs) - set(spec.knobs) - set(SET_BY_A_BATCH_SEARCH))
        and all(
            asks_for_same(name, question.knobs.get(name), value)
            for name, value in spec.knobs.items()
            if name not in SET_BY_A_BATCH_SEARCH
        )
    )

"""The prediction of a run: by a trace made before the run began, or while it started."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.records.run_records import RunRecords
from trainfast_runner.settings.spec import RunSpec, spec_of_record


def with_prediction(records: RunRecords) -> RunRecords:
    """Add a prediction to the records if `run.json` was written before there was one.

    Nothing is traced for it, and the run itself has not corrected it yet.
    """
    run = records.run
    if run is None or run.predicted is not None or run.script is not None:
        return records
    try:
        prediction = cached_prediction(
            spec_of_record(run), run.device, run.python or None, run.world_size, run.device_names
        )
    except Exception:
        # A prediction that fails, as with another version's knobs, must not change how the run ends.
        return records
    if prediction is None:
        return records
    return dataclasses.replace(records, run=msgspec.structs.replace(run, predicted=prediction))


def cached_prediction(
    spec: RunSpec, device: str, python: str | None, world_size: int, gpus: list[str]
) -> dict[str, Any] | None:
    """The fields of a run's `Prediction` by an earlier trace; `gpus` are the names of its GPUs.

    None without a trace, and for a strategy whose memory is not predicted.
    """
    # Imported late: a launch without a prediction, as of a script, starts without the tracer.
    from trainfast_runner.memory.tracing import cached_model

    try:
        model = cached_model(spec, device, python)
        if model is None:
            return None
        fields: dict[str, Any] = msgspec.to_builtins(
            model.corrected_for(next(iter(gpus), None)).predict(spec, world_size)
        )
        return fields
    except UserError:
        return None

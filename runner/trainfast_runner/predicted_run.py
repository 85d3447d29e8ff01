"""What was predicted of a run that has ended: before it began, or by a trace that landed while it started."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from trainfast_runner.records import RunFile
from trainfast_runner.run_records import RunRecords


def with_prediction(records: RunRecords) -> RunRecords:
    """The records with a prediction, where `run.json` was written before there was one and there is one now.

    Nothing is traced for it, and what the run itself took does not enter it: that is learnt only afterwards.
    """
    run = records.run
    if run is None or run.predicted is not None:
        return records
    predicted = _predicted(run)
    return records if predicted is None else replace(records, run=msgspec.structs.replace(run, predicted=predicted))


def _predicted(run: RunFile) -> dict[str, Any] | None:
    from trainfast_runner.memory_model import cached_model
    from trainfast_runner.spec import of_record

    try:
        spec = of_record(run)
        model = cached_model(spec, run.device, run.python or None)
        return None if model is None else msgspec.to_builtins(model.predict(spec, run.world_size))
    except Exception:
        # The end of a run does not depend on arithmetic about it, least of all on that of another version's knobs.
        return None

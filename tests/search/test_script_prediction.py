"""The reason that a script's largest batch is predicted from its probes alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from trainfast_runner.search.batch.script_conductor import ScriptBatchConductor

if TYPE_CHECKING:
    from trainfast_runner.records.result import Result
    from trainfast_runner.search.journal.batch import Probe

TRACED = SimpleNamespace(traced_memory=object(), unknown={})
UNTRACED = SimpleNamespace(traced_memory=None, unknown={"traced_memory": "tracing took more than 30 s"})


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (TRACED, "the free memory of the GPU is unknown"),
        (UNTRACED, "tracing took more than 30 s"),
    ],
)
def test_a_search_without_a_known_limit_blames_no_trace_that_it_has(script: object, reason: str) -> None:
    unlimited: Any = SimpleNamespace(_plan=SimpleNamespace(memory_limit_bytes=None), _free_gpu_bytes=lambda: None)
    result = cast("Result", SimpleNamespace(script=script, run_id="one"))
    predicted = ScriptBatchConductor._predicted(unlimited, result, cast("Probe", None))
    assert predicted.reason == f"memory is predicted from the probes alone: {reason}"

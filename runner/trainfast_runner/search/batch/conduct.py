"""Conduct a batch search to its end, of a preset or of a user's own script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainfast_runner.records.home import Home
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.batch.conductor import BatchConductor
from trainfast_runner.search.batch.preset_probes import PresetBatchConductor
from trainfast_runner.search.conductor import Caller, conduct_alone
from trainfast_runner.search.journal.batch import BatchEnded, BatchLine
from trainfast_runner.search.options import BatchSearchOptions

MakeConductor = Callable[[Path, RunPlan, Home, BatchSearchOptions, Caller[BatchLine]], BatchConductor]
"""Makes the conductor of a search, with the arguments of `BatchConductor`."""


def conduct_batch(
    directory: Path,
    plan: RunPlan,
    home: Home,
    options: BatchSearchOptions,
    *,
    on_line: Callable[[BatchLine], None] = lambda line: None,
    is_cancelled: Callable[[], bool] = lambda: False,
    began_ns: int | None = None,
    make_conductor: MakeConductor = PresetBatchConductor,
) -> BatchEnded:
    """Conduct the search in `directory` to its end, record that and return it. `on_line` gets every new line.

    The search's time counts from `began_ns` (CLOCK_MONOTONIC), when making the plan began.

    Raises UserError when another process conducts the search, and when its device is in use.
    """
    caller = Caller(on_line, is_cancelled, began_ns)
    return conduct_alone(directory, lambda: make_conductor(directory, plan, home, options, caller))

"""The time that a run needs before its steps are steady."""

from __future__ import annotations

import statistics
from pathlib import Path

from trainfast_runner.records.run_records import read_records


def read_start_s(directory: Path) -> float:
    """Seconds from the launch to steady steps, beyond the steps' own time: imports, building, compiling.

    A training of N steps takes this and N steady steps. 0 without a measured step.
    """
    records = read_records(directory)
    steps = records.first_rank_steps
    warmup = [step for step in steps if step.warmup]
    measured_ms = [step.step_ms for step in steps if not step.warmup]
    if records.run is None or not measured_ms or not warmup:
        return 0.0
    until_steady_s = (warmup[-1].t_ns - records.run.clock.monotonic_ns) / 1e9
    return max(0.0, until_steady_s - len(warmup) * statistics.median(measured_ms) / 1e3)

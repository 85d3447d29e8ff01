"""The cost of compiling a run, and the steps after which it pays."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from trainfast_runner.records.home import Home
from trainfast_runner.records.result import CompileCost
from trainfast_runner.records.run_directory import read_result, read_run_file
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_records import RunRecords

NOT_COMPARED = ("compile", "steps", "timing_warmup", "watch")
"""Knobs that may differ from those of the other run: they change the compilation or the measurement, not a step."""


def compile_cost(records: RunRecords, directory: Path) -> CompileCost | None:
    """The cost of compiling in the run in `directory`; None for a run with compile=off and for a script.

    The run is compared with the latest uncompiled run of the same settings. `cold_seconds` is the time by which the
    steps that compiled something exceed steady steps, on the first rank.
    """
    run = records.run
    if run is None or run.knobs.get("compile", "off") == "off" or not records.steps:
        return None
    if run.script is not None:
        # A script's step records do not mark compiling, and its model and data, which decide a step, are unknown.
        return None
    steps = records.first_rank_steps
    measured_ms = [step.step_ms for step in steps if not step.warmup]
    if not measured_ms:
        return CompileCost(reason="no step was measured after compiling")
    steady_ms = statistics.median(measured_ms)
    cold_s = sum(step.step_ms - steady_ms for step in steps if step.compiling) / 1000
    uncompiled = _latest_uncompiled(run, directory)
    if uncompiled is None:
        return CompileCost(
            cold_seconds=cold_s,
            reason="no finished run with compile=off and otherwise equal settings to compare with; run it once",
        )
    run_id, eager_ms = uncompiled
    if eager_ms <= steady_ms:
        return CompileCost(
            cold_seconds=cold_s,
            compared_with=run_id,
            reason=f"never: a compiled step takes {steady_ms:.1f} ms, one with compile=off {eager_ms:.1f} ms",
        )
    return CompileCost(
        cold_seconds=cold_s, break_even_steps=cold_s * 1000 / (eager_ms - steady_ms), compared_with=run_id
    )


def _latest_uncompiled(run: RunFile, directory: Path) -> tuple[str, float] | None:
    """The latest finished run beside `directory` that differs in nothing but compiling, and its median step in ms."""
    home = Home.of_run(directory)
    for candidate in map(home.directory, reversed(home.run_ids())):
        if candidate == directory:
            continue
        try:
            candidate_run = read_run_file(candidate)
            if candidate_run is None or candidate_run.knobs.get("compile", "off") != "off":
                continue
            if _comparison_key(candidate_run) != _comparison_key(run):
                continue
            result = read_result(candidate)
        except OSError:
            # Skip a run that cannot be read.
            continue
        if result is None or result.measured_under is not None or result.state != "finished":
            continue
        if result.step_ms.p50 is not None:
            return result.run_id, result.step_ms.p50
    return None


def _comparison_key(run: RunFile) -> tuple[Any, ...]:
    """Everything that decides the time of a step."""
    knobs = {name: value for name, value in run.knobs.items() if name not in NOT_COMPARED}
    return run.model, run.data, knobs, run.device, run.device_uuids, run.world_size, run.versions.get("torch")

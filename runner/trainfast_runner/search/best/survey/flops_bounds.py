"""Bound the speed of candidates by their FLOPs and the device's measured ceiling, to label those that are never run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from trainfast_runner.machine.calibration import Ceiling, read
from trainfast_runner.machine.cpu.cpu_info import cpu_name
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_records import read_worker_lines
from trainfast_runner.records.worker_lines import ActualLine
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.best.survey.base import Survey
from trainfast_runner.search.journal.best import Space
from trainfast_runner.settings.device_counts import device_count
from trainfast_runner.settings.precisions import peak_precision

ABOVE_CEILING = 1.1
"""A training may be faster than the calibration by this factor: a boost clock, or a CPU shared while calibrating."""


def with_bounds(space: Space, survey: Survey, flops: float, seq_len: int, ceiling: Ceiling) -> Space:
    """Return the space with the least seconds of a sample, for candidates of a calibrated precision.

    `flops` are the model's of one sample of `seq_len` tokens: candidates of another length get no bound. Recomputation
    under checkpointing only adds FLOPs, so the bound still holds.
    """
    candidates = list(space.candidates)
    for number, spec in survey.legal_specs(space).items():
        tflops = ceiling.tflops.get(peak_precision(str(spec.knobs["precision"])))
        if tflops and spec.knobs["seq_len"] == seq_len:
            # The ranks of a CPU run share its cores.
            devices = device_count(spec, survey.machine) if ceiling.device == "cuda" else 1
            least_s = flops / (ABOVE_CEILING * tflops * 1e12 * devices)
            candidates[number] = msgspec.structs.replace(candidates[number], least_s_per_sample=least_s)
    return msgspec.structs.replace(space, candidates=candidates)


def flops_of(directory: Path) -> float | None:
    """Return the model's FLOPs of a sample as last counted by a run's first rank; None before the count."""
    lines = [line for line in read_worker_lines(directory).get(0, []) if isinstance(line, ActualLine)]
    return next((line.model_flops_per_sample for line in reversed(lines) if line.model_flops_per_sample), None)


def ceiling_here(home: Home, plan: RunPlan) -> Ceiling | None:
    """Return the ceiling of the plan's device; None without an undisturbed calibration."""
    ceiling = read(home).get(next(iter(plan.device_names), "") if plan.device == "cuda" else cpu_name())
    return None if ceiling is None or ceiling.disturbed else ceiling

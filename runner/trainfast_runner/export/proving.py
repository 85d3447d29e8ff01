"""The proof of an export: the records of a run that took its settings, compared with these settings."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.export.formats import FORMS_WITH_DEVICES, Exported
from trainfast_runner.export.imported import import_settings
from trainfast_runner.machine.devices_knob import CPU
from trainfast_runner.records.export_proof import ExportProof
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_records import read_worker_lines
from trainfast_runner.records.worker_lines import ScriptLine, newest_of_first_rank
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.presets import PLAIN_PRESET
from trainfast_runner.settings.scripts.script_reach import LAUNCH_KNOBS
from trainfast_runner.units import counted

ENGINE_BY_FRAMEWORK = {"HF Trainer": "trainer", "accelerate": "accelerate", "DeepSpeed": "native", "torch": "native"}
"""The engine whose steps stand for the steps of a script with that framework."""
WHOLE_PARAMETERS = (None, "none", "DataParallel", "DistributedDataParallel")
"""Wrappers under which the optimizer of a rank holds every parameter of the model."""


def proof_of(run: RunFile, before: Result | None, exported: Exported, directory: Path, result: Result) -> ExportProof:
    """The proof that the finished run in `directory` ran the export of `run`, whose result is `before`.

    Raises UserError, exit code 4, for a run without a measured step, and for settings that ran with other values.
    """
    steps_per_s = result.throughput.steps_per_s.median
    if steps_per_s is None:
        raise UserError(f"{result.run_id} has no measured step: {result.reason}", key="--prove", exit_code=4)
    line = newest_of_first_rank(read_worker_lines(directory), ScriptLine)
    ran = {} if line is None else {name: value for name, value in (line.ran or {}).items() if value is not None}
    expected = _exported_knobs(run, exported)
    unlike = [
        f"{name}={expected[name]} ran as {value}" for name, value in ran.items() if expected.get(name, value) != value
    ]
    if result.actual.world_size not in (None, run.world_size):
        unlike.append(f"{run.world_size} processes ran as {result.actual.world_size}")
    if unlike:
        message = f"{result.run_id} did not run as exported: {', '.join(unlike)}"
        raise UserError(message, key="--prove", exit_code=4)
    reason = _no_comparison(run, before, exported, result, ran) or _different_devices(run, exported, directory)
    return ExportProof(
        wall_ns=time.time_ns(),
        to=exported.to,
        run_id=result.run_id,
        text_sha256=exported.digest,
        samples_per_s=result.throughput.samples_per_s.median,
        steps_per_s=steps_per_s,
        compared_with=None if reason or before is None else before.throughput.samples_per_s.median,
        not_compared=reason,
    )


def _exported_knobs(run: RunFile, exported: Exported) -> dict[str, Any]:
    """The knobs that the export sets, with their values."""
    if run.script is None and exported.to == "preset":
        return {}
    if run.script is None or exported.to == "training-args":
        return import_settings(exported.text, exported.to, PLAIN_PRESET).knobs
    names = [
        name for name in run.overrides if name in KNOBS_BY_NAME and name not in (*LAUNCH_KNOBS, *exported.left_out)
    ]
    return {name: run.knobs[name] for name in names}


def _no_comparison(
    run: RunFile, before: Result | None, exported: Exported, result: Result, ran: dict[str, Any]
) -> str | None:
    """The reason the speeds of the two runs do not compare; None if they do."""
    if before is None or before.throughput.samples_per_s.median is None:
        return f"{run.run_id} has no samples/s"
    if result.throughput.samples_per_s.median is None:
        return f"the samples of {result.run_id} are not seen"
    measured_under = before.measured_under or result.measured_under
    if measured_under is not None:
        return f"measured under {measured_under}"
    if run.script is not None and exported.left_out:
        return f"{', '.join(exported.left_out)} cannot be expressed"
    framework = None if result.script is None else result.script.framework
    engine = run.knobs.get("engine")
    if run.script is None and framework is not None and ENGINE_BY_FRAMEWORK.get(framework) != engine:
        return f"{framework} took the steps, and {run.run_id} has engine={engine}"
    for name, value in ran.items():
        if name in KNOBS_BY_NAME and KNOBS_BY_NAME[name].has_equivalent_values and run.knobs.get(name, value) != value:
            return f"{name}={value}, and {run.run_id} has {run.knobs[name]}"
    counts = [side.actual.parameters for side in (before, result) if side.actual.wrapper in WHOLE_PARAMETERS]
    if len(counts) == 2 and None not in counts and counts[0] != counts[1]:
        return f"a model of {counts[1]:,} parameters, and {run.run_id} has {counts[0]:,}"
    return None


def _different_devices(run: RunFile, exported: Exported, directory: Path) -> str | None:
    """The reason that the run in `directory` was on unlike devices; None if alike, or if the form chooses none."""
    proof_run = read_run_file(directory)
    if exported.to not in FORMS_WITH_DEVICES or proof_run is None or _devices(proof_run) == _devices(run):
        return None
    return f"{proof_run.run_id} was on {_devices(proof_run)}, and {run.run_id} on {_devices(run)}"


def _devices(run: RunFile) -> str:
    """The devices of a run, such as "2 NVIDIA A100"; runs on as many GPUs of one model compare."""
    if run.device == CPU:
        return "the CPU"
    if not run.device_names:
        return counted(len(run.device_uuids), "GPU")
    return ", ".join(f"{count} {model}" for model, count in sorted(Counter(run.device_names).items()))

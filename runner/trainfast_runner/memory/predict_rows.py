"""The rows of `predict`: each run's predicted memory beside the available memory and the published figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.machine import training_python
from trainfast_runner.machine.devices import Machine, detect_machine
from trainfast_runner.machine.devices_knob import asks_for_cpu
from trainfast_runner.memory.available import limit_below_weights_error, read_host_free_bytes
from trainfast_runner.memory.headroom import PredictedFit, predict_headroom
from trainfast_runner.memory.model import MemoryModel
from trainfast_runner.memory.tracing import TraceProgress, trace_models
from trainfast_runner.settings import device_counts, presets
from trainfast_runner.settings.compatibility.check import refusal_anywhere
from trainfast_runner.settings.published import published_for
from trainfast_runner.settings.spec import RunSpec, from_preset, resolve
from trainfast_runner.settings.strategy_of_run import strategy_of


@dataclass(frozen=True)
class RunToPredict:
    """One run to be predicted."""

    id: str
    spec: RunSpec
    published: Mapping[str, Any]
    """A variant's published figures."""
    unpublished: str = ""
    """The reason that they are left out; empty if they are not."""


@dataclass(frozen=True)
class PredictedRow:
    """A run's prediction, or its UserError as `error`."""

    run: RunToPredict
    fit: PredictedFit | None = None
    model: MemoryModel | None = None
    """The model that made the prediction."""
    machine: Machine | None = None
    """The machine that the run is for."""
    limit_error: UserError | None = None
    """The refusal of a limit below the weights alone."""
    error: UserError | None = None


def runs_to_predict(reference: str, settings: list[str]) -> list[RunToPredict]:
    """Return the run of PRESET or NAME/VARIANT, or each variant of a preset that has some. Raises UserError."""
    preset, chosen_variant = presets.load(reference)
    if chosen_variant is not None or not preset.variants:
        spec = resolve(reference, settings)
        if chosen_variant is None:
            return [RunToPredict(spec.name, spec, {})]
        return [RunToPredict(chosen_variant.id, spec, *published_for(preset, chosen_variant, spec))]
    specs = [(variant, from_preset(preset, variant, settings)) for variant in preset.variants]
    return [RunToPredict(variant.id, spec, *published_for(preset, variant, spec)) for variant, spec in specs]


def predict_rows(
    runs: list[RunToPredict], python: str | None, on_traced: Callable[[TraceProgress], None]
) -> Iterator[tuple[int, PredictedRow]]:
    """Yield each run's index and its row as soon as it is ready; a run that cannot be predicted has its `error`.

    `on_traced` gets the progress of the traces, with the index of the run that the next one is for. Raises UserError if
    the training Python cannot be asked, and if all runs are for GPUs that cannot be used.
    """
    # The model is left out: its trace tells whether it can be built.
    versions = training_python.inspect(python, {}, runs[0].spec.data["objective"]).versions
    machine = detect_machine(versions, python)
    if machine.refusal is not None and not any(asks_for_cpu(run.spec.knobs["devices"]) for run in runs):
        raise machine.refusal
    ranks: dict[int, int] = {}
    runs = list(runs)
    for index, run in enumerate(runs):
        try:
            runs[index] = run = _checked_run(run, machine)
            ranks[index] = device_counts.world_size(run.spec, machine)
        except UserError as error:
            yield index, PredictedRow(run, error=error)
    indexes_by_device: dict[str, list[int]] = {}
    for index in ranks:
        indexes_by_device.setdefault(machine.used_by(runs[index].spec.knobs["devices"]).device, []).append(index)
    for device, indexes in indexes_by_device.items():
        gpus = [gpu.uuid for gpu in machine.gpus if gpu.uuid] if device == "cuda" else []
        report = partial(_report, on_traced, indexes)
        for number, model in trace_models([runs[index].spec for index in indexes], device, python, report, gpus=gpus):
            index = indexes[number]
            yield index, _predicted_row(runs[index], model, machine, ranks[index])


def _checked_run(run: RunToPredict, machine: Machine) -> RunToPredict:
    """Return the run with its devices filled in. Raises UserError if it cannot run."""
    if (refusal := machine.used_by(run.spec.knobs["devices"]).refusal) is not None:
        raise refusal
    run = replace(run, spec=device_counts.with_devices(run.spec, machine))
    if (refusal := refusal_anywhere(run.spec, machine)) is not None:
        raise refusal
    return run


def _report(on_traced: Callable[[TraceProgress], None], indexes: list[int], progress: TraceProgress) -> None:
    """Report progress by the index of the run, not by that among the device's runs."""
    on_traced(replace(progress, index=indexes[progress.index]))


def _predicted_row(run: RunToPredict, model: MemoryModel | UserError, machine: Machine, ranks: int) -> PredictedRow:
    if isinstance(model, UserError):
        return PredictedRow(run, error=model)
    try:
        fit = predict_headroom(model, run.spec, machine, ranks, read_host_free_bytes())
        parameters = None if strategy_of(run.spec.knobs).is_tensor_parallel else model.parameters
        limit_error = limit_below_weights_error(run.spec, parameters, device_counts.device_count(run.spec, machine))
    except UserError as error:
        return PredictedRow(run, error=error)
    return PredictedRow(run, fit, model, machine, limit_error)


def published_bytes(published: Mapping[str, Any]) -> int | None:
    """The memory among published figures, in bytes; None if there is none.

    They are MiB as NVML counts them, or decimal GB as the notebook prints.
    """
    for name, unit in (("memory_mb", 2**20), ("memory_gb", 10**9)):
        value = published.get(name)
        if isinstance(value, int | float):
            return round(value * unit)
    return None

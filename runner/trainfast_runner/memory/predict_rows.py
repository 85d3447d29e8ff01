"""What `predict` says of a run: its memory, beside what there is and what was published for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.machine import training_python
from trainfast_runner.machine.cpu.device_names import asks_for_cpu
from trainfast_runner.machine.devices import Machine, look
from trainfast_runner.memory.available import hopeless_limit, host_free_bytes
from trainfast_runner.memory.fitting import Fit, fit_of
from trainfast_runner.memory.model import MemoryModel
from trainfast_runner.memory.tracing import Tracing, trace_models
from trainfast_runner.settings import presets, world
from trainfast_runner.settings.compatibility.check import cannot_run_anywhere
from trainfast_runner.settings.published import published_for
from trainfast_runner.settings.spec import RunSpec, from_preset, resolve
from trainfast_runner.worker.catalog import STRATEGIES


@dataclass(frozen=True)
class Asked:
    """One run to be predicted. `published` are a variant's figures, `unpublished` why they are left out."""

    id: str
    spec: RunSpec
    published: Mapping[str, Any]
    unpublished: str = ""


@dataclass(frozen=True)
class Answer:
    """A prediction beside what there is, or the problem that there is instead of one.

    `hopeless` says that the limit is below the weights alone.
    """

    asked: Asked
    fit: Fit | None = None
    hopeless: UserError | None = None
    problem: UserError | None = None


def asked_for(reference: str, settings: list[str]) -> list[Asked]:
    """The run of PRESET or NAME/VARIANT, or each variant of a preset that has some. Raises UserError."""
    preset, chosen = presets.load(reference)
    if chosen is not None or not preset.variants:
        spec = resolve(reference, settings)
        if chosen is None:
            return [Asked(spec.name, spec, {})]
        return [Asked(chosen.id, spec, *published_for(preset, chosen, spec))]
    specs = [(one, from_preset(preset, one, settings)) for one in preset.variants]
    return [Asked(one.id, spec, *published_for(preset, one, spec)) for one, spec in specs]


def answers(
    asked: list[Asked], python: str | None, on_traced: Callable[[Tracing], None] = lambda tracing: None
) -> Iterator[tuple[int, Answer]]:
    """Each run's place and its answer, as soon as there is one; what cannot be predicted is answered with its problem.

    `on_traced` hears how far the traces are, with the place of the run that the next one is for. Raises UserError where
    the training Python cannot be asked, and where all are for GPUs that cannot be used.
    """
    # Without a model: whether that can be built the trace will say.
    versions = training_python.inspect(python, {}, asked[0].spec.data["objective"]).versions
    machine = look(versions, python)
    if machine.refusal is not None and not any(asks_for_cpu(one.spec.knobs["devices"]) for one in asked):
        raise machine.refusal
    ranks: dict[int, int] = {}
    asked = list(asked)
    for place, one in enumerate(asked):
        try:
            if (refusal := machine.used_by(one.spec.knobs["devices"]).refusal) is not None:
                raise refusal
            asked[place] = one = replace(one, spec=world.with_devices(one.spec, machine))
            if (refusal := cannot_run_anywhere(one.spec, machine)) is not None:
                raise refusal
            ranks[place] = world.world_size(one.spec, machine)
        except UserError as problem:
            yield place, Answer(one, problem=problem)
    on_device: dict[str, list[int]] = {}
    for place in ranks:
        on_device.setdefault(machine.used_by(asked[place].spec.knobs["devices"]).device, []).append(place)
    for device, able in on_device.items():

        def heard(tracing: Tracing, able: list[int] = able) -> None:
            on_traced(replace(tracing, place=able[tracing.place]))

        gpus = [gpu.uuid for gpu in machine.gpus if gpu.uuid] if device == "cuda" else []
        for number, model in trace_models([asked[place].spec for place in able], device, python, heard, gpus=gpus):
            place = able[number]
            yield place, _answer(asked[place], model, machine, ranks[place])


def _answer(asked: Asked, model: MemoryModel | UserError, machine: Machine, ranks: int) -> Answer:
    if isinstance(model, UserError):
        return Answer(asked, problem=model)
    try:
        fit = fit_of(model, asked.spec, machine, ranks, host_free_bytes())
        parameters = None if STRATEGIES[str(asked.spec.knobs["strategy"])].tensor else model.parameters
        hopeless = hopeless_limit(asked.spec, parameters, world.device_count(asked.spec, machine))
    except UserError as problem:
        return Answer(asked, problem=problem)
    return Answer(asked, fit, hopeless)


def published_bytes(published: Mapping[str, Any]) -> int | None:
    """The memory among published figures: MiB as NVML counts them, or decimal GB as the notebook prints."""
    for name, unit in (("memory_mb", 2**20), ("memory_gb", 10**9)):
        value = published.get(name)
        if isinstance(value, int | float):
            return round(value * unit)
    return None

"""Refuse settings that cannot work together before launch: the error names both, and the nearest that can."""

from __future__ import annotations

from dataclasses import replace

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import Machine
from trainfast_runner.machine.devices_knob import asks_for_cpu
from trainfast_runner.settings.compatibility.catalog_rules import (
    CATALOG_RULES,
    compile_fits,
    devices_fill_the_mesh,
    engine_runs_the_strategy,
    link_has_gpus,
    optimizer_has_gpus,
    optimizer_takes_the_parameters,
    strategy_has_gpus,
)
from trainfast_runner.settings.compatibility.data_rules import DATA_RULES
from trainfast_runner.settings.compatibility.facts import Facts, Rule
from trainfast_runner.settings.compatibility.general_rules import (
    GENERAL_RULES,
    devices_exist,
    limit_for_every_rank,
    overrides_take_effect,
    precision_has_hardware,
    strategy_uses_all_devices,
)
from trainfast_runner.settings.compatibility.pipeline_rules import PIPELINE_RULES, micro_batches_divide
from trainfast_runner.settings.compatibility.technique_rules import TECHNIQUE_RULES, flash_has_a_gpu
from trainfast_runner.settings.compatibility.tensor_rules import TENSOR_RULES
from trainfast_runner.settings.compatibility.zero_rules import ZERO_RULES, gpu_has_an_index
from trainfast_runner.settings.knob_values import Choice, KnobValue
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, defaults
from trainfast_runner.settings.spec import RunSpec

RULES: tuple[Rule, ...] = (
    *GENERAL_RULES,
    gpu_has_an_index,
    *CATALOG_RULES,
    *PIPELINE_RULES,
    *TENSOR_RULES,
    *ZERO_RULES,
    *DATA_RULES,
    *TECHNIQUE_RULES,
)

DEVICE_RULES: tuple[Rule, ...] = (
    devices_exist,
    strategy_uses_all_devices,
    strategy_has_gpus,
    precision_has_hardware,
    gpu_has_an_index,
)
"""Rules that look at devices only, and at what they compute with."""

VALUE_RULES: tuple[Rule, ...] = (
    strategy_has_gpus,
    precision_has_hardware,
    gpu_has_an_index,
    optimizer_has_gpus,
    flash_has_a_gpu,
    link_has_gpus,
)
"""Rules by which one value cannot work on the devices asked for, whatever the other knobs are."""

KNOB_RULES: tuple[Rule, ...] = (
    overrides_take_effect,
    limit_for_every_rank,
    micro_batches_divide,
    optimizer_takes_the_parameters,
    optimizer_has_gpus,
    devices_fill_the_mesh,
    engine_runs_the_strategy,
    compile_fits,
)
"""Rules that look at knobs and the number of devices: no other model, GPU or package would help."""


def check(facts: Facts) -> None:
    """Check the settings against every rule. Raises the UserError of the first that refuses."""
    for rule in RULES:
        rule(facts)


def refusal_here(spec: RunSpec, machine: Machine) -> UserError | None:
    """The refusal of a run for which this machine lacks the devices; None when it has them."""
    return _first_refusal(DEVICE_RULES, spec, machine)


def refusal_anywhere(spec: RunSpec, machine: Machine) -> UserError | None:
    """The refusal of knobs that contradict each other; None when they do not, or this machine lacks the devices.

    A CPU is on every machine: what cannot run on it contradicts a `devices` that asks for it.
    """
    refusal = refusal_here(spec, machine)
    if refusal is not None:
        return refusal if asks_for_cpu(spec.knobs["devices"]) else None
    return _first_refusal(KNOB_RULES, spec, machine)


def refused_values(name: str, spec: RunSpec, machine: Machine) -> dict[KnobValue, str]:
    """Return the values of a knob that cannot work on the devices asked for, each with the reason."""
    values = KNOBS_BY_NAME[name].values
    reasons: dict[KnobValue, str] = {}
    for value in values.options if isinstance(values, Choice) else ():
        asked = replace(spec, knobs={**defaults(), **spec.knobs, name: value})
        for refusal in (_first_refusal((rule,), asked, machine) for rule in VALUE_RULES):
            if refusal is not None and refusal.key == name:
                reasons[value] = refusal.message
    return reasons


def _first_refusal(rules: tuple[Rule, ...], spec: RunSpec, machine: Machine) -> UserError | None:
    facts = Facts(spec, machine.used_by(spec.knobs["devices"]), config={}, versions={}, python="")
    try:
        for rule in rules:
            rule(facts)
    except UserError as refusal:
        return refusal
    return None

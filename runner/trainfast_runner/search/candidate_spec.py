"""The run of a candidate: the spec of its search with the candidate's knobs, in a warm process or a fresh one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trainfast_runner.machine.devices_knob import CPU, asks_for_cpu
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.settings.strategy_of_run import strategy_of
from trainfast_runner.worker.catalog import allows_warm_trials

BATCH_KNOBS = ("batch_size", "grad_accum")
"""The knobs that give one rank's share of the global batch."""
MESH_KNOBS = ("strategy", "tp_degree", "pp_degree")
"""The knobs that decide how many data-parallel ranks share the global batch."""


def with_knobs(spec: RunSpec, knobs: Mapping[str, KnobValue]) -> RunSpec:
    """Return `spec` with these knobs; those that differ are overrides."""
    return spec.with_overrides(**{name: value for name, value in knobs.items() if spec.knobs[name] != value})


def candidate_spec(spec: RunSpec, knobs: Mapping[str, KnobValue]) -> RunSpec:
    """Return the run of a candidate: `spec` with its knobs. `devices` is a ceiling; a one-device strategy uses one."""
    run_spec = with_knobs(spec, knobs)
    devices = run_spec.knobs["devices"]
    if not strategy_of(run_spec.knobs).one_device or devices is None:
        return run_spec
    one_device: KnobValue = 1
    if asks_for_cpu(devices):
        one_device = CPU
    elif isinstance(devices, str):
        one_device = devices.partition("+")[0] + "+"
    return replace(run_spec, knobs={**run_spec.knobs, "devices": one_device})


def value_text(name: str, value: KnobValue) -> str:
    """Return a knob's value as typed after `--set name=`; for a knob unknown to this version, as recorded."""
    return KNOBS_BY_NAME[name].text_of(value) if name in KNOBS_BY_NAME else str(value)


def takes_warm_trials(knobs: Mapping[str, object]) -> bool:
    """Return True if a process with these knobs can train one setting after another."""
    return allows_warm_trials(*(str(knobs[name]) for name in ("strategy", "engine", "compile")))

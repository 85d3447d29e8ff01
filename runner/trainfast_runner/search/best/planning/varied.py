"""Choose the knobs that a best-fit search varies: those asked for, or those that keep the training the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import Machine
from trainfast_runner.machine.devices_knob import count_asked
from trainfast_runner.search.best.candidates import Refuse, processes_of
from trainfast_runner.search.best.global_batch import MAX_CANDIDATES, GlobalBatch
from trainfast_runner.search.candidate_spec import candidate_spec
from trainfast_runner.settings.knob_type import Knob
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import KNOBS, KNOBS_BY_NAME, knob
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.settings.strategy_of_run import strategy_of
from trainfast_runner.worker.catalog import STRATEGIES

MutableVary = dict[str, list[KnobValue]]
"""The values of each varied knob; illegal ones are removed."""
NEVER_VARIED = {
    "devices": "it is a ceiling: vary strategy",
    "memory_limit": "it is the limit that every setting has to keep",
    "steps": "it does not change the speed of a step",
    "timing_warmup": "it does not change the speed of a step",
    "watch": "it does not change the speed of a step",
}
"""Knobs that cannot be varied, each with the reason."""
LEFT_ALONE_FIRST = ("pin_memory", "workers", "attention", "optimizer", "checkpointing", "compile")
"""Knobs that are left alone first if there are too many combinations."""


def vary_of(
    spec: RunSpec,
    requested: Mapping[str, Sequence[object]],
    machine: Machine,
    global_batch: int,
    refuse: Refuse,
    entries: Iterable[Knob] = KNOBS,
) -> tuple[MutableVary, dict[str, str]]:
    """Return the values of each varied knob, and the knobs and values left alone, each with the reason.

    If none is requested, the knobs of `entries` that keep the training the same are varied over their legal
    `search_values`. Raises UserError for a knob or value that cannot be varied.
    """
    if requested:
        return {name: _requested_values(name, values) for name, values in requested.items()}, {}
    vary: MutableVary = {}
    left_alone: dict[str, str] = {}
    for entry in entries:
        present_value = spec.knobs[entry.name]
        if not entry.has_equivalent_values:
            left_alone[entry.name] = entry.training
        elif entry.search_values and not all(
            entry.keeps_training(present_value, value) for value in entry.search_values
        ):
            left_alone[entry.name] = f"{entry.text_of(present_value)} trains differently from its other values"
        elif entry.search_values:
            vary[entry.name] = _values(entry, present_value, global_batch)
    on_cpu = machine.used_by(spec.knobs["devices"]).device == "cpu"
    if on_cpu and vary.pop("pin_memory", None) is not None:
        left_alone["pin_memory"] = "a run on the CPU copies nothing to a GPU"
    _drop_illegal(spec, vary, left_alone, machine, refuse)
    _prefer_bf16(spec, vary, left_alone)
    vary = GlobalBatch(spec, machine, vary, global_batch).occurring_values()
    for name in [name for name, values in vary.items() if len(values) < 2]:
        del vary[name]
    for name in LEFT_ALONE_FIRST:
        if name in vary and GlobalBatch(spec, machine, vary, global_batch).count() > MAX_CANDIDATES:
            del vary[name]
            left_alone[name] = f"with it there are more than {MAX_CANDIDATES:,} settings; --vary {name}=... names it"
    return vary, left_alone


def _requested_values(name: str, values: Iterable[object]) -> list[KnobValue]:
    entry = knob(name)
    if name in NEVER_VARIED:
        raise UserError(
            f"{name} cannot be varied: {NEVER_VARIED[name]}",
            key=name,
            advice=f"setting {name} for the next run",
            option=f"--set {name}=...",
        )
    distinct_values = list(dict.fromkeys(entry.read(value) for value in values))
    if not distinct_values:
        raise UserError(f"--vary {name} names no value", key=name, allowed=[entry.values.describe()])
    return distinct_values


def _values(entry: Knob, present_value: KnobValue, global_batch: int) -> list[KnobValue]:
    """Return the present value and the values to try; batch sizes only up to the global batch."""
    values = list(dict.fromkeys((present_value, *entry.search_values)))
    if entry.name == "batch_size":
        sizes = {size for size in (*values, global_batch) if isinstance(size, int)}
        return [size for size in sorted(sizes) if size <= global_batch and global_batch % size == 0]
    return values


def _drop_illegal(
    spec: RunSpec, vary: MutableVary, left_alone: dict[str, str], machine: Machine, refuse: Refuse
) -> None:
    """Leave out the values that cannot run here with any precision, and loader processes beyond the cores."""
    tried_precisions = list(vary.get("precision", [spec.knobs["precision"]]))
    for name, values in vary.items():
        for value in [value for value in values if value != spec.knobs[name]]:
            reason = _unavailable_reason(spec, name, value, machine)
            if reason is None and name != "batch_size":
                precisions = [value] if name == "precision" else tried_precisions
                refusals = [
                    refuse(candidate_spec(spec, {"precision": precision, name: value})) for precision in precisions
                ]
                if all(refusals):
                    reason = next(refusal.message for refusal in refusals if refusal is not None)
            if reason is not None:
                left_alone[f"{name}={KNOBS_BY_NAME[name].text_of(value)}"] = reason
                values.remove(value)


def _unavailable_reason(spec: RunSpec, name: str, value: KnobValue, machine: Machine) -> str | None:
    """Return the reason that a legal value is not worth a trial on this machine; None if it may be."""
    if name == "workers" and isinstance(value, int) and value > machine.cores:
        return f"there are {machine.cores} cores"
    if name == "strategy" and not _has_several_devices(spec, value, machine):
        return "the run has one device"
    return None


def _has_several_devices(spec: RunSpec, strategy: KnobValue, machine: Machine) -> bool:
    """True if the run may use several devices, or the strategy needs one only."""
    if STRATEGIES[str(strategy)].one_device:
        return True
    if machine.used_by(spec.knobs["devices"]).device == "cpu" and strategy_of(spec.knobs).one_device:
        # A CPU runs any number of processes, so several count only if asked for.
        devices = spec.knobs["devices"]
        count = count_asked(devices)
        return (count or 1) > 1
    return (processes_of(candidate_spec(spec, {"strategy": strategy}), machine) or 1) > 1


def _prefer_bf16(spec: RunSpec, vary: MutableVary, left_alone: dict[str, str]) -> None:
    """Leave fp16 out where bf16 runs: it needs loss scaling and is no faster."""
    values = vary.get("precision", [])
    if "bf16" in values and "fp16" in values and spec.knobs["precision"] != "fp16":
        values.remove("fp16")
        left_alone["precision=fp16"] = "bf16 runs here and needs no loss scaling"

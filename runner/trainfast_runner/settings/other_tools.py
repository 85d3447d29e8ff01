"""Knobs as settings of other tools: fields of transformers' TrainingArguments, arguments of torch's DataLoader."""

from __future__ import annotations

from trainfast_runner.settings.knob_values import KnobValue, KnobValues
from trainfast_runner.settings.knobs import KNOBS
from trainfast_runner.worker.catalog import OPTIMIZERS, OptimizerEntry


def trainer_fields(knobs: KnobValues) -> dict[str, object]:
    """The fields that these knobs decide, by name."""
    fields: dict[str, object] = {}
    for entry in KNOBS:
        if entry.name not in knobs:
            continue
        field, value = entry.same_as.trainer_field, knobs[entry.name]
        if entry.name == "precision":
            fields |= _trainer_precision(str(value))
        elif entry.name == "compile":
            fields |= {} if value == "off" else {"torch_compile": True, "torch_compile_mode": compile_mode(knobs)}
        elif field is None or (entry.name == "prefetch" and not knobs.get("workers")):
            continue
        elif entry.name == "optimizer":
            fields |= _trainer_optimizer(field, OPTIMIZERS[str(value)])
        else:
            fields[field] = _trainer_value(value)
    return fields


def loader_arguments(knobs: KnobValues) -> dict[str, object]:
    """The arguments of DataLoader that these knobs decide, by name."""
    names = {"batch_size": "batch_size", "num_workers": "workers", "prefetch_factor": "prefetch"}
    arguments: dict[str, object] = {argument: knobs[name] for argument, name in names.items() if name in knobs}
    if "pin_memory" in knobs:
        arguments["pin_memory"] = knobs["pin_memory"] == "on"
    if knobs.get("workers") == 0:
        # DataLoader refuses one without workers.
        arguments["prefetch_factor"] = None
    return arguments


def compile_mode(knobs: KnobValues) -> str:
    """torch.compile's mode: no gradient can be accumulated in the memory of a CUDA graph, which is replayed."""
    is_replayed = knobs["compile"] == "max-autotune" and knobs.get("grad_accum", 1) != 1
    return "max-autotune-no-cudagraphs" if is_replayed else str(knobs["compile"])


def _trainer_optimizer(field: str, optimizer: OptimizerEntry) -> dict[str, object]:
    """The Trainer's name of an optimizer, else of another loop of the same class, else nothing."""
    trainer_names = (
        entry.trainer_name for entry in OPTIMIZERS.values() if entry.path == optimizer.path and entry.trainer_name
    )
    name = optimizer.trainer_name or next(trainer_names, None)
    return {} if name is None else {field: name}


def _trainer_precision(precision: str) -> dict[str, object]:
    return {
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "tf32": precision == "tf32",
    }


def _trainer_value(value: KnobValue) -> object:
    """Switches as booleans; full checkpointing is the Trainer's `True`."""
    return {"on": True, "off": False, "full": True}.get(value, value) if isinstance(value, str) else value

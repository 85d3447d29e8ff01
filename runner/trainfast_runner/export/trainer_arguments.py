"""A run's knobs as fields of transformers' TrainingArguments, and the knobs that have none."""

from __future__ import annotations

from trainfast_runner.errors import UserError
from trainfast_runner.export.export_text import SAME_RUN_HERE
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import KNOBS, KNOBS_BY_NAME, not_at_default
from trainfast_runner.settings.strategy_of_run import strategy_of
from trainfast_runner.worker.catalog import OPTIMIZERS, OptimizerEntry

TRANSFORMERS_MAJORS = ("4", "5")
"""Versions of transformers in which the fields have these names: 6 drops gradient_checkpointing."""


def trainer_arguments(run: RunFile, knobs: KnobValues) -> tuple[dict[str, object], list[str]]:
    """Every field that a knob decides, by name, and the knobs not at their defaults without a field.

    Raises UserError as `refuse_unsupported_by_trainer` does.
    """
    refuse_unsupported_by_trainer(run, knobs)
    fields = trainer_fields(knobs)
    if run.device == "cpu":
        fields["use_cpu"] = True
    left_out = [name for name in settings_to_express(knobs) if not KNOBS_BY_NAME[name].same_as.training_args]
    left_out += [] if OPTIMIZERS[str(knobs["optimizer"])].trainer_name else ["optimizer"]
    return fields, left_out


def refuse_unsupported_by_trainer(run: RunFile, knobs: KnobValues) -> None:
    """Raise UserError where fields of TrainingArguments would start another run.

    Such a run has another strategy or precision than the Trainer, or another transformers.
    """
    strategy = strategy_of(knobs)
    # The Trainer has no precision without fp32 weights.
    unsupported = [] if strategy.runs_in_trainer else ["strategy"]
    unsupported += ["precision"] if knobs["precision"] == "bf16-pure" else []
    if unsupported:
        names = " and ".join(f"{name}={knobs[name]}" for name in unsupported)
        accelerate = "--to accelerate, or " if unsupported == ["strategy"] and strategy.accelerate_type else ""
        raise UserError(
            f"the Trainer has no flag for {names}: a script started like this would be another run",
            key=unsupported[0],
            advice=accelerate + SAME_RUN_HERE,
        )
    transformers = run.versions.get("transformers")
    if transformers and transformers.partition(".")[0] not in TRANSFORMERS_MAJORS:
        raise UserError(
            f"{run.run_id} ran with transformers {transformers}; these fields are those of 4 and 5",
            key="transformers",
            advice=SAME_RUN_HERE,
        )


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


def settings_to_express(knobs: KnobValues) -> list[str]:
    """Knobs not at their defaults that another tool should express; those about our own run and its timing left out."""
    own = ("timing_warmup", "watch", "engine")
    return [name for name in not_at_default(knobs) if name not in own and KNOBS_BY_NAME[name].applies(knobs)]


def compile_mode(knobs: KnobValues) -> str:
    """torch.compile's mode: no gradient can be accumulated in the memory of a CUDA graph, which is replayed."""
    replayed = knobs["compile"] == "max-autotune" and knobs.get("grad_accum", 1) != 1
    return "max-autotune-no-cudagraphs" if replayed else str(knobs["compile"])


def _trainer_optimizer(field: str, optimizer: OptimizerEntry) -> dict[str, object]:
    """The Trainer's name of an optimizer, else of another loop of the same class, else nothing."""
    same = (entry.trainer_name for entry in OPTIMIZERS.values() if entry.path == optimizer.path and entry.trainer_name)
    name = optimizer.trainer_name or next(same, None)
    return {} if name is None else {field: name}


def _trainer_precision(precision: str) -> dict[str, object]:
    return {
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        **({"tf32": True} if precision == "tf32" else {}),
    }


def _trainer_value(value: KnobValue) -> object:
    """Switches as booleans; full checkpointing is the Trainer's `True`."""
    return {"on": True, "off": False, "full": True}.get(value, value) if isinstance(value, str) else value

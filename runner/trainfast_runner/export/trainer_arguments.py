"""A run's knobs as fields of transformers' TrainingArguments, and the knobs that have none."""

from __future__ import annotations

from trainfast_runner.errors import UserError
from trainfast_runner.export.export_text import SAME_RUN_HERE
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, not_at_default
from trainfast_runner.settings.other_tools import trainer_fields
from trainfast_runner.settings.precisions import FP32_WEIGHTS
from trainfast_runner.settings.strategy_of_run import strategy_of
from trainfast_runner.worker.catalog import OPTIMIZERS

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
    unsupported = [] if strategy.runs_in_trainer else ["strategy"]
    unsupported += [] if knobs["precision"] in FP32_WEIGHTS else ["precision"]
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


def settings_to_express(knobs: KnobValues) -> list[str]:
    """Knobs not at their defaults that another tool should express, without the knobs of our own run and its timing."""
    own = ("timing_warmup", "watch", "engine")
    return [name for name in not_at_default(knobs) if name not in own and KNOBS_BY_NAME[name].applies(knobs)]

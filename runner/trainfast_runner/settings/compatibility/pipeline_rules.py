"""Needs of a pipeline: a model that can be cut, a layer for every stage, equal micro-batches."""

from __future__ import annotations

from trainfast_runner.errors import UserError
from trainfast_runner.settings.compatibility.facts import Facts, Rule
from trainfast_runner.settings.config_fields import first_size
from trainfast_runner.settings.knob_type import whole_number
from trainfast_runner.worker.catalog import SCHEDULES
from trainfast_runner.worker.shared.parallel_plans import PIPELINE_OBJECTIVES


def _family_can_be_cut(facts: Facts) -> None:
    if not facts.strategy.is_pipeline:
        return
    family, objective = facts.config.get("model_type"), facts.spec.data.get("objective")
    strategy = facts.knobs["strategy"]
    if isinstance(family, str) and family not in PIPELINE_OBJECTIVES:
        raise UserError(
            f"strategy={strategy} can cut {', '.join(PIPELINE_OBJECTIVES)} into stages, and the model is {family}",
            key="strategy",
            advice="strategy=ddp or strategy=fsdp",
        )
    if isinstance(family, str) and objective not in PIPELINE_OBJECTIVES[family]:
        raise UserError(
            f"strategy={strategy} can cut {family} into stages for data.objective="
            f"{' or '.join(PIPELINE_OBJECTIVES[family])}, not for data.objective={objective}",
            key="strategy",
            advice="strategy=ddp",
        )


def _layers_for_every_stage(facts: Facts) -> None:
    if not facts.strategy.is_pipeline:
        return
    degree = whole_number(facts.knobs, "pp_degree")
    schedule = str(facts.knobs["pp_schedule"])
    stages = degree * SCHEDULES[schedule].stages_per_rank
    field, layers = first_size(facts.config, "num_hidden_layers", "n_layer")
    if not layers or stages <= layers:
        return
    if degree <= layers:
        raise UserError(
            f"pp_schedule=interleaved with pp_degree={degree} makes {stages} stages,"
            f" more than the model's {layers} layers (model.{field})",
            key="pp_schedule",
            advice="pp_schedule=1f1b",
        )
    raise UserError(
        f"pp_degree={degree} is more than the model's {layers} layers (model.{field})",
        key="pp_degree",
        advice=f"pp_degree={layers}" if layers > 1 else "strategy=ddp",
    )


def micro_batches_divide(facts: Facts) -> None:
    """Refuse a batch that does not divide into equal micro-batches, or not into as many as the schedule takes."""
    if not facts.strategy.is_pipeline:
        return
    batch = whole_number(facts.knobs, "batch_size")
    chunks = whole_number(facts.knobs, "micro_batches")
    degree = whole_number(facts.knobs, "pp_degree")
    schedule = str(facts.knobs["pp_schedule"])
    if batch % chunks == 0 and _runs(schedule, chunks, degree):
        return
    working_counts = [count for count in range(1, batch + 1) if batch % count == 0 and _runs(schedule, count, degree)]
    nearest = min(working_counts, key=lambda count: abs(count - chunks), default=None)
    advice = f"micro_batches={nearest}" if nearest else f"batch_size={degree}, micro_batches={degree}"
    if batch % chunks:
        raise UserError(
            f"batch_size={batch} cannot be cut into micro_batches={chunks} equal parts",
            key="micro_batches",
            advice=advice,
        )
    need = f"needs at least pp_degree={degree} micro-batches, and micro_batches={chunks}"
    if schedule == "interleaved":
        rounds = max(1, chunks // degree)
        need = f"runs {rounds} equal rounds with pp_degree={degree}, and micro_batches={chunks} does not split"
    raise UserError(
        f"pp_schedule={schedule} {need}",
        key="micro_batches",
        advice=f"{advice}, or pp_schedule=gpipe",
    )


def _runs(schedule: str, chunks: int, degree: int) -> bool:
    """True if torch's schedule takes that many micro-batches.

    The rounds are `number_of_rounds` of torch's ScheduleInterleaved1F1B.
    """
    if schedule == "1f1b":
        return chunks >= degree
    return schedule == "gpipe" or chunks % max(1, chunks // degree) == 0


PIPELINE_RULES: tuple[Rule, ...] = (_family_can_be_cut, _layers_for_every_stage, micro_batches_divide)

"""Needs of tensor parallelism: a plan for the model's family, and a degree that divides its shapes."""

from __future__ import annotations

from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.settings.compatibility.facts import Facts, Rule
from trainfast_runner.settings.knob_type import whole_number
from trainfast_runner.worker.shared.parallel_plans import OUR_TENSOR_PLANS, TENSOR_STYLES

HEAD_FIELDS = ("num_attention_heads", "n_head", "num_key_value_heads")
WIDTH_FIELDS = ("intermediate_size", "n_inner")


def _family_has_a_plan(facts: Facts) -> None:
    strategy, family = facts.strategy, facts.config.get("model_type")
    if not strategy.is_tensor_parallel or not isinstance(family, str) or family in OUR_TENSOR_PLANS:
        return
    plan: Any = facts.config.get("base_model_tp_plan")
    if not plan:
        raise UserError(
            f"strategy={strategy.name} has no plan for {family}: transformers ships none (it does for llama, mistral,"
            f" mixtral, qwen3, gemma3_text, gpt_neox), and ours are for {' and '.join(sorted(OUR_TENSOR_PLANS))}",
            key="strategy",
            advice=f"strategy={strategy.fallback}",
        )
    unknown = sorted(set(plan.values()) - TENSOR_STYLES)
    if unknown:
        raise UserError(
            f"strategy={strategy.name}: the plan of {family} cuts layers as {', '.join(unknown)},"
            " which is not done here",
            key="strategy",
            advice=f"strategy={strategy.fallback}",
        )


def _degree_divides_the_model(facts: Facts) -> None:
    if not facts.strategy.is_tensor_parallel:
        return
    degree = whole_number(facts.knobs, "tp_degree")
    for field in (*HEAD_FIELDS, *WIDTH_FIELDS):
        size = facts.config.get(field)
        if isinstance(size, int) and size % degree:
            working_degrees = [count for count in range(2, degree) if size % count == 0]
            unit = (
                "key-value heads" if "key_value" in field else "heads" if field in HEAD_FIELDS else "columns of its MLP"
            )
            raise UserError(
                f"tp_degree={degree} does not divide the model's {size} {unit} (model.{field})",
                key="tp_degree",
                advice=f"tp_degree={working_degrees[-1]}" if working_degrees else f"strategy={facts.strategy.fallback}",
            )


TENSOR_RULES: tuple[Rule, ...] = (_family_has_a_plan, _degree_divides_the_model)

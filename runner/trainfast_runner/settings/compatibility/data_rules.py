"""Models, objectives and kinds of data that do not go together."""

from __future__ import annotations

from trainfast_runner.errors import UserError
from trainfast_runner.settings.compatibility.facts import Facts, Rule

READS_IMAGES = frozenset({"image_size", "num_channels", "vision_config"})
"""Fields of a model's configuration, one of which each model that reads images has."""


def _images_are_classified(facts: Facts) -> None:
    kind, objective = facts.spec.data["kind"], facts.spec.data["objective"]
    if (kind == "jpeg") != (objective == "image-classification"):
        text = "data.kind=jpeg, or data.objective=causal-lm"
        images = "data.kind=jpeg with data.objective=image-classification"
        raise UserError(
            f"data.kind={kind} does not work with data.objective={objective}:"
            " jpeg is for image-classification, text for the others",
            key="data.kind",
            advice=images if kind == "jpeg" else text,
        )


def _model_takes_the_data(facts: Facts) -> None:
    config, data = facts.config, facts.spec.data
    model = config.get("model_type")
    if model is None:
        return
    if data["kind"] == "jpeg":
        if "vocab_size" not in config or not READS_IMAGES.isdisjoint(config):
            return
        raise UserError(
            f"data.kind=jpeg needs a model that reads images, and {model} reads text",
            key="data.kind",
            advice="model.family=vit, or data.kind=text",
        )
    if data["objective"] == "seq2seq" and not config.get("is_encoder_decoder"):
        raise UserError(
            f"data.objective=seq2seq needs an encoder and a decoder, and {model} does not have both",
            key="data.objective",
            advice="model.family=t5, or data.objective=causal-lm",
        )
    if "vocab_size" not in config and "text_config" not in config:
        raise UserError(
            f"data.kind={data['kind']} is text, and {model} does not read text: it has no vocab_size",
            key="data.kind",
            advice="data.kind=jpeg with data.objective=image-classification",
        )


def _texts_vary_in_length(facts: Facts) -> None:
    data, strategy = facts.spec.data, facts.strategy
    samples = data.get("samples", "packed")
    if samples == "packed":
        return
    reason = None
    if data["kind"] in ("random", "jpeg"):
        reason = f"samples of data.kind={data['kind']} are all of one length"
    elif data["objective"] == "seq2seq":
        reason = "data.objective=seq2seq cuts packed samples in two halves"
    elif strategy.is_pipeline and data["objective"] != "causal-lm":
        reason = f"data.objective={data['objective']} needs a padding mask, and strategy={strategy.name} passes none on"
    if reason is not None:
        raise UserError(
            f"data.samples={samples} cannot be used: {reason}", key="data.samples", advice="data.samples=packed"
        )


DATA_RULES: tuple[Rule, ...] = (_images_are_classified, _model_takes_the_data, _texts_vary_in_length)

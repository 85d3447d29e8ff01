"""Elements of each stage that the worker would cut a model into, and elements that pass between stages."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..strategies.pipeline_stages import cut
from ..strategies.spread_layers import divide


def stages_of(model: nn.Module, count: int, seq_len: int) -> dict[str, Any]:
    """Return the stages of a pipeline, and the elements that a sample passes between and after them.

    `hidden` are the elements between stages, `output` those at the end. `begin` and `end` are a stage's blocks,
    `elements` its parameters and `largest` its largest one; `tied` are those that both the first and the last stage
    have. Raises InvalidInput for a model that cannot be cut into `count` stages.
    """
    division = cut(model, count, seq_len)
    tied = sum(parameter.numel() for parameter in division.tied())
    stages = []
    for index in range(count):
        sizes = [parameter.numel() for parameter in division.stage(index).parameters()]
        begin, end = division.bounds[index], division.bounds[index + 1]
        stages.append({"begin": begin, "end": end, "elements": sum(sizes), "largest": max(sizes)})
    return {"stages": stages, "tied": tied, **_passing(model, seq_len)}


def spread_over(model: nn.Module, count: int, seq_len: int) -> dict[str, Any]:
    """Return the fields of `stages_of` for layers spread over `count` GPUs of one process, and `head`.

    `head` is the stage that computes the logits. A tied head is computed where the embedding is (`_move_own`).
    """
    layers = divide(model, count)
    first_ids = {id(parameter) for module in layers.before for parameter in module.parameters(recurse=False)}
    stages = []
    for index in range(count):
        begin, end = layers.bounds[index], layers.bounds[index + 1]
        stage_parameters = {id(p): p for block in layers.blocks[begin:end] for p in block.parameters()}
        if index == 0:
            stage_parameters |= {id(p): p for module in layers.before for p in module.parameters(recurse=False)}
        if index == count - 1:
            after = [p for module in layers.after for p in module.parameters(recurse=False)]
            stage_parameters |= {id(p): p for p in after if id(p) not in first_ids}
        sizes = [parameter.numel() for parameter in stage_parameters.values()]
        stages.append({"begin": begin, "end": end, "elements": sum(sizes), "largest": max(sizes)})
    hf_model: Any = model
    output = hf_model.get_output_embeddings()
    is_tied = output is not None and id(output.weight) in first_ids
    return {"stages": stages, "tied": 0, "head": 0 if is_tied else count - 1, **_passing(model, seq_len)}


def _passing(model: nn.Module, seq_len: int) -> dict[str, int]:
    config: Any = model.config
    classifies = type(model).__name__.endswith(("ForSequenceClassification", "ForImageClassification"))
    output = config.num_labels if classifies else seq_len * config.vocab_size
    return {"hidden": seq_len * config.hidden_size, "output": output}

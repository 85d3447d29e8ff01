"""How the worker would cut a model into pipeline stages, in elements: what each stage holds and what passes between."""

from __future__ import annotations

from typing import Any

from torch import nn

from .strategies.pipeline_stages import cut


def stages_of(model: nn.Module, count: int, seq_len: int) -> dict[str, Any]:
    """`stages` in their order, and elements a sample of what passes between them and of what comes out at the end.

    `begin` and `end` are the stage's blocks, `elements` its parameters and `largest` its largest one, `tied` those that
    the first and the last stage both have. Raises InvalidInput for a model that cannot be cut so.
    """
    config: Any = model.config
    division = cut(model, count, seq_len)
    tied = sum(parameter.numel() for parameter in division.tied())
    stages = []
    for index in range(count):
        sizes = [parameter.numel() for parameter in division.stage(index).parameters()]
        begin, end = division.bounds[index], division.bounds[index + 1]
        stages.append({"begin": begin, "end": end, "elements": sum(sizes), "largest": max(sizes)})
    whole_text = not type(model).__name__.endswith("ForSequenceClassification")
    output = seq_len * config.vocab_size if whole_text else config.num_labels
    return {"stages": stages, "tied": tied, "hidden": seq_len * config.hidden_size, "output": output}

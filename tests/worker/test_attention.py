"""`attention=auto` builds any family, and says why it took the kernel it took."""

import pytest
import torch
from worker_knobs import worker_knobs

from trainfast_runner.worker.model.build import attention_of, attention_reason, build_model
from trainfast_runner.worker.model.inspection import inspect
from trainfast_runner.worker.model.model_config import resolve_config

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
WITHOUT_SDPA = [
    ({"family": "gemma2", **SMALL, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}, "causal-lm"),
    ({"family": "mamba", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 64}, "causal-lm"),
    ({"family": "convnext", "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}, "image-classification"),
    ({"family": "deberta", **SMALL, "vocab_size": 64}, "masked-lm"),
]


def inspected(model, objective):
    return inspect("inspect", model, objective, count=False, attention=True)


@pytest.mark.parametrize(("model", "objective"), WITHOUT_SDPA, ids=["gemma2", "mamba", "convnext", "deberta"])
def test_auto_takes_eager_where_the_model_has_no_sdpa(model, objective):
    knobs = worker_knobs()
    built = build_model(resolve_config(model), objective, knobs, torch.device("meta"))
    assert attention_of(built) == "eager"
    assert attention_reason(built, knobs) == f"{model['family']} has no sdpa"
    assert "sdpa" not in inspected(model, objective)["attentions"]


def test_auto_takes_sdpa_where_the_model_has_it():
    model = {"family": "llama", **SMALL, "num_key_value_heads": 2, "vocab_size": 64}
    built = build_model(resolve_config(model), "causal-lm", worker_knobs(), torch.device("meta"))
    assert (attention_of(built), attention_reason(built, worker_knobs())) == ("sdpa", "llama has sdpa")
    assert attention_reason(built, worker_knobs(attention="sdpa")) is None
    assert inspected(model, "causal-lm")["attentions"] == [
        *("auto", "eager", "sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flash", "flash-3")
    ]

"""FLOPs a sample, against the published formulas and against torch's own counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainfast_runner.worker.build import model_class
from trainfast_runner.worker.flops import flops_per_sample, notebook_forward
from trainfast_runner.worker.model_config import resolve_config

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
LLAMA = {"family": "llama", **SMALL, "vocab_size": 512}
MIXTRAL = {**LLAMA, "family": "mixtral", "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 1}
T5 = {"family": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
VIT = {"family": "vit", **SMALL, "image_size": 32, "patch_size": 8, "num_labels": 10}
BERT = {"family": "bert", **SMALL, "vocab_size": 512, "max_position_embeddings": 64}


def built(model: dict[str, Any], objective: str) -> Any:
    with torch.device("meta"):
        return model_class(objective).from_config(resolve_config(model), attn_implementation="eager")


@pytest.mark.parametrize(
    ("model", "objective"),
    [
        (LLAMA, "causal-lm"),
        (BERT, "masked-lm"),
        (BERT, "sequence-classification"),
        (T5, "seq2seq"),
        (VIT, "image-classification"),
    ],
)
def test_the_count_is_three_times_torchs_count_of_the_forward(model: dict[str, Any], objective: str) -> None:
    module = built(model, objective)
    ids = torch.zeros(1, 64, dtype=torch.long, device="meta")
    if objective == "image-classification":
        inputs = {"pixel_values": torch.zeros(1, 3, 32, 32, device="meta")}
    elif objective == "seq2seq":
        inputs = {"input_ids": ids[:, :32], "decoder_input_ids": ids[:, 32:]}
    else:
        inputs = {"input_ids": ids}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(**inputs)
    counted = flops_per_sample(module, objective, 64, "off")
    assert counted is not None
    # N counts biases, norms and the projection of patches for every token, which matters in models as small as these.
    assert counted.model == pytest.approx(3 * counter.get_total_flops(), rel=0.03)


def test_only_active_experts_count() -> None:
    one = flops_per_sample(built(MIXTRAL, "causal-lm"), "causal-lm", 64, "off")
    dense = flops_per_sample(built({**LLAMA, "num_key_value_heads": 4}, "causal-lm"), "causal-lm", 64, "off")
    assert one is not None
    assert dense is not None
    # What is left is the router.
    assert one.model == pytest.approx(dense.model + 6 * 64 * 2 * 64 * 4)


def test_recomputed_flops_are_a_third_and_no_progress() -> None:
    module = built(BERT, "masked-lm")
    plain, full = (flops_per_sample(module, "masked-lm", 64, value) for value in ("off", "full"))
    assert plain is not None
    assert full is not None
    assert (full.model, full.recomputed) == (plain.model, plain.model / 3)
    assert plain.recomputed == 0
    assert full.notebook == pytest.approx(4 / 3 * plain.notebook)


@pytest.mark.parametrize(
    ("shape", "factor", "samples_per_s", "tflops"),
    [
        ((24, 1024, 128, 30522), 3, 88.9, 23.2),
        ((24, 1024, 128, 30522), 4, 139.2, 48.4),
        ((24, 1024, 512, 50257), 3, 13.5, 15.7),
        ((36, 1280, 1024, 50257), 3, 7.0 / 2, 18.8),
    ],
)
def test_the_notebooks_formula_gives_its_published_figures(
    shape: tuple[int, int, int, int], factor: int, samples_per_s: float, tflops: float
) -> None:
    assert factor * notebook_forward(*shape) * samples_per_s / 1e12 == pytest.approx(tflops, rel=0.03)

"""FLOPs a sample, against the published formulas and against torch's own counter."""

import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from trainfast_runner.worker.model.build import model_class
from trainfast_runner.worker.model.flops import flops_per_sample, notebook_forward
from trainfast_runner.worker.model.model_config import resolve_config

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
LLAMA = {"family": "llama", **SMALL, "vocab_size": 512}
GPT2 = {"family": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512}
MIXTRAL = {**LLAMA, "family": "mixtral", "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 1}
T5 = {"family": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
T5 |= {"vocab_size": 512}
VIT = {"family": "vit", **SMALL, "image_size": 32, "patch_size": 8, "num_labels": 10}
BERT = {"family": "bert", **SMALL, "vocab_size": 512, "max_position_embeddings": 64}


FAMILIES = [
    (LLAMA, "causal-lm"),
    ({**LLAMA, "num_key_value_heads": 2, "head_dim": 32}, "causal-lm"),
    (GPT2, "causal-lm"),
    (BERT, "masked-lm"),
    (BERT, "sequence-classification"),
    (T5, "seq2seq"),
    (VIT, "image-classification"),
    ({**MIXTRAL, "num_experts_per_tok": 2}, "causal-lm"),
]
NAMES = [f"{model['family']}-{objective}" for model, objective in FAMILIES]


def built(model, objective, device="meta"):
    config = resolve_config(model)
    # torch's counter knows no grouped product of experts.
    config._experts_implementation = "eager"
    with torch.device(device):
        return model_class(objective).from_config(config, attn_implementation="eager")


def torchs_count(module, objective):
    """Forward and backward of one sample of 64 tokens as torch counts them while they run, every layer to its end."""
    ids = torch.arange(64)[None]
    if objective == "image-classification":
        # A gradient of the pixels is as much work as the formula counts for every other product.
        inputs = {"pixel_values": torch.zeros(1, 3, 32, 32, requires_grad=True)}
    elif objective == "seq2seq":
        inputs = {"input_ids": ids[:, :32], "decoder_input_ids": ids[:, 32:]}
    else:
        inputs = {"input_ids": ids}
    module.config.use_cache = False
    module.train()
    with FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(False):
        module(**inputs).logits.sum().backward()
    return float(counter.get_total_flops())


@pytest.mark.parametrize(("model", "objective"), FAMILIES, ids=NAMES)
def test_the_count_is_torchs_own_with_what_checkpointing_repeats_apart(model, objective):
    module = built(model, objective, "cpu")
    plain, full = (flops_per_sample(module, objective, 64, value) for value in (0.0, 1.0))
    once = torchs_count(module, objective)
    # N counts biases, norms and the projection of patches for every token, which matters in models as small as these.
    assert plain.model == full.model == pytest.approx(once, rel=0.03)
    assert plain.recomputed == 0
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert full.recomputed == pytest.approx(torchs_count(module, objective) - once, rel=0.03)


def test_the_notebook_counts_its_own_way_only_active_experts_and_a_chunked_loss_the_head_again():
    module = built(BERT, "masked-lm")
    plain, full = (flops_per_sample(module, "masked-lm", 64, value) for value in (0.0, 1.0))
    assert full.notebook == pytest.approx(4 / 3 * plain.notebook)
    # Its formula has a projection to the vocabulary, which a classifier does not compute.
    classified = flops_per_sample(built(BERT, "sequence-classification"), "sequence-classification", 64, 0.0)
    assert classified.notebook is None
    one = flops_per_sample(built(MIXTRAL, "causal-lm"), "causal-lm", 64, 0.0)
    dense = flops_per_sample(built({**LLAMA, "num_key_value_heads": 4}, "causal-lm"), "causal-lm", 64, 0.0)
    # What is left is the router.
    assert one.model == pytest.approx(dense.model + 6 * 64 * 2 * 64 * 4)
    module = built(LLAMA, "causal-lm")
    plain, chunked = (flops_per_sample(module, "causal-lm", 64, 0.0, recomputes_logits=more) for more in (False, True))
    assert (chunked.model, chunked.recomputed) == (plain.model, 2 * 64 * 512 * 64)


@pytest.mark.parametrize(
    ("shape", "factor", "samples_per_s", "tflops"),
    [
        ((24, 1024, 128, 30522), 3, 88.9, 23.2),
        ((24, 1024, 128, 30522), 4, 139.2, 48.4),
        ((24, 1024, 512, 50257), 3, 13.5, 15.7),
        ((36, 1280, 1024, 50257), 3, 7.0 / 2, 18.8),
    ],
)
def test_the_notebooks_formula_gives_its_published_figures(shape, factor, samples_per_s, tflops):
    assert factor * notebook_forward(*shape) * samples_per_s / 1e12 == pytest.approx(tflops, rel=0.03)

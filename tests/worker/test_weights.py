"""Weights are initialized part by part, alike in any order and on any rank, as transformers initializes them."""

import pytest
import torch
from worker_knobs import worker_knobs

from trainfast_runner.worker.model.build import build_model
from trainfast_runner.worker.model.model_config import resolve_config
from trainfast_runner.worker.model.weights import init_in_turn, init_weights, parts

CPU = torch.device("cpu")
SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 1024}
LLAMA = {"family": "llama", **SMALL, "intermediate_size": 128, "max_position_embeddings": 64}
GPT2 = {"family": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 1024, "n_positions": 64}
BERT = {"family": "bert", **SMALL, "intermediate_size": 128}
T5 = {"family": "t5", "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2, "vocab_size": 1024}
VIT = {"family": "vit", **{k: v for k, v in SMALL.items() if k != "vocab_size"}, "image_size": 32, "patch_size": 8}
MIXTRAL = {"family": "mixtral", **SMALL, "intermediate_size": 128, "num_local_experts": 4}
MODELS = [
    (LLAMA, "causal-lm"),
    (GPT2, "causal-lm"),
    (MIXTRAL, "causal-lm"),
    (BERT, "masked-lm"),
    (T5, "seq2seq"),
    (VIT, "image-classification"),
]
families = pytest.mark.parametrize(("model", "objective"), MODELS, ids=[str(model["family"]) for model, _ in MODELS])


def built(model, objective):
    return build_model(resolve_config(model), objective, worker_knobs(), CPU)


def values(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@families
def test_a_built_model_has_no_matrices_and_an_initialized_one_has_all(model, objective):
    whole = built(model, objective)
    assert {p.is_meta for p in whole.parameters() if p.dim() > 1} == {True}
    assert {buffer.is_meta for buffer in whole.buffers()} <= {False}
    parameters = dict(whole.named_parameters())
    init_weights(whole, 0, CPU)
    assert {name: id(p) for name, p in whole.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert all(p.isfinite().all() and p.requires_grad for p in whole.parameters())


@families
def test_weights_are_spread_as_transformers_spreads_them(model, objective):
    from trainfast_runner.worker.model.build import model_class

    config = resolve_config(model)
    torch.manual_seed(0)
    theirs = values(model_class(objective).from_config(config))
    whole = built(model, objective)
    init_weights(whole, 0, CPU)
    ours = values(whole)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        if weight.numel() > 500:
            assert weight.std() == pytest.approx(float(theirs[name].std()), rel=0.15), name
            assert weight.mean() == pytest.approx(0.0, abs=0.15 * float(theirs[name].std()) + 1e-9) or weight.std() == 0
        elif weight.std() == 0 or theirs[name].std() == 0:
            assert torch.equal(weight, theirs[name]), name
    if objective == "masked-lm":
        assert ours["bert.embeddings.word_embeddings.weight"][0].abs().max() == 0, "the padding id's row"


@families
def test_a_part_initialized_alone_and_late_has_the_same_values(model, objective):
    whole, alone = built(model, objective), built(model, objective)
    init_weights(whole, 7, CPU)
    torch.rand(5)
    for part in reversed(parts(alone)):
        init_weights(alone, 7, CPU, part.modules)
    other = built(model, objective)
    for _ in init_in_turn(other, 8, CPU):
        pass
    for name, weight in values(whole).items():
        assert torch.equal(weight, values(alone)[name]), name
        if weight.std() > 0:
            assert not torch.equal(weight, values(other)[name]), f"{name} does not depend on the seed"


def test_a_tied_head_initialized_by_the_last_stage_is_the_embedding_of_the_first():
    first, last = built(GPT2, "causal-lm"), built(GPT2, "causal-lm")
    init_weights(first, 0, CPU, [first.transformer.wte])
    init_weights(last, 0, CPU, [last.lm_head])
    assert torch.equal(first.transformer.wte.weight, last.lm_head.weight)
    assert {p.is_meta for p in last.transformer.h.parameters() if p.dim() > 1} == {True}

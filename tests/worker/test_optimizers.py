"""The optimizers take the same steps, and decay what should decay."""

import pytest
import torch
import transformers
from worker_knobs import worker_knobs

from trainfast_runner.worker.catalog.optimizers import OPTIMIZERS
from trainfast_runner.worker.model.optimizer import build_optimizer, parameter_groups

pytestmark = pytest.mark.ci
SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
FAMILIES = {
    "llama": ("AutoModelForCausalLM", {**SMALL, "tie_word_embeddings": True}),
    "bert": ("AutoModelForMaskedLM", SMALL),
    "gpt2": ("AutoModelForCausalLM", {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}),
    "t5": ("AutoModelForSeq2SeqLM", {"vocab_size": 64, "d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}),
}
RATES = {"sgd": 0.05}
"""The learning rate of an optimizer that does not learn at 0.01."""
ON_CPU = [name for name, entry in OPTIMIZERS.items() if entry.needs_gpus_reason is None]


def small(family):
    kind, fields = FAMILIES[family]
    config = transformers.AutoConfig.for_model(family, **fields)
    return getattr(transformers, kind).from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_biases_and_norms_do_not_decay_and_every_parameter_is_there_once(family):
    model = small(family)
    groups = parameter_groups(model, 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, spared = ([names[id(p)] for p in group["params"]] for group in groups)
    assert sorted(decayed + spared) == sorted(names.values())
    norms = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
        for name, _ in module.named_parameters()
    }
    assert norms
    assert {name for name in names.values() if "bias" in name} | norms == set(spared)
    assert any("embed" in name or "shared" in name or "wte" in name for name in decayed)


@pytest.mark.parametrize("optimizer", ON_CPU)
def test_every_optimizer_lowers_a_loss_and_shrinks_what_decays(optimizer):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 1))
    made = build_optimizer(model, worker_knobs(optimizer=optimizer, lr=RATES.get(optimizer, 0.01), weight_decay=0.1))
    assert type(made).__name__ == OPTIMIZERS[optimizer].class_name
    inputs, targets = torch.randn(64, 64), torch.ones(64, 1)
    losses = []
    for _ in range(10):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        made.zero_grad()
        loss.backward()
        made.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if "8bit" in optimizer:
        return  # its first moment goes on moving the weights
    made = build_optimizer(model, worker_knobs(optimizer=optimizer, lr=0.01, weight_decay=0.1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    made.step()
    for old, parameter in zip(before, model.parameters(), strict=True):
        kept = 1 - 0.01 * 0.1 if parameter.dim() == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), old * kept)


def test_the_three_loops_of_adamw_take_the_same_steps(train):
    plain = train(steps=10, weight_decay=0.1)
    for loop in ("foreach", "fused"):
        other = train(steps=10, weight_decay=0.1, optimizer=f"adamw-{loop}")
        assert other.losses() == pytest.approx(plain.losses(), rel=1e-4)
        assert other.record("actual")["optimizer_implementation"] == loop

"""The optimizers take the same steps, and decay what should decay; the result reads AdamW's loop from the live one."""

import re
import sys

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from worker_knobs import worker_knobs

from trainfast_runner.worker.catalog.optimizers import OPTIMIZERS
from trainfast_runner.worker.model import optimizer as optimizers
from trainfast_runner.worker.model.optimizer import build_optimizer, class_name, parameter_groups, set_rate

SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
FAMILIES = {
    "llama": ("AutoModelForCausalLM", {**SMALL, "tie_word_embeddings": True}),
    "bert": ("AutoModelForMaskedLM", SMALL),
    "gpt2": ("AutoModelForCausalLM", {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}),
    "t5": ("AutoModelForSeq2SeqLM", {"vocab_size": 64, "d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}),
}
RATES = {"sgd": 0.05}
"""The learning rate of an optimizer that does not learn at 0.01."""
ON_CPU = [
    # The compiler takes seconds for each shape.
    pytest.param(name, marks=pytest.mark.long if entry.compiles else ())
    for name, entry in OPTIMIZERS.items()
    if entry.needs_gpus_reason is None
]


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
    assert class_name(made) == OPTIMIZERS[optimizer].class_name
    inputs, targets = torch.randn(64, 64), torch.ones(64, 1)
    losses = []
    for _ in range(10):
        set_rate(made, RATES.get(optimizer, 0.01))
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        made.zero_grad()
        loss.backward()
        made.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if OPTIMIZERS[optimizer].package == "bitsandbytes":
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


@pytest.mark.parametrize("family", FAMILIES)
def test_muon_has_the_matrices_of_the_layers_and_adamw_the_rest(family):
    model = small(family)
    made = build_optimizer(model, worker_knobs(optimizer="muon"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {"matrices" in group: [names[id(p)] for p in group["params"]] for group in made.param_groups}
    assert groups[True]
    assert not [name for name in groups[True] if re.search("embed|norm|ln_|bias|head|wte|wpe|shared|cls", name)]
    others = [names[id(p)] for group in made.param_groups if "matrices" not in group for p in group["params"]]
    assert sorted(groups[True] + others) == sorted(names.values())
    assert any(parameter.dim() == 2 for name, parameter in model.named_parameters() if name in others), "embeddings"


def test_muon_steps_with_the_states_and_rates_that_an_engine_loads():
    torch.manual_seed(0)
    model = small("llama")
    made = build_optimizer(model, worker_knobs(optimizer="muon", lr=0.01))
    made.load_state_dict(made.state_dict())  # as Accelerate does
    set_rate(made, 0.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for rate, moves in ((0.0, False), (0.01, True)):
        set_rate(made, rate)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        made.step()
        for old, parameter in zip(before, model.parameters(), strict=True):
            assert torch.equal(old, parameter) is not moves
    states = [set(made.state[parameter]) for parameter in model.parameters()]
    assert {"momentum_buffer"} in states
    assert all(states)


@pytest.mark.parametrize("name", [entry.trainer_name for entry in OPTIMIZERS.values() if entry.trainer_name])
def test_the_trainer_has_an_optimizer_of_each_name(name, tmp_path):
    assert transformers.TrainingArguments(output_dir=tmp_path, optim=name, use_cpu=True).optim == name


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw-4bit", "adamw-8bit-ao"])
def test_a_model_trains_with_each_new_optimizer(train, family, optimizer):
    run = train(
        model=family, optimizer=optimizer, data={"objective": "causal-lm" if family == "llama" else "masked-lm"}
    )
    assert run.code == 0, run.stderr
    assert run.record("actual")["optimizer"] == OPTIMIZERS[optimizer].class_name
    losses = run.losses()
    assert losses[-1] < losses[0]


@pytest.fixture
def slices():
    """One parameter, cut over two ranks of which one is here."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    yield nn.ParameterList([nn.Parameter(DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)]))])
    dist.destroy_process_group()


@pytest.mark.parametrize(("device", "loop"), [("cuda", "loop"), ("cpu", "foreach")])
def test_adamw_on_slices_is_foreach_where_torch_has_foreach_kernels(slices, monkeypatch, device, loop):
    """torch's list of devices with such kernels is played: the slices of this test, on the CPU, are in it or not."""
    # `torch.optim` deletes the name of this module.
    chooser = sys.modules[torch.optim.Optimizer.__module__]
    monkeypatch.setattr(chooser, "_get_foreach_kernels_supported_devices", lambda: [device])
    assert optimizers.implementation(build_optimizer(slices, worker_knobs())) == loop

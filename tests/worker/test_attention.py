"""`attention=auto` builds any family, and says why it took the kernel it took."""

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from worker_knobs import worker_knobs

from trainfast_runner.worker.levers.attention_kernel import actual, choose
from trainfast_runner.worker.model.build import attention_of, attention_reason, build_model
from trainfast_runner.worker.model.inspection import inspect
from trainfast_runner.worker.model.model_config import resolve_config
from trainfast_runner.worker.model.weights import init_weights

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
LLAMA = {"family": "llama", **SMALL, "num_key_value_heads": 2, "vocab_size": 64}
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
    built = build_model(resolve_config(LLAMA), "causal-lm", worker_knobs(), torch.device("meta"))
    assert (attention_of(built), attention_reason(built, worker_knobs())) == ("sdpa", "llama has sdpa")
    assert attention_reason(built, worker_knobs(attention="sdpa")) is None
    assert inspected(LLAMA, "causal-lm")["attentions"] == [
        *("auto", "eager", "sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flash", "flash-3")
    ]


@pytest.fixture
def all_kernels():
    """Let sdpa choose again after the test, which shares this process."""
    yield
    choose(torch.nn.Identity(), worker_knobs())


TOKENS = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(1))


def trained(attention, **knobs):
    """Loss, gradients and kernel of one step of a small llama."""
    asked = worker_knobs(attention=attention, **knobs)
    built = build_model(resolve_config(LLAMA), "causal-lm", asked, torch.device("cpu"))
    init_weights(built, 7, torch.device("cpu"))
    assert actual(built)["attention_kernel"] == (None if attention in ("auto", "sdpa") else attention)
    loss = functional.cross_entropy(built(input_ids=TOKENS).logits.flatten(0, 1), TOKENS.flatten())
    loss.backward()
    return loss.item(), torch.cat([each.grad.flatten() for each in built.parameters()]), actual(built)


@pytest.mark.parametrize("checkpointing", ["off", "full", "selective"])
def test_each_kernel_that_a_cpu_has_trains_the_same_and_is_recorded(all_kernels, checkpointing):
    loss, gradient, ran = trained("eager", checkpointing=checkpointing)
    assert ran == {"attention_kernel": "eager"}
    for attention, kernel in (("auto", "sdpa-flash"), ("sdpa", "sdpa-flash"), ("sdpa-flash", "sdpa-flash")):
        its_loss, its_gradient, ran = trained(attention, checkpointing=checkpointing)
        assert ran == {"attention_kernel": kernel}
        assert its_loss == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(its_gradient, gradient, rtol=1e-4, atol=1e-7)


def test_the_kernel_is_read_from_the_graph_and_one_that_the_device_lacks_is_an_error(all_kernels):
    built = build_model(resolve_config(LLAMA), "causal-lm", worker_knobs(attention="sdpa"), torch.device("cpu"))
    init_weights(built, 7, torch.device("cpu"))
    with sdpa_kernel(SDPBackend.MATH):
        built(input_ids=TOKENS)
    assert actual(built) == {"attention_kernel": "sdpa-math"}
    with pytest.raises(RuntimeError, match="scaled_dot_product_attention"):
        trained("sdpa-efficient")


def test_the_recomputation_of_a_checkpoint_takes_the_same_kernel(all_kernels):
    class Kernels(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "attention" in str(function):
                self.seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Kernels() as kernels:
        trained("sdpa-flash", checkpointing="full")
    forwards = [name for name in kernels.seen if "backward" not in name]
    assert len(forwards) == 2, "the forward and its recomputation"
    assert set(forwards) == {"aten._scaled_dot_product_flash_attention_for_cpu.default"}

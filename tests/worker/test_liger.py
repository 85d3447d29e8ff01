"""kernels=liger and loss=liger by a stand-in for the package, whose kernels need a GPU: its calls are those of 0.8."""

import sys
from types import MethodType, ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional
from worker_knobs import llama, worker_knobs

from trainfast_runner.worker.invalid import InvalidInput
from trainfast_runner.worker.levers import actual_fields
from trainfast_runner.worker.levers.head_loss import FusedHeadLoss
from trainfast_runner.worker.model.build import build_model
from trainfast_runner.worker.model.model_config import resolve_config
from trainfast_runner.worker.model.optimizer import Objective
from trainfast_runner.worker.model.weights import init_weights


class FusedLoss(nn.Module):
    """Computes what LigerFusedLinearCrossEntropyLoss of liger-kernel 0.8 computes, from the same arguments."""

    def __init__(self, ignore_index=-100, reduction="mean", softcap=None):
        super().__init__()
        self.arguments = {"ignore_index": ignore_index, "reduction": reduction}
        self.softcap = softcap

    def forward(self, lin_weight, _input, target, bias=None):
        assert lin_weight.dtype == _input.dtype
        logits = functional.linear(_input, lin_weight, bias).float()
        logits = logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        return functional.cross_entropy(logits, target, **self.arguments)


@pytest.fixture
def package(monkeypatch):
    """Stand-ins for the two modules that the worker imports; returns the calls of the first."""
    calls = []
    transformers = ModuleType("liger_kernel.transformers")

    def norm(self, states):
        return type(self).forward(self, states)

    norm.__module__ = "liger_kernel.transformers.rms_norm"

    def apply(model, **kwargs):
        calls.append(kwargs)
        if model.config.model_type == "llama":
            model.model.norm.forward = MethodType(norm, model.model.norm)

    transformers._apply_liger_kernel_to_instance = apply
    fused = ModuleType("liger_kernel.transformers.fused_linear_cross_entropy")
    fused.LigerFusedLinearCrossEntropyLoss = FusedLoss
    for module in (ModuleType("liger_kernel"), transformers, fused):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def built(fields=None, objective="causal-lm", **knobs):
    asked = worker_knobs(**knobs)
    model = build_model(resolve_config(fields or llama()), objective, asked, torch.device("cpu"))
    init_weights(model, 7, torch.device("cpu"))
    return model, Objective(objective, asked)


def test_its_kernels_take_the_models_place_and_never_the_loss(package):
    model, _ = built(kernels="liger")
    assert package == [{"cross_entropy": False, "fused_linear_cross_entropy": False}]
    assert (actual_fields(model)["kernels"], actual_fields(model)["loss_function"]) == ("liger", "full")
    assert actual_fields(built()[0])["kernels"] == "off"
    with pytest.raises(InvalidInput, match="liger-kernel has no kernels for qwen2"):
        built(llama(family="qwen2"), kernels="liger")


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "bert"])
def test_its_loss_is_the_full_one_with_soft_cap_and_bias(package, family, is_autocast):
    more = {"num_key_value_heads": 4, "head_dim": 16} if family == "gemma2" else {}
    more |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if family == "bert" else {}
    objective = "masked-lm" if family == "bert" else "causal-lm"
    tokens = torch.randint(0, 1024, (2, 32), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, ::3] = -100
    found = []
    for loss in ("full", "liger", "chunked"):
        model, task = built(llama(family=family, **more), objective, loss=loss)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            value = task.loss_sum(model, {"input_ids": tokens, "labels": labels})
        value.backward()
        gradients = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        found.append((value, gradients))
        assert actual_fields(model)["loss_function"] == loss
    assert isinstance(model.forward, FusedHeadLoss) is False
    (full, gradient), *others = found
    for value, its_gradient in others:
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, full, rtol=2e-3 if is_autocast else 1e-6, atol=0)
        tolerance = 5e-2 * gradient.abs().max() if is_autocast else 1e-4
        torch.testing.assert_close(its_gradient, gradient, rtol=1e-3, atol=float(tolerance))

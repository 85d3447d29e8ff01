"""The traced step of somebody else's model: its bytes by the batch, and everything of the model as it was."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainfast_runner.worker.memory_trace.script_step import ScriptStep, trace_peaks

WIDTH = 1024


class Remembering(nn.Module):
    """A model that changes itself in each forward pass: buffers, an attribute, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)
        self.last.bias.requires_grad_(False)
        self.calls, self.newest = 0, torch.zeros(1)

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        """The loss of some rows."""
        self.calls += 1
        self.newest = self.norm(self.first(rows)).relu()
        if random.random() < 2:
            self.newest = nn.functional.dropout(self.newest, 0.5)
        return {"loss": self.last(self.newest).square().mean(), "rows": rows}


class Selecting(nn.Module):
    """A model whose shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, rows: Tensor) -> Tensor:
        """The rows that it selects."""
        inside = self.first(rows).relu()
        return self.last(inside[inside.sum(1) > 0])  # type: ignore[no-any-return]


def step_of(rows: int) -> ScriptStep:
    """A step with the loss in the model's first output."""
    return ScriptStep(
        arguments=(torch.empty(rows, 8, device="meta"),),
        keywords={},
        rows=rows,
        used=(0,),
        kept=(0,),
        loss_bytes=0,
        holds_gradients=False,
        autocast=None,
    )


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a model that took two steps, with a scheduler that wraps its `step`."""
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)
    for _ in range(2):
        model(torch.randn(16, 8))["loss"].backward()
        optimizer.step()
        scheduler.step()
    return optimizer


def state_of(model: nn.Module, optimizer: Any) -> list[Any]:
    """Everything that a trace may not change, tensors as lists."""
    found: list[Any] = [random.getstate(), torch.get_rng_state().tolist()]
    found += [(name, value.tolist()) for name, value in model.state_dict().items()]
    for name, parameter in model.named_parameters():
        gradient = None if parameter.grad is None else parameter.grad.tolist()
        states = {key: value.tolist() for key, value in optimizer.state.get(parameter, {}).items()}
        found.append((name, id(parameter), parameter.requires_grad, gradient, states))
    for module in model.modules():
        found.append([(name, id(value)) for name, value in vars(module).items()])
    return [*found, optimizer.param_groups[0]["lr"], id(optimizer.param_groups[0]["params"][0])]


def test_trace_leaves_model_optimizer_and_random_numbers_as_they_were() -> None:
    model = Remembering()
    optimizer = trained(model)
    before = state_of(model, optimizer)
    lines = trace_peaks(model, optimizer, step_of(16))
    assert state_of(model, optimizer) == before
    # What norm, activation, dropout and its mask saved, and two gradients.
    assert 5 < lines[-1][1] / (4 * WIDTH) < 7
    standing = sum(parameter.numel() for parameter in model.parameters()) * 4 * 4
    assert lines[0][0] > 0.9 * standing, "weights, gradients and both states"
    model(torch.randn(16, 8))["loss"].backward()
    optimizer.step()


def test_the_loss_outside_of_the_model_adds_its_bytes_at_the_end_of_the_forward_pass() -> None:
    model = Remembering()
    optimizer = trained(model)
    step = step_of(16)
    bare, more = (
        trace_peaks(model, optimizer, ScriptStep(**{**vars(step), "loss_bytes": size})) for size in (0, 16 << 20)
    )
    grown = more[-1][1] - bare[-1][1]
    assert (1 << 20) - 6 * 4 * WIDTH < grown <= 1 << 20, "a mebibyte for each row"


def test_step_whose_shapes_depend_on_values_has_no_trace_and_the_model_is_restored() -> None:
    model = Selecting()
    model(torch.randn(16, 8)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters())
    before = state_of(model, optimizer)
    with pytest.raises(Exception, match="nonzero"):
        trace_peaks(model, optimizer, step_of(16))
    assert state_of(model, optimizer) == before


def test_operation_with_a_hidden_workspace_has_no_trace() -> None:
    model = nn.LSTM(8, 16)
    optimizer = torch.optim.SGD(model.parameters())
    step = ScriptStep(**{**vars(step_of(16)), "arguments": (torch.empty(16, 3, 8, device="meta"),)})
    with pytest.raises(NotImplementedError, match="no trace shows the workspace of mkldnn_rnn_layer"):
        trace_peaks(model, optimizer, step)
    assert model(torch.randn(16, 3, 8))[0].shape == (16, 3, 16)

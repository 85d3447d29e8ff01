"""The inputs of a module whose layers are spread over GPUs, moved to the module's device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainfast_runner.worker.strategies.spread_layers import move_inputs


class Angles(NamedTuple):
    """Rotary tables, as a model may hand them to its blocks."""

    cos: Tensor
    sin: Tensor


def test_inputs_in_a_namedtuple_keep_their_fields():
    module = nn.Linear(2, 2, device="meta")
    angles = Angles(torch.ones(2), torch.zeros(2))
    (moved,), named = move_inputs(module, (angles,), {"pair": (torch.ones(2), [torch.ones(2)])})
    assert isinstance(moved, Angles)
    assert {moved.cos.device.type, moved.sin.device.type, named["pair"][1][0].device.type} == {"meta"}

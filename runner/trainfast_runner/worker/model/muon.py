"""Muon and AdamW as one optimizer, whose groups and states the loop, the scaler and the engines see as any other's."""

from typing import Any

import torch
from torch.optim import AdamW, Optimizer


class MuonAdamW(Optimizer):
    """torch's Muon for the groups that have `matrices`, AdamW for the others.

    Muon's rate is scaled to the size of AdamW's updates, so that one learning rate suits both (Moonshot's
    "Muon is Scalable for LLM Training", section 2.2).
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        matrices, others = ([group for group in groups if ("matrices" in group) == wanted] for wanted in (True, False))
        # Both fill in the defaults of their groups in place.
        self._parts: dict[bool, Optimizer] = {}
        if matrices:
            self._parts[True] = torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")
        if others:
            self._parts[False] = AdamW(others, lr=lr)
        super().__init__([*matrices, *others], {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        """Let each of the two step over its groups, which loading a state replaces."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for is_muon, part in self._parts.items():
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if ("matrices" in group) == is_muon]
            part.step()
        return loss

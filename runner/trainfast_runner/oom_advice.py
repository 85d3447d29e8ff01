"""What to turn when a run did not fit: the cheapest knobs first, each with what it saves and what it costs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OPTIMIZER_PHASE = "optimizer"
# A forward keeps dozens of tensors of the size of the one that failed; Korthikanti et al. (2022) count 34 bytes a
# token, hidden unit and layer for half precision, which is 17 tensors a layer.
ACTIVATIONS_ALIVE = 32


@dataclass(frozen=True)
class Fix:
    """One change: `knob=value`, in words what it frees and what it does to speed."""

    knob: str
    value: str
    saves: str
    costs: str


def cheapest(
    knobs: Mapping[str, Any], device: str, phase: str | None = None, reason: str = "", limit_bytes: int | None = None
) -> list[Fix]:
    """Up to three fixes, the least slowing first.

    `phase` is where memory ended: in the optimizer step a smaller batch frees nothing, before it the optimizer's
    states are not yet there. `reason` is the allocator's sentence, from which the size of its request is read.
    """
    batch, states = _batch_fixes(knobs, device, reason, limit_bytes), _state_fixes(knobs, device)
    ordered = [*states, *batch] if phase == OPTIMIZER_PHASE else [*batch, *states]
    return ordered[:3]


def _batch_fixes(knobs: Mapping[str, Any], device: str, reason: str, limit_bytes: int | None) -> list[Fix]:
    """Changes that shrink activations, cheapest first."""
    fixes = []
    if knobs.get("attention") == "eager":
        fixes.append(Fix("attention", "sdpa", "the score matrices of every layer", "faster"))
    batch, accumulation = int(knobs.get("batch_size") or 1), int(knobs.get("grad_accum") or 1)
    if batch > 1:
        smaller = _smaller_batch(batch, reason, limit_bytes)
        fixes.append(
            Fix(
                "batch_size",
                str(smaller),
                f"activations to {100 * smaller / batch:.0f} %",
                f"little; grad_accum={accumulation * batch // smaller} keeps the global batch",
            )
        )
    if knobs.get("precision") in {"fp32", "tf32"}:
        speed = "slower on most CPUs" if device == "cpu" else "faster on tensor cores (Ampere and later)"
        fixes.append(Fix("precision", "bf16", "about half of the activations", speed))
    if knobs.get("checkpointing") == "off":
        fixes.append(Fix("checkpointing", "full", "activations to one layer plus boundaries", "20-30 % slower"))
    seq_len = int(knobs.get("seq_len") or 8)
    if seq_len > 64:
        fixes.append(Fix("seq_len", str(seq_len // 2), "activations to 50 %", "none; but it is another task"))
    return fixes


def _state_fixes(knobs: Mapping[str, Any], device: str) -> list[Fix]:
    """Changes that shrink optimizer states, gradients and weights, cheapest first."""
    fixes = []
    optimizer = knobs.get("optimizer")
    if optimizer in {"adamw", "adamw-foreach"}:
        fixes.append(Fix("optimizer", "adamw-fused", "4 bytes a parameter at the optimizer's peak", "faster"))
    if str(optimizer).startswith("adamw") and optimizer != "adamw-8bit":
        fixes.append(Fix("optimizer", "adamw-8bit", "6 bytes a parameter of states", "about none"))
        fixes.append(Fix("optimizer", "adafactor", "nearly 8 bytes a parameter of states", "slower to converge"))
    if knobs.get("precision") != "bf16-pure":
        fixes.append(
            Fix("precision", "bf16-pure", "half of weights, gradients and states", "faster; updates lose precision")
        )
    return fixes


def _smaller_batch(batch: int, reason: str, limit_bytes: int | None) -> int:
    """Half, or, where many such requests pass the limit, the power of two that brings them below."""
    smaller = 1 << ((batch - 1).bit_length() - 1)
    found = re.search(r"allocate (\d[\d.]*) ?(bytes|KiB|MiB|GiB)", reason)
    if found and limit_bytes:
        unit = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[found[2]]
        request = float(found[1].rstrip(".")) * unit
        while smaller > 1 and request * smaller / batch > limit_bytes / ACTIVATIONS_ALIVE:
            smaller //= 2
    return smaller

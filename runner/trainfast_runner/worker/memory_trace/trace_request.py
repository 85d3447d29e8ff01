"""The request for a trace as a typed value. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..spec import Knobs, knobs_of


@dataclass(frozen=True)
class TraceRequest:
    """A request for one part of a training step, and everything that its trace depends on."""

    part: str
    """`step`: forward and backward at two batch sizes. `optimizer`: the optimizer's step."""
    model: dict[str, Any]
    """`model` of the preset."""
    objective: str
    device: str
    """`cpu` or `cuda`."""
    knobs: Knobs
    whole: bool = False
    """True to trace every block, not three of a stack of identical ones."""
    tp_degree: int | None = None
    """Number of ranks that share the layers under tp; the slice of one is traced. None for a whole model."""
    half_weights: bool = False
    """True for the weights that FSDP gathers in mixed precision: half ones, under autocast."""
    stages: int | None = None
    """Stages of a pipeline; None without one."""
    spread: bool = False
    """True to divide the model over `stages` devices as naive-mp does, not into stages."""
    unused: tuple[str, ...] | None = None
    """Parameters without a gradient, for the part `optimizer`; None until the request `after` names them."""
    after: int | None = None
    """Index of the `step` request whose answer names the `unused` parameters; None if this request names them."""


def read_request(fields: dict[str, Any]) -> TraceRequest:
    """Return the request with these fields of its JSON."""
    unused = fields.get("unused")
    typed = {"knobs": knobs_of(fields["knobs"]), "unused": None if unused is None else tuple(unused)}
    return TraceRequest(**{**fields, **typed})

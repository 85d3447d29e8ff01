"""The prediction of one run: the peak of the fullest rank by category and phase, in bytes."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class RankBytes(NamedTuple):
    """Bytes of one rank by category: those of a trace (TRACED_CATEGORIES, in their order), and those it exchanges."""

    params: float = 0.0
    grads: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    temporary: float = 0.0
    communication: float = 0.0


CATEGORIES = RankBytes._fields
"""Categories of a peak; a prediction has `NAME_bytes` of each."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The peak of the fullest rank.

    Around the given batch size the peak is `fixed_bytes + batch_size * bytes_per_sample`.
    """

    total_bytes: int
    """The allocator's peak: the sum of all below but `context_bytes`."""
    params_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    temporary_bytes: int
    communication_bytes: int
    context_bytes: int | None = None
    """CUDA context and kernels, outside the allocator; None without a GPU."""
    phase: str
    """The phase of the peak."""
    phases: dict[str, dict[str, int]] = {}
    """The categories of each phase, and their `total`, at its own peak."""
    fixed_bytes: int = 0
    bytes_per_sample: int = 0
    basis: str = ""
    """The source of the figures, in words."""
    attention: str = ""
    """The model's attention kernel, and the reason that `attention=auto` takes it."""
    trace: str = ""
    """The name of the underlying trace."""
    fullest: str = ""
    """The fullest rank in words; empty if all ranks are alike."""
    traced_bytes: dict[str, int] = {}
    """Each phase's peak before any correction by measured runs."""

    def category(self, name: str) -> int:
        """Bytes of one of CATEGORIES at the peak."""
        value: int = getattr(self, f"{name}_bytes")
        return value

"""What is predicted of one run: the peak of the worst rank, by category and phase. All figures in bytes."""

from __future__ import annotations

import msgspec

PHASES = ("forward_backward", "optimizer")
"""The phases of a step whose peaks are measured apart, as in a step record's `phase_peaks`."""

CATEGORIES = ("params", "grads", "optimizer", "activations", "temporary", "communication")
"""What a peak is made of; a prediction has `NAME_bytes` of each."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The peak of the fullest rank. `total_bytes` is the allocator's peak, the sum of all but `context_bytes`.

    `phase` is the one the peak is in; `phases` has each one's categories (and `total`) at its own peak. Around the
    given batch size the peak is `fixed_bytes + batch_size * bytes_per_sample`. `context_bytes` (CUDA context and
    kernels, outside the allocator) is None without a GPU. `basis` says in words what the figures rest on.
    """

    total_bytes: int
    params_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    temporary_bytes: int
    communication_bytes: int
    context_bytes: int | None = None
    phase: str
    phases: dict[str, dict[str, int]] = {}
    fixed_bytes: int = 0
    bytes_per_sample: int = 0
    basis: str = ""
    attention: str = ""
    """The model's attention kernel, and why `attention=auto` takes it."""
    trace: str = ""
    """The name of the trace it rests on."""
    fullest: str = ""
    """Which rank it is that has this peak, in words; empty where all ranks are alike."""
    traced_bytes: dict[str, int] = {}
    """Each phase's peak before any correction by measured runs."""

    def category(self, name: str) -> int:
        """Bytes of one of CATEGORIES at the peak."""
        value: int = getattr(self, f"{name}_bytes")
        return value

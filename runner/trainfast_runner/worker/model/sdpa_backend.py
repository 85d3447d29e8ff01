"""The kernel that torch's scaled dot product attention takes, read at the model's first call with its tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


class SdpaBackend:
    """Replaces the attention function until its first call, notes torch's choice for that call, and restores it.

    The choice is the dispatcher's own (`torch._fused_sdp_choice`), by device, dtype, shapes and mask. It stays None for
    a compiled module, where the compiler may choose another kernel.
    """

    def __init__(self, is_used: bool) -> None:
        self.name: str | None = None
        """flash_attention, efficient_attention, cudnn_attention, overrideable or math; None before the first call."""
        self._attend = functional.scaled_dot_product_attention
        if is_used:
            functional.scaled_dot_product_attention = self._first

    def _first(self, *arguments: Any, **options: Any) -> Any:
        functional.scaled_dot_product_attention = self._attend
        self.name = _choice(*arguments, **options)
        return self._attend(*arguments, **options)


def _choice(*arguments: Any, **options: Any) -> str | None:
    try:
        from torch.nn.attention import SDPBackend

        choose: Any = torch._fused_sdp_choice
        return str(SDPBackend(choose(*arguments, **options)).name).lower()
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError):
        # The function is private and may reject some tensors: the kernel is then unknown.
        return None

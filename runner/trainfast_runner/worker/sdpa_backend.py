"""Which kernel torch's scaled dot product attention takes, asked where the model calls it, with its own tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


class SdpaBackend:
    """Stands before the attention function until the first call, notes torch's choice for it, and steps aside.

    The choice is the dispatcher's own (`torch._fused_sdp_choice`), by device, dtype, shapes and mask. In a compiled
    module it is not asked: the compiler may put another kernel there.
    """

    def __init__(self, wanted: bool) -> None:
        self.name: str | None = None
        """flash_attention, efficient_attention, cudnn_attention, overrideable or math; None before the first call."""
        self._attend = functional.scaled_dot_product_attention
        if wanted:
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
        # A private function, and tensors of every kind: what cannot be asked stays unknown.
        return None

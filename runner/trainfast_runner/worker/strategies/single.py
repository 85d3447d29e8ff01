"""One process, one device: the reference that the other strategies are compared with."""

from __future__ import annotations

from .base import Strategy


class Single(Strategy):
    """No wrapper and no communication."""

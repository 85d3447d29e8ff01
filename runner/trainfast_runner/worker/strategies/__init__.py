"""Strategies: the ways in which ranks share a training, one small file each with a class that is a `Strategy`."""

from __future__ import annotations

import importlib

import torch

from ..catalog import STRATEGIES
from ..spec import Knobs
from .base import Strategy


def make_strategy(knobs: Knobs, device: torch.device) -> Strategy:
    """Make the strategy that the knobs name; its file is imported only now."""
    module, _, name = STRATEGIES[knobs.strategy].path.partition(":")
    strategy: Strategy = getattr(importlib.import_module(f".{module}", __package__), name)(knobs, device)
    return strategy

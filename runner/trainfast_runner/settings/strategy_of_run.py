"""The catalog's entry for the strategy of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.worker.catalog import STRATEGIES, StrategyEntry


def strategy_of(knobs: Mapping[str, Any]) -> StrategyEntry:
    """The catalog's entry. Raises UserError for a strategy of another version."""
    name = str(knobs["strategy"])
    if name not in STRATEGIES:
        raise UserError(
            f"strategy {name!r} of the run is unknown to this version", key="strategy", allowed=list(STRATEGIES)
        )
    return STRATEGIES[name]


def strategy_or_single(knobs: Mapping[str, Any]) -> StrategyEntry:
    """The catalog's entry; a strategy of a newer version counts as one device."""
    return STRATEGIES.get(str(knobs.get("strategy")), STRATEGIES["single"])

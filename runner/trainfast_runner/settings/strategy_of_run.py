"""The strategy of a run: its entry of the catalog, and the directory that it offloads states to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
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


def offload_folder(knobs: Mapping[str, Any]) -> Path | None:
    """The directory of states offloaded to a disk; None without `offload_path`, or if the strategy does not read it."""
    path = knobs.get("offload_path")
    if path is None or "offload_path" not in strategy_or_single(knobs).knobs:
        return None
    return Path(os.path.expanduser(str(path)))

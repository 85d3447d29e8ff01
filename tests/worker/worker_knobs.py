"""The worker's knobs with the defaults of the knob table, as `run.json` and trace requests have them."""

from __future__ import annotations

from typing import Any

from trainfast_runner.settings.knobs import defaults
from trainfast_runner.worker.spec import Knobs, knobs_of


def knob_values(**overrides: Any) -> dict[str, Any]:
    """A value for each knob of the table: the overrides, and the defaults of all others."""
    return {**defaults(), **overrides}


def worker_knobs(**overrides: Any) -> Knobs:
    """The typed knobs of the worker with the overrides, and the defaults of all others."""
    return knobs_of(knob_values(**overrides))

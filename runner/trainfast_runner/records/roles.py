"""The roles of a search's runs, beside those that the worker knows (`worker.shared.search_roles`)."""

from __future__ import annotations

from trainfast_runner.worker.shared.search_roles import PROBE, TRIAL

COLD = "cold"
"""A best-fit search's run of one candidate in a fresh process: a race, a confirmation, a run under the memory limit, or
one with a knob set back."""
WARM_ROLES = (PROBE, TRIAL)
"""Processes in which a search tries sizes or candidates; lists of runs leave them out."""

"""The roles of a search's runs, and the file of a warm process's orders."""

from __future__ import annotations

CONTROL_FILE = "control.jsonl"
"""The parent's orders to a warm process, in the run directory."""
PROBE, CONFIRMATION = "probe", "proof"
"""Roles of a batch search's runs: the process in which it tries batch sizes, and the run that confirms one."""
TRIAL = "trial"
"""Role of a best-fit search's warm process, which tries many candidates, or of a script's run, which tries one."""

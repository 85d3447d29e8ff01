"""The knobs that a search sets itself, whatever the person asked for."""

from __future__ import annotations

SET_BY_A_SEARCH = ("steps", "timing_warmup")
"""Knobs that either search sets; commands that differ only in these continue the same search."""
SET_BY_A_BATCH_SEARCH = ("batch_size", *SET_BY_A_SEARCH)

"""The categories and work of a traced step."""

from __future__ import annotations

TRACED_CATEGORIES = ("params", "grads", "optimizer", "activations", "temporary")
"""Categories of the live bytes of a trace, which is of one process that shares nothing."""
PARAMS, GRADS, OPTIMIZER, ACTIVATIONS, TEMPORARY = range(len(TRACED_CATEGORIES))
"""Places of the categories in a trace's lists of bytes."""
NO_WORK = (0.0, 0.0, 0.0)
"""Calls of operations, FLOPs, bytes moved."""
TRACED_MICRO_BATCHES = 2
"""Micro-batches of a trace: in the second, gradients are alive from its start, as in all but the first."""

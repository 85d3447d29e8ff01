"""The hooks that load in a user's own script: their folder, and the variable that names the run to them."""

from __future__ import annotations

from pathlib import Path

HOOKS_FOLDER = Path(__file__).parents[2] / "door"
"""The folder that is appended to PYTHONPATH; it holds the hooks alone, so it shadows nothing."""
RUN_VARIABLE = "TRAINFAST_RUN"
"""The variable that names the run directory to a script."""

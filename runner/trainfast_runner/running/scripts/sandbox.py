"""The environment in which a script may try something and leave nothing: trackers off, temporary folders."""

from __future__ import annotations

import shutil
from pathlib import Path

SANDBOX_FOLDER = "sandbox"
"""The folder of a trial's files in its run directory, as the hooks in the script name it."""
TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Variables by which experiment trackers take no part, by their documentation."""


def sandbox(folder: Path) -> dict[str, str]:
    """The variables that keep a script's traces in `folder`."""
    return {
        **TRACKERS_OFF,
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "WANDB_DIR": str(folder),
        "PL_TRAINER_DEFAULT_ROOT_DIR": str(folder),
        "TMPDIR": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def remove_sandbox(directory: Path) -> None:
    """Delete a trial's own folder in the run directory."""
    shutil.rmtree(directory / SANDBOX_FOLDER, ignore_errors=True)

"""A contained script: `python -m trainfast_runner.running.contained COMMAND...` ends all that it leaves.

A process that leaves its session and clears its environment stays below its nearest subreaper, which is this program.
SIGTERM, or the end of the program that started this one, ends the command. Trackers are off, temporary folders its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from trainfast_runner.machine.processes import become_subreaper, collect_orphans, descendants, send
from trainfast_runner.worker.exit_now import die_with_parent

POLL_S = 0.02
"""Seconds between two looks at the command."""
END_S = 5.0
"""Seconds after which a process that does not die of SIGKILL is left."""


def main(command: list[str]) -> int:
    """Run the command to its end and return its exit code, 128 and the signal's number after a signal."""
    is_asked = False

    def ask(_number: int, _frame: object) -> None:
        nonlocal is_asked
        is_asked = True

    signal.signal(signal.SIGTERM, ask)
    die_with_parent(signal.SIGTERM)
    become_subreaper()
    process = subprocess.Popen(command, start_new_session=True)
    while (code := process.poll()) is None and not is_asked:
        time.sleep(POLL_S)
    deadline_s = time.monotonic() + END_S
    while collect_orphans() and time.monotonic() < deadline_s:
        for leftover in descendants(os.getpid()):
            send(leftover, signal.SIGKILL)
        time.sleep(POLL_S)
    if code is None:
        return 128 + signal.SIGTERM
    return code if code >= 0 else 128 - code


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The door into a user's own script: hooks that record its steps, with the script unchanged.

`trainfast-tui run -- COMMAND` appends this package's folder to PYTHONPATH and names the run in TRAINFAST_RUN. torch
calls `open_door` at the end of `import torch`, by the entry points of group `torch.backends` (PyTorch RFC 122468).
Standard library, torch and one file of the worker only, for Python 3.8 and later. No error leaves this package: each is
noted in `door.jsonl`.
"""

from __future__ import annotations

from contextlib import suppress


def open_door() -> None:
    """Install the hooks; does nothing outside a run. An error that left this function would abort `import torch`."""
    try:
        from .install import install_hooks

        install_hooks()
    except Exception as error:
        with suppress(Exception):
            from .notes import note_error

            note_error("open_door", error)


def step() -> None:
    """Count one optimizer step of a loop without `torch.optim`; call it after each. Does nothing outside a run."""
    from .install import count_step

    count_step()

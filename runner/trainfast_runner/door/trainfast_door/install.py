"""Every hook of the door, installed once in each process that imports torch."""

from __future__ import annotations

from . import ending
from .notes import never_raises
from .script_run import current_run

OWN_CALL = "trainfast_door.step()"
"""The script's own call that counts its steps, as `hooks` records it."""


@never_raises
def install_hooks() -> None:
    """Install the hooks once in a process of a run, after its import of torch; do nothing in any other process."""
    run = current_run()
    if run is None or run.opened:
        return
    run.opened = True
    run.record_opening()
    from . import blocked_saves, frameworks, loader_hook, longest_first, model_hook, optimizer_hook

    for hook in (ending, optimizer_hook, loader_hook, longest_first, model_hook, frameworks, blocked_saves):
        never_raises(hook.install)(run)


@never_raises
def count_step() -> None:
    """Count a step that the script itself reports; raises SystemExit after the last that `--steps` allows."""
    run = current_run()
    if run is None:
        return
    if not run.opened:
        # A script without torch has nothing else to hook.
        run.opened = True
        never_raises(ending.install)(run)
    if run.steps.source != OWN_CALL:
        run.steps.count_steps_of(OWN_CALL)
    if run.steps.record_step():
        raise SystemExit(0)

"""Every hook of the door, installed once in each process that imports torch."""

from __future__ import annotations

import atexit
import re
import sys
import traceback
from types import TracebackType

from .notes import never_raises, process
from .script_run import ScriptRun, current_run

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
    from . import frameworks, import_hooks, loader_hook, model_hook, optimizer_hook

    never_raises(install)(run)
    for hook in (optimizer_hook, loader_hook, model_hook, frameworks, import_hooks):
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
        never_raises(install)(run)
    if run.steps.source != OWN_CALL:
        run.steps.count_steps_of(OWN_CALL)
    if run.steps.record_step():
        raise SystemExit(0)


BACKWARD_PATHS = ("torch/_tensor.py", "torch/autograd/")
"""Parts of the paths of frames in a backward pass."""
PHASE_OF_FRAME = (
    ("torch/utils/data/", "", "data"),
    ("torch/optim/", "", "optimizer"),
    ("torch/nn/init.py", "", "model"),
    ("torch/nn/modules/", "__init__", "model"),
    ("torch/nn/modules/module.py", "_apply", "model"),
    ("torch/nn/modules/module.py", "_call_impl", "forward"),
)
"""Part of a frame's file, its function (empty for all), and the phase that it shows."""

EVALUATION_NAME = re.compile(r"_*(?:run_|do_)?(?:evaluat|validat|predict|(?:eval|val)(?:_|$)|test(?:_loop|_model|$))")
"""Beginning of the names of functions that evaluate; some that train have one too, such as `predict_noise`."""
WITHOUT_GRADIENTS = "decorate_context"
"""The name of the frame of `@torch.no_grad()`."""


def install(run: ScriptRun) -> None:
    """Record the end of this process when the interpreter exits; an `os._exit` or a signal leaves no record."""
    atexit.register(_record, run)


@never_raises
def _record(run: ScriptRun) -> None:
    run.memory_limit.lift()
    # The interpreter stores the error here before it calls `sys.excepthook`, also one that the script replaced.
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if not run.files.is_claimed and error is not None and run.steps.peaks.has_model:
        # The script failed before its first step. A launcher, which has no model, reports the failures of others.
        run.files.claim()
    if not run.files.are_ours:
        return
    run.steps.flush()
    run.write_facts()
    if error is None:
        run.files.write("finished", step=run.steps.taken)
        return
    chain = process.exception_chain(error)
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    phase = phase_of(error.__traceback__)
    if phase not in ("backward", "optimizer") and _evaluates(run, error.__traceback__):
        phase = "evaluation"
    run.files.write(
        "exception",
        phase=phase,
        # An evaluation follows a step.
        step=run.steps.taken + (phase != "evaluation"),
        type=chain[0]["type"],
        message=chain[0]["message"],
        chain=chain,
        traceback=text[-process.TRACEBACK_CHARACTERS :],
    )


def phase_of(stack: TracebackType | None) -> str | None:
    """The phase that an exception came from, by the innermost known frame of torch; None without one.

    Backward counts before forward: in the backward a checkpointed layer computes its forward again.
    """
    innermost = None
    for frame, _ in traceback.walk_tb(stack):
        code = frame.f_code
        if code.co_name == "backward" and any(file in code.co_filename for file in BACKWARD_PATHS):
            return "backward"
        for file, function, phase in PHASE_OF_FRAME:
            if file in code.co_filename and function in ("", code.co_name):
                innermost = phase
                break
    return innermost


def _evaluates(run: ScriptRun, stack: TracebackType | None) -> bool:
    """True if the exception came from an evaluation: by its batches, or by a function's name outside of training."""
    turns = run.steps.turns
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(stack)]
    is_outside = not turns.in_training or WITHOUT_GRADIENTS in names
    return turns.is_evaluating or (is_outside and any(map(EVALUATION_NAME.match, names)))

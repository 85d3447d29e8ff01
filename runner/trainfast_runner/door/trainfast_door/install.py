"""Every hook of the door, installed once in each process that imports torch; and the record of the process's end."""

from __future__ import annotations

import atexit
import re
import sys
import traceback

from .notes import never_raises, process, write_door_line
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
    torch = str(getattr(sys.modules.get("torch"), "__version__", None))
    never_raises(write_door_line)(run.files.directory, "opened", rank=run.files.rank, torch=torch)
    from . import frameworks, loader_hook, step_hooks

    atexit.register(record_end, run)
    for hook in (step_hooks, loader_hook, frameworks):
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
        atexit.register(record_end, run)
    if run.source != OWN_CALL:
        run.count_steps_of(OWN_CALL)
    if run.record_step():
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


@never_raises
def record_end(run: ScriptRun) -> None:
    """Record the end of this process as the interpreter exits; an `os._exit` or a signal leaves no record."""
    run.memory_limit.lift()
    # The interpreter stores the error here before it calls `sys.excepthook`, also one that the script replaced.
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is not None and run.peaks.has_model:
        # The script may have failed before its first step. A launcher, without a model, reports the failures of others.
        run.files.claim()
    if not run.files.are_ours:
        return
    run.flush()
    run.write_facts()
    if error is None:
        run.files.write("finished", step=run.taken)
        return
    phase = phase_of(run, error)
    # An evaluation follows a step.
    step = run.taken + (phase != "evaluation")
    run.files.write("exception", phase=phase, step=step, **process.exception_fields(error))


def phase_of(run: ScriptRun, error: BaseException) -> str | None:
    """The phase that an error came from, by the innermost known frame of torch; None without one.

    Backward counts before forward: in the backward a checkpointed layer computes its forward again. An evaluation shows
    by its batches, or by a function's name outside of training.
    """
    phase = None
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    for code in codes:
        if code.co_name == "backward" and any(file in code.co_filename for file in BACKWARD_PATHS):
            return "backward"
        for file, function, shown in PHASE_OF_FRAME:
            if file in code.co_filename and function in ("", code.co_name):
                phase = shown
                break
    names = [code.co_name for code in codes]
    is_outside = not run.turns.in_training or WITHOUT_GRADIENTS in names
    evaluates = run.turns.is_evaluating or (is_outside and any(map(EVALUATION_NAME.match, names)))
    return "evaluation" if evaluates and phase != "optimizer" else phase

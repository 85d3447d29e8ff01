"""A program of `forking.Forks`: runs a script with the hooks in a process that has imported torch already."""

import atexit
import runpy
import sys
import traceback
from pathlib import Path

import accelerate.data_loader  # noqa: F401
import torch
import transformers.trainer  # noqa: F401

DOOR = Path(__file__).parents[2] / "runner" / "trainfast_runner" / "door"


def main(arguments):
    """Run the script `arguments[0]` to its end, which the hooks record as at the exit of the interpreter."""
    sys.path.append(str(DOOR))
    import trainfast_door

    torch.set_num_threads(1)
    trainfast_door.open_door()
    code = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except Exception as error:
        traceback.print_exc()
        sys.last_value, code = error, 1
    atexit._run_exitfuncs()
    return code

"""The index of a script in the words of a command, after its interpreter and its launcher."""

from __future__ import annotations

import re
from collections.abc import Sequence

TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
ACCELERATE_MODULES = ("accelerate.commands.accelerate_cli", "accelerate.commands.launch")
SCRIPT_RUNNERS = (
    *TORCHRUN_MODULES,
    *ACCELERATE_MODULES,
    "deepspeed.launcher.runner",
    "cProfile",
    "coverage",
    "debugpy",
    "ipdb",
    "kernprof",
    "line_profiler",
    "memory_profiler",
    "pdb",
    "profile",
    "pyinstrument",
    "scalene",
    "trace",
    "viztracer",
)
"""Modules that run the script or module given after them."""
MODULE_FLAG = re.compile(r"-[bBdEiIOPqsSuvx]*m|--module")
"""`-m` alone or after other letters of Python's own, as in `python -um MODULE`; torchrun also has `--module`."""


def script_index(words: Sequence[str]) -> int | None:
    """Return the index of the script's file, or of its module after `-m`; None if there is neither."""
    for index, word in enumerate(words):
        if word.endswith(".py"):
            return index
        # `numactl -m 0` and `docker run -m 4g` name memory.
        is_module = index > 0 and MODULE_FLAG.fullmatch(words[index - 1]) and re.match(r"[^-\d]", word)
        if is_module and word not in SCRIPT_RUNNERS:
            return index
    return None

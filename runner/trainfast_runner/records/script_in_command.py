"""The index of a script in the words of a command, after its interpreter and its launcher."""

from __future__ import annotations

import os
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
PYTHON = re.compile(r"python(\d(\.\d+)*)?")
"""File names of a Python."""
PYTHON_LETTERS = "[bBdEiIOPqsSuvx]*"
"""Python's own options of one letter without a value, which may stand before `m` in one word: `python -um MODULE`."""
MODULE_FLAG = re.compile(rf"-{PYTHON_LETTERS}m|--module")
"""The word before a module; `--module` is torchrun's."""
FLAG_WITH_MODULE = re.compile(rf"-{PYTHON_LETTERS}m([^\W\d][\w.]*)")
"""A word of Python's that names the module too: `python -mMODULE`."""
PYTHON_OPTIONS_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
"""Options of Python that take the next word."""
LAST_PYTHON_OPTION = re.compile(rf"-({PYTHON_LETTERS}c.*)?", re.DOTALL)
"""`-` and `-c TEXT`: the words after them are the program's own arguments."""


def script_index(words: Sequence[str]) -> int | None:
    """Return the index of the word with the script's file or module (`script_name`); None if there is neither."""
    in_python_options = False
    for index, word in enumerate(words):
        if word.endswith(".py"):
            return index
        # `numactl -m 0` and `docker run -m 4g` name memory.
        is_module = index > 0 and MODULE_FLAG.fullmatch(words[index - 1]) and re.match(r"[^-\d]", word)
        # Another program's option may look the same: `train -dimension 2`.
        is_module = is_module or (in_python_options and FLAG_WITH_MODULE.fullmatch(word))
        if is_module and script_name(word) not in SCRIPT_RUNNERS:
            return index
        is_python_option = word.startswith("-") and not LAST_PYTHON_OPTION.fullmatch(word)
        is_value = index > 0 and words[index - 1] in PYTHON_OPTIONS_WITH_VALUE
        in_python_options = bool(PYTHON.fullmatch(os.path.basename(word))) or (
            in_python_options and (is_python_option or is_value)
        )
    return None


def script_name(word: str) -> str:
    """Return the script's file or module of the word at `script_index`: MODULE of `-mMODULE`."""
    with_module = FLAG_WITH_MODULE.fullmatch(word)
    return word if with_module is None else with_module[1]

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
PYTHON_OPTION_BEFORE_VALUE = re.compile(rf"-{PYTHON_LETTERS}[XW]|--check-hash-based-pycs")
"""A word of Python's options that takes the next word."""
PROGRAM_OPTION = re.compile(rf"-{PYTHON_LETTERS}([mc])(.*)", re.DOTALL)
"""The last of Python's options, `-m` or `-c`, with the module or text where they are in the same word."""


def script_index(words: Sequence[str]) -> int | None:
    """Return the index of the word with the script's file or module (`script_name`); None if there is neither."""
    index = 0
    while index < len(words):
        word = words[index]
        # `numactl -m 0` and `docker run -m 4g` name memory.
        is_module = index > 0 and MODULE_FLAG.fullmatch(words[index - 1]) and re.match(r"[^-\d]", word)
        if word.endswith(".py") or (is_module and word not in SCRIPT_RUNNERS):
            return index
        if not PYTHON.fullmatch(os.path.basename(word)):
            index += 1
            continue
        index += program_index(words[index:])
        program = words[index] if index < len(words) else ""
        option = PROGRAM_OPTION.fullmatch(program)
        if program == "-" or (option is not None and option[1] == "c"):
            # The words after it are arguments of a program without a name: a module flag of theirs is their own.
            return next((at for at in range(index + 1, len(words)) if words[at].endswith(".py")), None)
        # Only a Python's: another program's option may look the same, as in `train -dimension 2`.
        if FLAG_WITH_MODULE.fullmatch(program) and script_name(program) not in SCRIPT_RUNNERS:
            return index
    return None


def program_index(words: Sequence[str]) -> int:
    """Return the index of a Python's program in `words`, which begin with the Python: a file, `-`, `-m` or `-c`.

    The index is past the end of the words if there is no program.
    """
    index = 1
    while index < len(words) and words[index].startswith("-") and words[index] != "-":
        if PROGRAM_OPTION.fullmatch(words[index]):
            break
        index += 2 if PYTHON_OPTION_BEFORE_VALUE.fullmatch(words[index]) else 1
    return index


def script_name(word: str) -> str:
    """Return the script's file or module of the word at `script_index`: MODULE of `-mMODULE`."""
    with_module = FLAG_WITH_MODULE.fullmatch(word)
    return word if with_module is None else with_module[1]

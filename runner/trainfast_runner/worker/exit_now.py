"""The end of this process."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

PR_SET_PDEATHSIG = 1
"""prctl's option, from sys/prctl.h."""


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process as soon as the thread that started it ends; only Linux can."""
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def exit_now(code: int) -> NoReturn:
    """End this process at once, without teardown.

    After an error, leaving a process group or a CUDA context can block for ever; after a good end, gloo's threads
    sometimes abort a process that leaves its group.
    """
    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk takes no output
            stream.flush()
    os._exit(code)

"""Ending the process."""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End at once, without tearing anything down.

    After an error, leaving a process group or a CUDA context can wait for ever; after a good end, gloo's threads
    now and then abort a process that takes its group down.
    """
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""SIGTERM ends the process at once, with its last step on record."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch

from .exit_now import exit_now
from .records.step_log import StepLog
from .records.worker_log import WorkerLog

STEP_LOG_TIMEOUT_S = 1.0
"""Seconds to wait for the figures of the last step."""
EXIT_SIGTERM = 128 + signal.SIGTERM
"""Exit code after SIGTERM, as a shell reports it."""


def keep_last_step_on_sigterm(step_log: StepLog | None, log: WorkerLog, device: torch.device) -> None:
    """Handle SIGTERM in a thread, because the main thread may wait in a collective for a rank that is gone.

    Without a step log no step is kept. A new thread's device is the first GPU, where CUDA would make a context: the
    thread sets `device` first.
    """
    receiver, sender = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(receiver, True)
    owner = os.getpid()

    def watch() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        while os.read(receiver, 1) != bytes([signal.SIGTERM]):
            pass
        if step_log is not None:
            step_log.flush(timeout_s=STEP_LOG_TIMEOUT_S)
        log.write("signal", signal="SIGTERM", phase=log.phase, step=log.step)
        exit_now(EXIT_SIGTERM)

    def in_main_thread(_number: int, _frame: Any) -> None:
        # The thread above acts on the byte that the interpreter wrote; a forked child has no such thread.
        if os.getpid() != owner:
            os._exit(EXIT_SIGTERM)

    threading.Thread(target=watch, name="sigterm", daemon=True).start()
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, in_main_thread)

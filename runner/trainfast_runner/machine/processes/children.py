"""Children of this process: adopted and collected."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading

PR_SET_CHILD_SUBREAPER = 36
"""The option of prctl(2), from the kernel's prctl.h."""


def reap_when_ended(process: subprocess.Popen[bytes]) -> None:
    """Collect a child whenever it ends, for a caller that does not wait for it; `process` may still be polled."""
    threading.Thread(target=process.wait, name=f"wait for {process.pid}", daemon=True).start()


def become_subreaper() -> bool:
    """Make orphans below this process its own children, however they detached. False when Linux refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0


def collect_orphans() -> bool:
    """Collect every ended child; True if any child is left. Only after the direct child's own status is kept."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True

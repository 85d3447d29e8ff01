"""The count of the kernel's out-of-memory kills in this process's cgroup."""

from __future__ import annotations

import re
from pathlib import Path

from trainfast_runner.machine.cgroup import memory_files


def oom_kills() -> int | None:
    """Kills counted so far: of this cgroup (`memory.events`, v1 `memory.oom_control`), else of the whole machine.

    None when Linux counts none. Take differences.
    """
    for path in (*memory_files("memory.events", "memory.oom_control"), Path("/proc/vmstat")):
        try:
            text = path.read_text()
        except OSError:
            continue
        if found := re.search(r"^oom_kill (\d+)$", text, re.MULTILINE):
            return int(found[1])
    return None

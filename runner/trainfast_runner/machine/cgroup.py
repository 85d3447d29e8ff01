"""The control groups that this process is in, of version 2 and of version 1's memory controller."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc/self")


def memory_files(v2: str, v1: str, proc: Path = PROC) -> Iterator[Path]:
    """Yield the paths of the file `v2` (`v1` under version 1) in this process's groups, its own first.

    Not every one of them exists. Inside a container the mount's root may stand for a group of the host's.
    """
    for line in _file_lines(proc / "cgroup"):
        _, _, controllers_and_group = line.partition(":")
        controllers, _, group = controllers_and_group.partition(":")
        if controllers == "" or "memory" in controllers.split(","):
            for mount, root in _mounts(proc, is_v2=controllers == ""):
                below = Path(os.path.normpath(os.path.relpath(group, root)))
                yield from (mount / part / (v1 if controllers else v2) for part in (below, *below.parents))


def oom_kills() -> int | None:
    """The kernel's kills for want of memory so far: in this group (`memory.events`), else on the whole machine.

    None when Linux counts none. Take differences.
    """
    for path in (*memory_files("memory.events", "memory.oom_control"), Path("/proc/vmstat")):
        if match := re.search(r"^oom_kill (\d+)$", "\n".join(_file_lines(path)), re.MULTILINE):
            return int(match[1])
    return None


def _mounts(proc: Path, *, is_v2: bool) -> Iterator[tuple[Path, str]]:
    """Mount points of version 2 or of the memory controller, each with the group that is mounted there (proc(5))."""
    for line in _file_lines(proc / "mountinfo"):
        mount, _, kind = line.partition(" - ")
        fields, kinds = mount.split(), kind.split()
        if kinds[:1] == ["cgroup2"] if is_v2 else kinds[:1] == ["cgroup"] and "memory" in kinds[-1].split(","):
            yield Path(fields[4]), fields[3]


def _file_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []

"""The count of the kernel's out-of-memory kills in this process's cgroup."""

from __future__ import annotations

import os
import re
from pathlib import Path


def oom_kills() -> int | None:
    """Kills counted so far: of this cgroup (`memory.events`, v1 `memory.oom_control`), else of the whole machine.

    None when Linux counts none. Take differences.
    """
    for path in _counter_files():
        try:
            text = path.read_text()
        except OSError:
            continue
        if found := re.search(r"^oom_kill (\d+)$", text, re.MULTILINE):
            return int(found[1])
    return None


def _counter_files() -> list[Path]:
    """Files that may hold the count, the most precise first."""
    files = []
    for controllers, group in _groups():
        name = "memory.oom_control" if "memory" in controllers else "memory.events"
        if "memory" in controllers or controllers == [""]:
            files += [mount / os.path.relpath(group, root) / name for mount, root in _mounts(controllers)]
    return [*files, Path("/proc/vmstat")]


def _groups() -> list[tuple[list[str], str]]:
    """Lines of `/proc/self/cgroup`: the controllers (one empty name for v2) and the group's path."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    return [(line.split(":", 2)[1].split(","), line.split(":", 2)[2]) for line in lines if line.count(":") >= 2]


def _mounts(controllers: list[str]) -> list[tuple[Path, str]]:
    """Mount points of the hierarchy with these controllers, each with the group that is mounted there."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        place, _, kind = line.partition(" - ")
        kind_fields, place_fields = kind.split(), place.split()
        version_2 = kind_fields[:1] == ["cgroup2"] and controllers == [""]
        version_1 = kind_fields[:1] == ["cgroup"] and "memory" in controllers and "memory" in kind_fields[-1].split(",")
        if version_1 or version_2:
            found.append((Path(place_fields[4]), place_fields[3]))
    return found

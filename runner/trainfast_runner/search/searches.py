"""The searches of a home: the one a command continues, the one a screen shows, and a new one's directory."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.machine.processes.identity import boot_id
from trainfast_runner.records.home import STAMP, Home, home_problem, new_id
from trainfast_runner.records.run_file import SCHEMA
from trainfast_runner.records.search_directories import is_conducted, search_directories
from trainfast_runner.search.journal import Asked, Conducted, Ended, read_journal

if TYPE_CHECKING:
    from trainfast_runner.running.planning import RunPlan

FREE_KNOBS = ("batch_size", "steps", "timing_warmup")
"""Knobs a search sets itself; commands that differ only in these continue the same search."""
LOOKED_AT = 20
"""How many of the newest searches are checked for a live one."""


def key_of(plan: RunPlan) -> str:
    """Return the hash that tells searches apart: of model, data, knobs, devices and versions."""
    knobs = {name: value for name, value in plan.spec.knobs.items() if name not in FREE_KNOBS}
    asked = (plan.spec.model, plan.spec.data, knobs, plan.device, plan.device_uuids, plan.python, plan.versions)
    return hashlib.sha256(msgspec.json.encode(asked, order="deterministic")).hexdigest()[:16]


def unfinished(home: Home, key: str) -> Path | None:
    """The newest search of this key if it has no answer yet, else None. Raises as `search_directories`."""
    for directory in reversed(search_directories(home)):
        lines = read_journal(directory)
        # A newer version's lines may mean something else.
        if lines and isinstance(lines[0], Asked) and lines[0].key == key and lines[0].schema <= SCHEMA:
            ended = next((line for line in reversed(lines) if isinstance(line, Ended)), None)
            return directory if ended is None or ended.state == "cancelled" else None
    return None


def newest_search(home: Home) -> Path | None:
    """The newest live search, else the newest of this boot; None when there is neither.

    Raises UserError when they cannot be listed.
    """
    found = search_directories(home)[: -LOOKED_AT - 1 : -1]
    live = next((directory for directory in found if is_conducted(directory)), None)
    if live is not None or not found:
        return live
    conducted = [line for line in read_journal(found[0]) if isinstance(line, Conducted)]
    return found[0] if conducted and conducted[-1].boot_id == boot_id() else None


def new_search(home: Home, name: str) -> Path:
    """Make an empty search directory, its id made as a run's. Raises UserError when the home cannot be written."""
    directory = home.path / "searches" / new_id(time.strftime(STAMP, time.gmtime()), name, "search")
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise home_problem(home.path, error) from None
    return directory

"""The searches of a home: the one a command continues, the one a screen shows, and a new one's directory."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.machine.processes.identity import boot_id
from trainfast_runner.records.home import STAMP, Home, home_error, new_id
from trainfast_runner.records.json_lines import DAMAGE
from trainfast_runner.records.run_file import SCHEMA
from trainfast_runner.records.search_directories import JOURNAL_FILE, is_conducted, search_directories
from trainfast_runner.search.best.journal import BestEnded, BestLine, BestQuestion
from trainfast_runner.search.journal import AnyLine, Asked, Conducted, Ended, read_journal

if TYPE_CHECKING:
    from trainfast_runner.running.planning import RunPlan

SET_BY_A_SEARCH = ("steps", "timing_warmup")
"""Knobs that a search sets itself; commands that differ only in these continue the same search."""
SET_BY_A_BATCH_SEARCH = ("batch_size", *SET_BY_A_SEARCH)
BATCH, BEST = "asked", "question"
"""Kinds of search, by the first line of their journals."""
LOOKED_AT = 20
"""Newest searches that are checked for a live one."""


class FirstLine(msgspec.Struct, frozen=True):
    """The kind of a journal's first line."""

    kind: str = ""


def key_of(plan: RunPlan) -> str:
    """Return the key that tells batch searches apart: of model, data or script, knobs, devices and versions."""
    knobs = {name: value for name, value in plan.spec.knobs.items() if name not in SET_BY_A_BATCH_SEARCH}
    asked = (plan.spec.model, plan.spec.data, knobs, plan.device, plan.device_uuids, plan.python, plan.versions)
    return hash_of(asked if plan.script is None else (*asked, plan.script.command, plan.cwd))


def hash_of(asked: object) -> str:
    """Return 16 hex digits that differ for different values."""
    return hashlib.sha256(msgspec.json.encode(asked, order="deterministic")).hexdigest()[:16]


def unfinished(
    home: Home, key: str, read: Callable[[Path], Sequence[AnyLine | BestLine]] = read_journal
) -> Path | None:
    """The newest search of this key if it has no answer yet, else None. Raises as `search_directories`.

    `read` reads the journals of one kind of search; those of the other kind then have no first line.
    """
    for directory in reversed(search_directories(home)):
        lines = read(directory)
        first = lines[0] if lines else None
        # A newer version's lines may mean something else.
        if isinstance(first, Asked | BestQuestion) and first.key == key and first.schema <= SCHEMA:
            ended = next((line for line in reversed(lines) if isinstance(line, Ended | BestEnded)), None)
            return directory if ended is None or ended.state == "cancelled" else None
    return None


def kind_of(directory: Path) -> str | None:
    """The kind of the search: BATCH or BEST; None when its first line is unreadable."""
    try:
        with (directory / JOURNAL_FILE).open("rb") as file:
            return msgspec.json.decode(file.readline(), type=FirstLine).kind
    except (OSError, *DAMAGE):
        return None


def newest_search(home: Home, kind: str = BATCH) -> Path | None:
    """The newest live search of a kind, else the newest of this boot; None when there is neither.

    Raises UserError when they cannot be listed.
    """
    found = [one for one in search_directories(home)[: -LOOKED_AT - 1 : -1] if kind_of(one) == kind]
    live = next((directory for directory in found if is_conducted(directory)), None)
    if live is not None or not found:
        return live
    # Both kinds of journal have this line.
    conducted = [line for line in read_journal(found[0]) if isinstance(line, Conducted)]
    return found[0] if conducted and conducted[-1].boot_id == boot_id() else None


def new_search(home: Home, name: str) -> Path:
    """Make an empty search directory, its id made as a run's. Raises UserError when the home cannot be written."""
    directory = home.searches / new_id(time.strftime(STAMP, time.gmtime()), name, "search")
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise home_error(home.path, error) from None
    return directory

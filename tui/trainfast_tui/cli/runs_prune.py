"""`runs prune`: delete old runs and searches and unused cache files, after printing what that frees."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home, cache_directory
from trainfast_runner.records.run_file import SCHEMA
from trainfast_runner.running import pruning
from trainfast_runner.running.pruning import PrunePlan
from trainfast_tui.cli.number_types import whole
from trainfast_tui.cli.output import print_json, print_line, print_lines
from trainfast_tui.text.format import count, size

SHOWN = 12
"""Name at most this many runs and searches; count the rest."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Without --keep and --older-than no run and no search is deleted: only cache entries whose files were not read"
        " or changed for 30 days, as far as the file times tell, and stale locks. With both, a run goes that neither of"
        " them keeps. A live run or search and what belongs to it are never deleted. Everything in the caches is made"
        " again when it is needed. Exit code 4 when something could not be deleted."
    )
    parser.add_argument("--keep", type=whole, metavar="N", help="delete runs and searches before the newest N runs")
    parser.add_argument("--older-than", metavar="AGE", help="delete runs, searches and cache entries older than 30d")
    parser.add_argument("--dry-run", action="store_true", help="only print what it would free")
    parser.add_argument("--yes", action="store_true", help="delete without asking")
    parser.add_argument("--json", action="store_true", help="print what was deleted, or would be, as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print what it frees, ask, and delete."""
    older_than_s = None if arguments.older_than is None else pruning.seconds_of(arguments.older_than)
    home = Home()
    found = pruning.plan(home, cache_directory(), arguments.keep, older_than_s)
    if not arguments.json:
        print_lines(_lines(found))
    left: dict[str, int] = {}
    deletes = not (arguments.dry_run or found.is_empty) and (arguments.yes or _agreed(found))
    if deletes:
        left = pruning.carry_out(home, found)
    if arguments.json:
        print_json(_as_json(found, deleted=deletes, left=left))
    elif deletes:
        print_line(f"freed {size(_freed_bytes(found, left))}")
        if left:
            print_line(f"not deleted, in use again or no permission: {', '.join(left)}")
    return 4 if left else 0


def _freed_bytes(found: PrunePlan, left: dict[str, int]) -> int:
    return max(0, found.total_bytes - sum(left.values()))


def _agreed(found: PrunePlan) -> bool:
    """Return the person's answer at the terminal; raises UserError without a terminal."""
    if not sys.stdin.isatty():
        raise UserError(
            "nothing was deleted: there is no terminal to ask on; add --yes, or --dry-run to only look", key="--yes"
        )
    print(f"Delete all of this, {size(found.total_bytes)}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _lines(found: PrunePlan) -> Iterator[str]:
    for noun, entries in (("run", found.runs), ("search", found.searches)):
        for name, size_bytes in list(entries.items())[:SHOWN]:
            yield f"{noun} {name}  {size(size_bytes)}"
        if len(entries) > SHOWN:
            yield f"and {count(len(entries) - SHOWN)} more"
    yield from (f"{name} is live and stays" for name in found.live)
    parts = [
        f"{count(len(sizes))} {noun}, {size(sum(sizes))}"
        for noun, sizes in (
            ("runs", list(found.runs.values())),
            ("searches", list(found.searches.values())),
            ("cache entries", [one.bytes for one in found.caches]),
            ("stale locks", [one.bytes for one in found.locks]),
        )
        if sizes
    ]
    yield f"to delete: {'; '.join(parts)}" if parts else "nothing to delete"


def _as_json(found: PrunePlan, *, deleted: bool, left: dict[str, int]) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "runs": [{"run_id": name, "bytes": size_bytes} for name, size_bytes in found.runs.items()],
        "searches": [{"search_id": name, "bytes": size_bytes} for name, size_bytes in found.searches.items()],
        "caches": [{"path": str(one.path), "bytes": one.bytes, "why": one.why} for one in found.caches],
        "locks": [{"path": str(one.path), "bytes": one.bytes} for one in found.locks],
        "live": found.live,
        "total_bytes": _freed_bytes(found, left),
        "deleted": deleted,
        "left": list(left),
    }

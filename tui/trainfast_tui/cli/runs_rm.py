"""`runs rm` and `runs prune`: delete named runs, or old runs and searches; never a live one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import is_alive_after_grace
from trainfast_runner.records.run_file import SCHEMA
from trainfast_runner.running.history import PrunePlan, plan_prune, prune, seconds_of
from trainfast_runner.running.present_state import refuse_left_alone
from trainfast_runner.running.settling import remove_run
from trainfast_runner.units import counted
from trainfast_tui.cli.arguments import whole
from trainfast_tui.cli.exit_codes import EXIT_FAILED
from trainfast_tui.cli.printing import print_json, print_line, print_lines
from trainfast_tui.text.format import size


def runs_rm_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("references", metavar="RUN", nargs="+", help="ids, unique prefixes, or last")
    parser.add_argument("--json", action="store_true", help="print {removed[...]}")


def runs_rm(arguments: argparse.Namespace) -> int:
    """Delete the runs and print their ids."""
    home = Home()
    ids = list(dict.fromkeys(home.find(reference) for reference in arguments.references))
    for run_id in ids:
        refuse_left_alone(home.directory(run_id))
    live_ids = [run_id for run_id in ids if is_alive_after_grace(home.directory(run_id))]
    if live_ids:
        raise UserError(
            f"{', '.join(live_ids)} {'is' if len(live_ids) == 1 else 'are'} still running; nothing was deleted",
            key=live_ids[0],
            advice=f"trainfast-tui stop {live_ids[0]}",
        )
    for run_id in ids:
        remove_run(home, run_id)
        if not arguments.json:
            print_line(f"deleted {run_id}")
    if arguments.json:
        print_json({"removed": ids})
    return 0


MAX_NAMED = 12
"""Name at most this many runs and searches; count the rest."""


def runs_prune_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "With both --keep and --older-than a run is deleted only if neither option keeps it. Live runs and searches and"
        " all that belongs to them are never deleted. Exit code 4 if something could not be deleted."
    )
    parser.add_argument("--keep", type=whole, metavar="N", help="delete runs and searches before the newest N runs")
    parser.add_argument("--older-than", metavar="AGE", help="delete runs and searches older than AGE, such as 30d")
    parser.add_argument("--yes", action="store_true", help="delete; without it only print what would be freed")
    parser.add_argument("--json", action="store_true", help="print what was deleted, or would be, as one JSON object")


def runs_prune(arguments: argparse.Namespace) -> int:
    """Print the bytes to be freed, and with `--yes` delete."""
    older_than_s = None if arguments.older_than is None else seconds_of(arguments.older_than)
    home = Home()
    plan = plan_prune(home, arguments.keep, older_than_s)
    deletes = arguments.yes and not plan.is_empty
    if not arguments.json:
        print_lines(_lines(plan))
    left_bytes = prune(home, plan) if deletes else {}
    if arguments.json:
        print_json(_as_json(plan, deleted=deletes, left_bytes=left_bytes))
    elif deletes:
        print_line(f"freed {size(_freed_bytes(plan, left_bytes))}")
        if left_bytes:
            print_line(f"not deleted, in use again or no permission: {', '.join(left_bytes)}")
    elif not plan.is_empty:
        print_line("nothing was deleted: --yes deletes all of this")
    return EXIT_FAILED if left_bytes else 0


def _freed_bytes(plan: PrunePlan, left_bytes: dict[str, int]) -> int:
    return max(0, plan.total_bytes - sum(left_bytes.values()))


def _lines(plan: PrunePlan) -> Iterator[str]:
    parts = []
    for noun, plural, entries in (("run", "runs", plan.runs), ("search", "searches", plan.searches)):
        for name, size_bytes in list(entries.items())[:MAX_NAMED]:
            yield f"{noun} {name}  {size(size_bytes)}"
        if len(entries) > MAX_NAMED:
            yield f"and {counted(len(entries) - MAX_NAMED, f'more {noun}', f'more {plural}')}"
        parts += [f"{counted(len(entries), noun, plural)}, {size(sum(entries.values()))}"] if entries else []
    yield from (f"{name} is live and stays" for name in plan.live)
    yield f"to delete: {'; '.join(parts)}" if parts else "nothing to delete"


def _as_json(plan: PrunePlan, *, deleted: bool, left_bytes: dict[str, int]) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "runs": [{"run_id": name, "bytes": size_bytes} for name, size_bytes in plan.runs.items()],
        "searches": [{"search_id": name, "bytes": size_bytes} for name, size_bytes in plan.searches.items()],
        "live": plan.live,
        "total_bytes": _freed_bytes(plan, left_bytes),
        "deleted": deleted,
        "left": list(left_bytes),
    }

"""`runs show`: print one run's result, or the figures so far of a live run."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import read_result, read_run_file
from trainfast_runner.records.run_file import WARM_ROLES, RunFile
from trainfast_runner.results.bottleneck.joined_steps import as_record, joined_steps
from trainfast_runner.results.explained_run import explained_now
from trainfast_runner.running.final_result import result_or_none_while_live
from trainfast_runner.running.follower import Follower, RunSnapshot
from trainfast_tui.cli import summary
from trainfast_tui.cli.arguments import add_run, directory_of
from trainfast_tui.cli.diagnosis import explained_bottlenecks
from trainfast_tui.cli.output import print_json, print_line, print_lines
from trainfast_tui.cli.run_status import live_record, status_line
from trainfast_tui.cli.step_table import JoinedStep, print_steps
from trainfast_tui.text.diagnosis_figures import nothing_found
from trainfast_tui.text.format import count, plain
from trainfast_tui.text.overrides import typed_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--steps", action="store_true", help="each step, with the readings of the watched GPUs")
    what.add_argument("--why", action="store_true", help="the bottlenecks, with figures and thresholds")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the run; return 0 however it ended."""
    directory = directory_of(arguments)
    if arguments.steps:
        _print_steps(directory, arguments.json)
        return 0
    result = result_or_none_while_live(directory)
    if result is not None:
        _print_ended(explained_now(directory, result), read_run_file(directory), arguments)
    else:
        _print_live(Follower(directory).poll(), arguments)
    return 0


def _print_ended(result: Result, run: RunFile | None, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json(result)
    elif arguments.why:
        nothing = nothing_found(live=False, measured=result.steps.measured, diagnosed=result.diagnosed)
        print_lines(explained_bottlenecks(result.diagnosis, nothing))
    else:
        print_lines([*summary.lines(result), _settings(result, run)])


def _print_live(snapshot: RunSnapshot, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json(live_record(snapshot))
    elif arguments.why:
        measured = sum(not step.warmup for step in snapshot.steps)
        nothing = nothing_found(live=True, measured=measured, diagnosed=True)
        print_lines(explained_bottlenecks(snapshot.diagnosis, nothing))
    else:
        print_line(f"{snapshot.run_id}  {status_line(snapshot)}")
        print_line(f"follow it with: trainfast-tui attach {snapshot.run_id}")


def _print_steps(directory: Path, as_json: bool) -> None:
    steps = joined_steps(directory)
    result = read_result(directory)
    thinning = None if result is None else result.thinning
    if as_json:
        rows = [as_record(*step) for step in steps]
        print_json({"schema": 1, "run_id": directory.name, "thinning": thinning, "steps": rows})
        return
    print_steps([JoinedStep(*step) for step in steps])
    if result is not None and thinning is not None:
        taken = result.steps.measured + result.steps.warmup
        print_line(f"note: a long run: these are {count(len(steps))} of its {count(taken)} steps")


def _settings(result: Result, run: RunFile | None) -> str:
    """Return the overrides; for a process that tried settings for a search, the search.

    Results of older versions have them only in `run.json`.
    """
    if result.role in WARM_ROLES and result.script is None:
        return f"its search: {result.search_id or 'not on record'}"
    changed = result.overrides or (run.override_values() if run is not None else {})
    return f"settings: {plain(' '.join(typed_overrides(changed)))}" if changed else "settings: as the preset sets them"

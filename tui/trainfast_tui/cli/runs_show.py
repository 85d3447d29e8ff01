"""`runs show`: print one run's result, or the figures so far of a live run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trainfast_runner.memory.oom.explain_run import with_newer_explanation
from trainfast_runner.records.result import Diagnosis, Result
from trainfast_runner.records.roles import WARM_ROLES
from trainfast_runner.records.run_directory import read_result, read_run_file
from trainfast_runner.records.run_file import SCHEMA, RunFile
from trainfast_runner.results.summary import read_joined_steps, step_record
from trainfast_runner.running.final_result import result_or_none_while_live
from trainfast_runner.running.follower import Follower, RunSnapshot
from trainfast_runner.settings.set_by_searches import without_search_settings
from trainfast_tui.cli.arguments import add_run, directory_of
from trainfast_tui.cli.printing.output import print_json, print_line, print_lines, terminal_width
from trainfast_tui.cli.printing.run_status import live_record, status_line
from trainfast_tui.cli.printing.step_table import print_steps
from trainfast_tui.cli.printing.summary import summary_lines
from trainfast_tui.text.diagnosis_words import (
    diagnosis_section,
    no_bottleneck_in_result,
    no_bottleneck_in_run,
    overlap_words,
)
from trainfast_tui.text.format import count
from trainfast_tui.text.lines import line_text
from trainfast_tui.text.overrides import typed_overrides

PIPE_WIDTH = 10_000
"""The width of lines for a pipe, which gets each one whole."""


def runs_show_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)
    view = parser.add_mutually_exclusive_group()
    view.add_argument("--steps", action="store_true", help="each step, with the readings of the watched GPUs")
    view.add_argument("--why", action="store_true", help="the bottlenecks, with figures and thresholds")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def runs_show(arguments: argparse.Namespace) -> int:
    """Print the run; return 0 however it ended."""
    directory = directory_of(arguments)
    if arguments.steps:
        _print_steps(directory, arguments.json)
        return 0
    result = result_or_none_while_live(directory)
    if result is not None:
        _print_ended(with_newer_explanation(directory, result), read_run_file(directory), arguments)
    else:
        _print_live(Follower(directory).poll(), arguments)
    return 0


def _print_ended(result: Result, run_file: RunFile | None, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json(result)
    elif arguments.why:
        print_lines(explained_bottlenecks(result.diagnosis, no_bottleneck_in_result(result)))
    else:
        print_lines([*summary_lines(result), _settings_line(result, run_file)])


def _print_live(snapshot: RunSnapshot, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json(live_record(snapshot))
    elif arguments.why:
        print_lines(explained_bottlenecks(snapshot.diagnosis, no_bottleneck_in_run(snapshot)))
    else:
        print_line(f"{snapshot.run_id}  {status_line(snapshot)}")
        print_line(f"follow it with: trainfast-tui attach {snapshot.run_id}")


def explained_bottlenecks(diagnoses: Sequence[Diagnosis], nothing: str) -> list[str]:
    """Return each bottleneck with its figures, its rule's thresholds and their sources; else `nothing`."""
    if not diagnoses:
        return [nothing]
    lines: list[str] = []
    width = terminal_width() or PIPE_WIDTH
    for diagnosis in diagnoses:
        title, section = diagnosis_section(diagnosis, width)
        lines += ["", title, *(line_text(line) for line in section)]
    overlap = overlap_words(diagnoses)
    return [*lines[1:], *(["", overlap] if overlap else [])]


def _print_steps(directory: Path, as_json: bool) -> None:
    steps = [step_record(*step) for step in read_joined_steps(directory)]
    result = read_result(directory)
    thinning = None if result is None else result.thinning
    if as_json:
        print_json({"schema": SCHEMA, "run_id": directory.name, "thinning": thinning, "steps": steps})
        return
    print_steps(steps)
    if result is not None and thinning is not None:
        step_count = result.steps.measured + result.steps.warmup
        print_line(f"note: a long run: these are {count(len(steps))} of its {count(step_count)} steps")


def _settings_line(result: Result, run_file: RunFile | None) -> str:
    """Return a run's overrides, or the search that a warm process belongs to."""
    if result.role in WARM_ROLES and result.script is None:
        return f"its search: {result.search_id or 'none recorded'}"
    typed = typed_overrides(without_search_settings(result.overrides, result.role))
    return f"settings: {' '.join(typed)}" if typed else "settings: as the preset sets them"

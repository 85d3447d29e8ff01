"""`search best`: the fastest settings that fit, found by warm trials and confirmed in fresh processes."""

from __future__ import annotations

import argparse
import dataclasses
import time
from functools import partial
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.search.best.answer import BestSoFar, best_report
from trainfast_runner.search.best.conductor import conduct_best
from trainfast_runner.search.best.question import (
    BestPlan,
    BestRequest,
    estimate,
    open_best,
    plan_preset_best,
    plan_script_best,
    read_budget,
)
from trainfast_runner.search.best_journal import BestEnded, ColdRun, Trial, read_best_journal
from trainfast_runner.search.searches import SearchOptions
from trainfast_runner.settings import script_preset
from trainfast_runner.settings.knobs import read_vary
from trainfast_runner.settings.spec import resolve
from trainfast_runner.units import counted
from trainfast_tui.cli.arguments import add_search_arguments, positive
from trainfast_tui.cli.exit_codes import SEARCH_EXIT_CODES
from trainfast_tui.cli.launching import await_devices
from trainfast_tui.cli.printing import print_json, print_lines, refuse_unwritable, write_output
from trainfast_tui.cli.progress import BestPrinter, Progress, print_earlier_search, progress_when_slow
from trainfast_tui.cli.signals import Signals, caught_signals
from trainfast_tui.text.best_words import answer_lines, estimate_lines, question_lines


def search_best_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_search_arguments(parser)
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KNOB=A,B,C",
        help="vary this knob; may be given again. Without it: every knob that keeps the training the same;"
        " mixed precision counts as the same",
    )
    parser.add_argument(
        "--global-batch", type=positive, metavar="N", help="samples of one optimizer step (the preset's)"
    )
    parser.add_argument(
        "--objective",
        default="samples_per_s",
        metavar="NAME",
        help="samples_per_s (the default), tokens_per_s, samples_per_joule, or time with --for-steps",
    )
    parser.add_argument(
        "--for-steps",
        type=positive,
        metavar="N",
        help="optimizer steps of the training that --objective time minimises",
    )
    parser.add_argument("--budget", default="10m", metavar="T", help="time for finding the leader: 90s, 10m, 1h (10m)")
    parser.add_argument("--dry-run", action="store_true", help="print the number of settings and the expected time")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the answer and the whole journal to FILE")
    parser.epilog = "Ctrl-C cancels and prints the best so far; the same command then continues."


def search_best(arguments: argparse.Namespace) -> int:
    """Search and print the answer."""
    began_ns = time.monotonic_ns()
    home = Home().create()
    request = BestRequest(
        vary=read_vary(arguments.vary),
        global_batch=arguments.global_batch,
        objective=arguments.objective,
        for_steps=arguments.for_steps,
        budget_s=_budget_s(arguments.budget),
    )
    if arguments.record is not None:
        refuse_unwritable(arguments.record, "--record")
    options = SearchOptions(fresh=arguments.fresh, wait=arguments.wait)
    with progress_when_slow("checking…"):
        best_plan = _plan(arguments, request)
    if arguments.dry_run:
        _print_estimate(best_plan, home, arguments.json)
        return 0
    if arguments.wait:
        began_ns += await_devices(best_plan.plan, home)
    directory = open_best(best_plan, home, options)
    with caught_signals() as signals:
        ended = _conduct(directory, best_plan, home, options, signals, began_ns)
    _report(directory, arguments.json, arguments.record)
    return SEARCH_EXIT_CODES[ended.state]


def _budget_s(text: str) -> float:
    """Return the seconds of `--budget`. Raises UserError."""
    try:
        return read_budget(text)
    except UserError as error:
        raise error.at("--budget") from None


def _plan(arguments: argparse.Namespace, request: BestRequest) -> BestPlan:
    """Return the checked question about a preset, or about the script of one. Raises UserError."""
    if (script := script_preset.path_of(arguments.preset)) is not None:
        return plan_script_best(script_preset.load(script), arguments.settings, request, arguments.python)
    return plan_preset_best(resolve(arguments.preset, arguments.settings), request, arguments.python)


def _conduct(
    directory: Path, best_plan: BestPlan, home: Home, options: SearchOptions, signals: Signals, began_ns: int
) -> BestEnded:
    """Conduct the search and print each line of its journal on stderr."""
    progress = Progress()
    lines = read_best_journal(directory)
    measured = sum(isinstance(line, Trial | ColdRun) for line in lines)
    trial_words = f"with {counted(measured, 'measurement')}" if measured else ""
    print_earlier_search(progress, home, directory, trial_words)
    printer = BestPrinter(progress, home, lines)
    printer.print_question(best_plan.question)
    return printer.watch(partial(conduct_best, directory, best_plan, home, options), signals, began_ns)


def _report(directory: Path, as_json: bool, record: Path | None) -> None:
    lines = read_best_journal(directory)
    report = best_report(directory) if as_json or record is not None else {}
    if as_json:
        print_json(report)
    else:
        print_lines(answer_lines(BestSoFar(tuple(lines)), directory.name))
    if record is not None:
        write_output(record, msgspec.json.encode({**report, "journal": lines}).decode(), "--record")


def _print_estimate(best_plan: BestPlan, home: Home, as_json: bool) -> None:
    """Print the number of candidates and the time that a search of them takes."""
    best_estimate = estimate(best_plan, home)
    if as_json:
        print_json(dataclasses.asdict(best_estimate))
    else:
        question = question_lines(best_estimate.vary, best_estimate.left_alone, best_estimate.global_batch)
        print_lines([*question, *estimate_lines(best_estimate)])

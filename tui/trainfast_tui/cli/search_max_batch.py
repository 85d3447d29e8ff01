"""`search max-batch`: the largest batch that fits, found by probes and confirmed in a fresh process."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from trainfast_runner.records.home import Home
from trainfast_runner.search.batch.answer import batch_report
from trainfast_runner.search.batch.conductor import (
    BatchPlan,
    conduct_batch,
    open_batch,
    plan_script_batch,
    plan_spec_batch,
)
from trainfast_runner.search.batch_journal import BatchEnded, BatchFollower, BatchLine, Probe, read_batch_journal
from trainfast_runner.search.conductor import SearchCaller
from trainfast_runner.search.searches import SearchOptions
from trainfast_runner.settings import presets, script_preset
from trainfast_runner.settings.spec import SET_BY_A_BATCH_SEARCH, RunSpec, resolve
from trainfast_runner.units import counted
from trainfast_tui.cli.arguments import add_search_arguments, positive
from trainfast_tui.cli.exit_codes import SEARCH_EXIT_CODES
from trainfast_tui.cli.launching import await_devices
from trainfast_tui.cli.printing import print_json, print_lines, print_notice
from trainfast_tui.cli.progress import BatchPrinter, Progress, print_earlier_search, progress_when_slow
from trainfast_tui.cli.signals import Signals, caught_signals
from trainfast_tui.text.batch_words import batch_answer_lines


def search_max_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_search_arguments(parser)
    parser.add_argument(
        "--no-oom",
        action="store_true",
        help="never run out of memory on purpose: stop where the fit says that no more fits",
    )
    parser.add_argument(
        "--proof-steps", type=positive, default=10, metavar="N", help="steps of the confirmation run (10)"
    )
    parser.epilog = "Ctrl-C cancels; the same command then continues. The search itself sets batch_size and steps."


def search_max_batch(arguments: argparse.Namespace) -> int:
    """Search and print the answer."""
    began_ns = time.monotonic_ns()
    home = Home().create()
    options = SearchOptions(
        no_oom=arguments.no_oom, confirmation_steps=arguments.proof_steps, fresh=arguments.fresh, wait=arguments.wait
    )
    with progress_when_slow("checking…"):
        batch_plan = _plan(arguments)
    if arguments.wait:
        began_ns += await_devices(batch_plan.plan, home)
    directory = open_batch(batch_plan, home, options)
    conducting = partial(conduct_batch, directory, batch_plan, home, options)
    with caught_signals() as signals:
        ended = _conduct(directory, home, conducting, signals, began_ns, arguments.settings)
    _report(directory, ended, arguments.json)
    return SEARCH_EXIT_CODES[ended.state]


def _plan(arguments: argparse.Namespace) -> BatchPlan:
    """Return the checked plan. Raises UserError."""
    if (script := script_preset.path_of(arguments.preset)) is not None:
        return plan_script_batch(script_preset.load(script), arguments.settings, arguments.python)
    spec = resolve(arguments.preset, arguments.settings)
    batch_plan = plan_spec_batch(spec, arguments.python)
    _note_variants(arguments.preset, spec)
    return batch_plan


def _note_variants(preset: str, spec: RunSpec) -> None:
    """Print that the variants are not searched, if the preset has any and none was named."""
    variants = presets.load(preset)[0].variants if spec.variant is None else ()
    if variants:
        example = f"{preset}/{variants[0].id}"
        print_notice(
            f"{spec.preset} itself is searched, not its {counted(len(variants), 'variant')};"
            f" name one, such as {example}"
        )


def _conduct(
    directory: Path,
    home: Home,
    conducting: Callable[[SearchCaller[BatchLine]], BatchEnded],
    signals: Signals,
    began_ns: int,
    settings: list[str],
) -> BatchEnded:
    """Conduct the search and print each line of its journal on stderr."""
    progress = Progress()
    for setting in settings:
        if setting.partition("=")[0] in SET_BY_A_BATCH_SEARCH:
            progress.print_line(f"{setting} is not used: a search sets it itself")
    sizes = ", ".join(str(line.batch_size) for line in read_batch_journal(directory) if isinstance(line, Probe))
    trial_words = f"which has tried {sizes}" if sizes else ""
    print_earlier_search(progress, home, directory, trial_words)
    return BatchPrinter(progress, home).watch(conducting, signals, began_ns)


def _report(directory: Path, ended: BatchEnded, as_json: bool) -> None:
    if as_json:
        print_json(batch_report(directory))
    else:
        print_lines(batch_answer_lines(BatchFollower(directory).poll(), ended))

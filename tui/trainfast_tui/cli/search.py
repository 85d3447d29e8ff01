"""`search max-batch` and `search best`: the largest batch that fits, and the fastest settings that fit."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.hosts import parse_hosts
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import state_text
from trainfast_runner.search import batch_conductor, batch_journal, best_journal
from trainfast_runner.search.best.answer import BestSoFar, best_report
from trainfast_runner.search.best.conductor import BestConductor
from trainfast_runner.search.best.question import BestPlan, open_best, plan_preset_best, plan_script_best
from trainfast_runner.search.conductor import SearchCaller, conduct
from trainfast_runner.search.journal import Line, Paused, Resumed, fields_of
from trainfast_runner.search.searches import SearchOptions
from trainfast_runner.settings import presets, script_preset
from trainfast_runner.settings.knobs import read_vary
from trainfast_runner.settings.spec import SET_BY_A_BATCH_SEARCH, resolve
from trainfast_runner.units import counted
from trainfast_tui.cli.arguments import add_python, add_repeated, add_settings, add_wait, positive, whole
from trainfast_tui.cli.exit_codes import SEARCH_EXIT_CODES
from trainfast_tui.cli.launching import await_devices, refuse_script_on_hosts
from trainfast_tui.cli.printing import print_json, print_lines, print_notice, refuse_unwritable, write_output
from trainfast_tui.cli.progress import Progress, progress_when_slow
from trainfast_tui.cli.signals import Signals, caught_signals
from trainfast_tui.text import best_words
from trainfast_tui.text import format as fmt
from trainfast_tui.text.batch_words import batch_answer_lines
from trainfast_tui.text.memory_words import phase_words
from trainfast_tui.text.search_words import outcome_of, state_words


def _add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the preset and the options of every search."""
    parser.add_argument("preset", metavar="PRESET", help="a name, NAME/VARIANT, or a path ending in .toml")
    add_settings(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="ignore earlier searches: continue none, reuse none of their measurements"
    )
    parser.add_argument("--hosts", metavar="FILE|A,B", help="every run on these machines, a node each, as with run")
    add_wait(parser)
    add_python(parser)
    parser.add_argument("--json", action="store_true", help="print the answer as one JSON object, the last line")


def search_max_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    _add_search_arguments(parser)
    parser.add_argument(
        "--no-oom", action="store_true", help="never run out of memory on purpose: stop where the fit says no more fits"
    )
    parser.add_argument(
        "--proof-steps",
        type=partial(whole, minimum=2),
        default=10,
        metavar="N",
        help="steps of the confirmation run (10)",
    )
    parser.epilog = "Ctrl-C cancels; the same command then continues. The search itself sets batch_size and steps."


def search_best_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    _add_search_arguments(parser)
    words = f"vary this knob; may be given again. Without it: {best_words.EVERY_KNOB}"
    add_repeated(parser, "--vary", "KNOB=A,B,C", words)
    parser.add_argument(
        "--global-batch", type=positive, metavar="N", help="samples of one optimizer step (the preset's)"
    )
    parser.add_argument(
        "--objective",
        default="samples_per_s",
        metavar="NAME",
        help="samples_per_s (the default), samples_per_joule, or time with --for-steps",
    )
    parser.add_argument(
        "--for-steps",
        type=positive,
        metavar="N",
        help="optimizer steps of the training that --objective time minimises",
    )
    parser.add_argument("--budget", default="10m", metavar="T", help="time for finding the leader: 90s, 10m, 1h (10m)")
    parser.add_argument("--dry-run", action="store_true", help="print the number of settings and the longest time")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the answer and the whole journal to FILE")
    parser.epilog = "Ctrl-C cancels and prints the best so far; the same command then continues."


def search_max_batch(arguments: argparse.Namespace) -> int:
    """Search and print the answer."""
    began_ns, home = time.monotonic_ns(), Home().create()
    options = SearchOptions(
        no_oom=arguments.no_oom, confirmation_steps=arguments.proof_steps, fresh=arguments.fresh, wait=arguments.wait
    )
    with progress_when_slow("checking…"):
        plan = _batch_plan(arguments)
    for setting in arguments.settings:
        if setting.partition("=")[0] in SET_BY_A_BATCH_SEARCH:
            print_notice(f"{setting} is not used: a search sets it itself")
    began_ns += await_devices(plan.plan, home) if arguments.wait else 0
    directory = batch_conductor.open_batch(plan, home, options)
    search = batch_journal.BatchSnapshot.read(directory)
    if sizes := ", ".join(str(probe.batch_size) for probe in search.probes):
        _print_continued(directory, f"which has tried {sizes}")
    with caught_signals() as signals:
        ended = SearchPrinter(search).watch(
            partial(conduct, batch_conductor.BatchConductor, directory, plan, home, options), signals, began_ns
        )
    if arguments.json:
        print_json(batch_journal.batch_report(directory))
    else:
        print_lines(batch_answer_lines(batch_journal.BatchSnapshot.read(directory), ended))
    return SEARCH_EXIT_CODES[ended.state]


def search_best(arguments: argparse.Namespace) -> int:
    """Search and print the answer."""
    began_ns, home = time.monotonic_ns(), Home().create()
    options = SearchOptions(fresh=arguments.fresh, wait=arguments.wait)
    request = _best_request(arguments)
    if arguments.record is not None:
        refuse_unwritable(arguments.record, "--record")
    with progress_when_slow("checking…"):
        plan = _best_plan(arguments, request)
    if arguments.dry_run:
        _print_estimate(plan, arguments.json)
        return 0
    began_ns += await_devices(plan.plan, home) if arguments.wait else 0
    directory = open_best(plan, home, options)
    so_far = BestSoFar.read(directory)
    for words in best_words.busy_lines(plan.plan.device):
        print_notice(words)
    if so_far.attempts:
        _print_continued(directory, f"with {counted(len(so_far.attempts), 'measurement')}")
    question = plan.question
    for words in best_words.question_lines(question.vary, question.left_alone, question.global_batch):
        print_notice(words)
    with caught_signals() as signals:
        ended = SearchPrinter(so_far).watch(
            partial(conduct, BestConductor, directory, plan, home, options), signals, began_ns
        )
    _report_best(directory, arguments.json, arguments.record)
    return SEARCH_EXIT_CODES[ended.state]


def _print_continued(directory: Path, trial_words: str) -> None:
    """Print that a search continues, with its trials so far."""
    print_notice(f"continuing {directory.name}, {trial_words}; --fresh starts over")


def _batch_plan(arguments: argparse.Namespace) -> batch_conductor.BatchPlan:
    """Return the checked plan, with a notice if the preset's variants are not searched. Raises UserError."""
    if (script := script_preset.path_of(arguments.preset)) is not None:
        refuse_script_on_hosts(hosts=arguments.hosts)
        return batch_conductor.plan_script_batch(script_preset.load(script), arguments.settings, arguments.python)
    spec = resolve(arguments.preset, arguments.settings)
    batch_plan = batch_conductor.plan_spec_batch(spec, arguments.python, parse_hosts(arguments.hosts))
    if spec.variant is None and (variants := presets.load(arguments.preset)[0].variants):
        print_notice(
            f"{spec.preset} itself is searched, not its {counted(len(variants), 'variant')};"
            f" name one, such as {arguments.preset}/{variants[0].id}"
        )
    return batch_plan


def _best_request(arguments: argparse.Namespace) -> best_journal.BestRequest:
    """Return the question of the command line. Raises UserError."""
    try:
        budget_s = best_journal.read_budget(arguments.budget)
    except UserError as error:
        raise error.at("--budget") from None
    return best_journal.BestRequest(
        vary=read_vary(arguments.vary),
        global_batch=arguments.global_batch,
        objective=arguments.objective,
        for_steps=arguments.for_steps,
        budget_s=budget_s,
    )


def _best_plan(arguments: argparse.Namespace, request: best_journal.BestRequest) -> BestPlan:
    """Return the checked question about a preset, or about the script of one. Raises UserError."""
    if (script := script_preset.path_of(arguments.preset)) is not None:
        refuse_script_on_hosts(hosts=arguments.hosts)
        return plan_script_best(script_preset.load(script), arguments.settings, request, arguments.python)
    spec = resolve(arguments.preset, arguments.settings)
    return plan_preset_best(spec, request, arguments.python, parse_hosts(arguments.hosts))


def _report_best(directory: Path, as_json: bool, record: Path | None) -> None:
    so_far = BestSoFar.read(directory)
    report = best_report(directory) if as_json or record is not None else {}
    if as_json:
        print_json(report)
    else:
        print_lines(best_words.answer_lines(so_far, directory.name))
    if record is not None:
        write_output(record, msgspec.json.encode({**report, "journal": so_far.lines}).decode(), "--record")


def _print_estimate(plan: BestPlan, as_json: bool) -> None:
    """Print the number of candidates and the longest time of a search."""
    question, space = plan.question, plan.space
    if as_json:
        counts = {"candidates": len(space.candidates), "legal": plan.legal_count, "dropped": space.dropped}
        print_json(
            {**fields_of(question, "vary", "left_alone", "global_batch"), **counts, "seconds": question.budget_s}
        )
    else:
        print_lines(best_words.question_lines(question.vary, question.left_alone, question.global_batch))
        print_lines(best_words.estimate_lines(plan))


TICK_S = 2.0
"""Seconds between two lines about the step of a search that goes on."""
EndT = TypeVar("EndT")


class SearchPrinter:
    """Prints the new lines of a search of either kind, whose journal so far is `search`."""

    def __init__(self, search: batch_journal.BatchSnapshot | BestSoFar) -> None:
        self._progress, self._search = Progress(), search
        self._work = "starting"
        """The work under way, in words."""
        self._work_began_s = self._printed_at_s = time.monotonic()

    def watch(self, work: Callable[[SearchCaller], EndT], signals: Signals, began_ns: int) -> EndT:
        """Conduct a search and print each line of its journal; cancel it on Ctrl-C or when the terminal is closed.

        The search's time counts from `began_ns` (CLOCK_MONOTONIC).
        """

        def is_cancelled() -> bool:
            # Called repeatedly during every wait.
            self.tick()
            return bool(signals.interrupts or signals.must_leave)

        with closing(self._progress):
            return work(SearchCaller(self.print_line, is_cancelled, began_ns))

    def print_line(self, line: Line) -> None:
        """Print a line of the journal, and show the work under way from now on."""
        self._search = search = self._search.after([line], has_conductor=True)
        if words := line_words(line, search):
            self._progress.print_line(words)
        if (work := state_words(search)) != self._work:
            self._work, self._work_began_s = work, time.monotonic()
            self._printed_at_s = self._work_began_s

    def tick(self) -> None:
        """Show the time of the work under way, and what a best-fit search has found, once in two seconds."""
        now_s = time.monotonic()
        if self._search.state == "paused" or now_s - self._printed_at_s < TICK_S:
            return
        self._printed_at_s = now_s
        parts = [f"{self._work}… {fmt.duration(int(now_s - self._work_began_s))}"]
        if isinstance(self._search, BestSoFar):
            best = best_words.best_words(self._search)
            parts += [f"best so far {best}" if best else "", best_words.chance_words(self._search)]
        self._progress.show_activity("; ".join(part for part in parts if part))


def line_words(line: Line, search: batch_journal.BatchSnapshot | BestSoFar) -> str:
    """Return the last line of a search in words; empty if nothing is printed."""
    match line:
        case Paused():
            return "paused"
        case Resumed():
            return "resumed"
        case batch_journal.Predicted():
            found = f"up to {line.max_batch:,}" if line.max_batch else "not even 1 fits"
            return line.reason if line.max_batch is None else f"predicted: {found} ({line.basis})"
        case batch_journal.BatchStep() if line.action != "end":
            verb = "confirm" if line.action == batch_journal.CONFIRM_STEP else line.action
            return f"{verb} {fmt.count(line.batch_size)}: {line.why}"
        case batch_journal.Probe(outcome="fits"):
            rate = fmt.per_second(line.samples_per_s, "samples")
            peak = fmt.size(line.peak_allocated_bytes)
            return f"  {line.batch_size:,} fits: peak {peak}, {fmt.milliseconds(line.step_ms)} a step, {rate}"
        case batch_journal.Probe():
            phase = f" in {phase_words(line.phase)}" if line.phase else ""
            return f"  {line.batch_size:,} {outcome_of(line.outcome).verb}{phase}: {fmt.with_sizes(line.reason)}"
        case batch_journal.ConfirmationRun():
            sizes = " and ".join(f"{batch:,}" for batch in line.refutes)
            refuted_words = f", which refutes that {sizes} fitted" if sizes else ""
            ended = f"{state_text(line.state)} in a fresh process, {fmt.duration(line.seconds)}"
            return f"  {line.batch_size:,} {ended}{refuted_words}: {line.run_id}"
        case best_journal.Space():
            excluded_as = Counter(candidate.excluded_as for candidate in line.candidates)
            words = [counted(len(line.candidates), "setting")]
            words += [f"{count:,} {name.replace('_', ' ')}" for name, count in excluded_as.items() if name is not None]
            dropped = f"; another global batch: {counted(line.dropped, 'combination')}" if line.dropped else ""
            return ", ".join(words) + dropped
        case best_journal.ProcessReady():
            return f"  process {line.run_id} ready after {fmt.duration(line.start_s)}"
        case best_journal.BestStep() if isinstance(search, BestSoFar) and line.candidate_number is not None:
            knob = f" {line.knob} of" if line.knob else ""
            is_first = search.space is None
            tried = "the baseline" if is_first else best_words.candidate_text(search, line.candidate_number)
            return f"{best_words.role_of(line.action).noun}{knob} {tried}: {line.why}"
        case best_journal.Trial() | best_journal.ColdRun() if isinstance(search, BestSoFar):
            run = f": {line.run_id}" if isinstance(line, best_journal.ColdRun) else ""
            return f"  {_attempt_words(line, search)}{run}"
    return ""


def _attempt_words(line: best_journal.Trial | best_journal.ColdRun, so_far: BestSoFar) -> str:
    """Return the outcome of the newest trial or run in words."""
    value = so_far.values.get(len(so_far.attempts) - 1)
    peak = f"peak {fmt.size(line.peak_allocated_bytes)}"
    if isinstance(line, best_journal.ColdRun) and (line.role, line.outcome) == (best_journal.UNDER_LIMIT, "measured"):
        return f"fits, {peak}"
    if line.outcome != "measured" or value is None:
        words = outcome_of(line.outcome).verb
        return f"{words}: {fmt.with_sizes(line.reason)}" if line.reason else words
    words = best_words.objective_words(so_far.objective, so_far.for_steps, value)
    steps = f", {len(line.step_ms)} steps" if isinstance(line, best_journal.Trial) else ""
    doubt = f" ({line.reason})" if line.reason else ""
    return f"{words}, {peak}{steps}, {fmt.duration(line.seconds)}{doubt}"

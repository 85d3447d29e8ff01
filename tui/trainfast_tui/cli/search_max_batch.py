"""`search max-batch`: the largest batch that fits, found by probes and confirmed in a fresh process."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trainfast_runner.records.home import Home
from trainfast_runner.running import planning
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search import journal
from trainfast_runner.search.conduct import MakeConductor, conduct
from trainfast_runner.search.journal import AnyLine, Ended, Launched, Next, Probe, read_journal
from trainfast_runner.search.opening import BatchSearchOptions, check_plan, open_search
from trainfast_runner.search.report import report
from trainfast_runner.search.searches import SET_BY_A_BATCH_SEARCH, left_by_edit
from trainfast_runner.settings import presets, script_preset
from trainfast_runner.settings.spec import RunSpec, resolve
from trainfast_tui.cli.exit_codes import SEARCH_EXIT_CODES
from trainfast_tui.cli.follow_run import Signals, caught
from trainfast_tui.cli.journal_printer import JournalPrinter
from trainfast_tui.cli.number_types import positive
from trainfast_tui.cli.output import print_json, print_lines
from trainfast_tui.cli.progress import Progress, progress_when_slow
from trainfast_tui.cli.search_arguments import add_search_arguments
from trainfast_tui.cli.waits import await_devices
from trainfast_tui.text.format import duration, milliseconds, per_second, plain, size
from trainfast_tui.text.memory import PHASES
from trainfast_tui.text.tables import pairs


def add(parser: argparse.ArgumentParser) -> None:
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


def run(arguments: argparse.Namespace) -> int:
    """Search and print the answer."""
    began_ns = time.monotonic_ns()
    home = Home().create()
    options = BatchSearchOptions(
        no_oom=arguments.no_oom,
        proof_steps=arguments.proof_steps,
        fresh=arguments.fresh,
        wait=arguments.wait,
        cool_to_c=arguments.cool_to,
    )
    with progress_when_slow("checking…"):
        plan, make_conductor = _planned(arguments, options)
    if arguments.wait:
        asked_ns = time.monotonic_ns()
        await_devices(plan, home)
        began_ns += time.monotonic_ns() - asked_ns
    directory = open_search(plan, home, options)
    conducting = partial(conduct, directory, plan, home, options, began_ns=began_ns, make_conductor=make_conductor)
    with caught() as signals:
        ended = _conducted(directory, home, conducting, signals, arguments.settings)
    _report(directory, ended, arguments.json)
    return SEARCH_EXIT_CODES[ended.state]


def _planned(arguments: argparse.Namespace, options: BatchSearchOptions) -> tuple[RunPlan, MakeConductor | None]:
    """Return the plan, checked, and of a script's preset the conductor of its trials. Raises UserError."""
    if (script := script_preset.path_of(arguments.preset)) is not None:
        from trainfast_runner.search.script_trials import planned_search

        return planned_search(script_preset.load(script), arguments.settings, arguments.python, options)
    spec = resolve(arguments.preset, arguments.settings)
    plan = planning.plan_run(spec, arguments.python)
    check_plan(plan, options)
    _note_variants(arguments.preset, spec)
    return plan, None


def _note_variants(preset: str, spec: RunSpec) -> None:
    """Print that the variants are not searched, if the preset has any and none was named."""
    variants = presets.load(preset)[0].variants if spec.variant is None else ()
    if variants:
        one = plain(f"{preset}/{variants[0].id}")
        Progress().print_line(
            f"{plain(spec.preset)} itself is searched, not its {len(variants)} variants; name one, such as {one}"
        )


def _conducted(
    directory: Path, home: Home, conducting: Callable[..., Ended], signals: Signals, settings: list[str]
) -> Ended:
    """Conduct the search and print each line of its journal on stderr."""
    progress = Progress()
    for setting in settings:
        if setting.partition("=")[0] in SET_BY_A_BATCH_SEARCH:
            progress.print_line(f"{plain(setting)} is not used: a search sets it itself")
    tried = [line for line in read_journal(directory) if isinstance(line, Probe)]
    if tried:
        sizes = ", ".join(str(line.batch_size) for line in tried)
        progress.print_line(f"continuing {directory.name}, which has tried {sizes}; --fresh begins anew")
    elif (edited := left_by_edit(home, directory)) is not None:
        progress.print_line(f"a file of the command was edited since {edited.name}: a new search begins")
    printer = BatchPrinter(progress, home)
    return printer.watch(conducting, signals)


class BatchPrinter(JournalPrinter[AnyLine]):
    """Prints the journal of a batch search."""

    def doing(self, line: AnyLine) -> str | None:
        """Return the size that is tried or confirmed from this line on."""
        if not isinstance(line, Next):
            return None
        return {"prove": f"confirming {line.batch_size}", "end": ""}.get(line.action, f"trying {line.batch_size}")

    def run_of(self, line: AnyLine) -> tuple[str, bool] | None:
        """Return a started run; the steps of a confirmation run are counted."""
        return (line.run_id, line.role == "proof") if isinstance(line, Launched) else None

    def words(self, line: AnyLine) -> str:
        """Return a line in words."""
        match line:
            case journal.Predicted(max_batch=None):
                return line.reason
            case journal.Predicted(max_batch=0):
                return f"predicted: not even 1 fits ({line.basis})"
            case journal.Predicted():
                return f"predicted: up to {line.max_batch} ({line.basis})"
            case journal.Next(action="end"):
                return ""
            case journal.Next():
                return f"{'confirm' if line.action == 'prove' else line.action} {line.batch_size}: {line.why}"
            case journal.Probe(outcome="fits"):
                rate = per_second(line.samples_per_s, "samples")
                peak = size(line.peak_allocated_bytes)
                return f"  {line.batch_size} fits: peak {peak}, {milliseconds(line.step_ms)} a step, {rate}"
            case journal.Probe():
                what = "ran out of memory" if line.outcome == "oom" else "is void"
                where = f" in {line.phase}" if line.phase else ""
                return f"  {line.batch_size} {what}{where}: {line.reason}"
            case journal.ConfirmationRun():
                but = f", which refutes that {_sizes(line.refutes)} fitted" if line.refutes else ""
                return (
                    f"  {line.batch_size} {line.state} in a fresh process, {duration(line.seconds)}{but}: {line.run_id}"
                )
        return ""


def _report(directory: Path, ended: Ended, as_json: bool) -> None:
    found = report(directory)
    if as_json:
        print_json(found)
        return
    if ended.answer is None:
        print_lines(without_answer(directory, ended))
        return
    print_lines(pairs(_rows(found)))


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    on = f" on rank {found['tightest_rank']}, the tightest" if found["world_size"] > 1 else ""
    model = found["model"]
    phase = PHASES.get(model["phase"], "a step")
    fastest = found["fastest"]
    rate = "" if found["samples_per_s"] is None else f" at {per_second(found['samples_per_s'], 'samples')}"
    if rate and found["measured_under"]:
        rate += f" (under {found['measured_under']})"
    rows = [
        ("largest batch", f"{found['max_batch']}, confirmed by {found['proof_run_id']}{rate}; {found['certainty']}"),
        ("leaves free", f"{size(found['headroom_bytes'])} of {size(found['limit_bytes'])} ({found['limit']}){on}"),
        ("aligned", str(found["aligned_batch"]) if found["aligned_batch"] else "none below 8"),
        ("recommended", f"{found['recommended_batch']}: {found['recommended_reason']}"),
        ("memory", f"{size(model['fixed_bytes'])} and {size(model['bytes_per_sample'])} a sample in {phase}"),
    ]
    if fastest is not None:
        rows.append(("fastest tried", f"{fastest['batch_size']}, {per_second(fastest['samples_per_s'], 'samples')}"))
    tried = [probe for probe in found["probes"] if probe["outcome"] != "void"]
    out = sum(probe["outcome"] == "oom" for probe in tried)
    refuted = [probe["batch_size"] for probe in tried if probe["refuted_by"]]
    if refuted:
        rows.append(("refuted", f"{_sizes(refuted)}: fitted in a probe, ran out of memory in a confirmation run"))
    confirmations = sum(confirmation["state"] == "oom" for confirmation in found["proofs"])
    more = f", and {_times(confirmations)} in a confirmation run" if confirmations else ""
    rows.append(("took", f"{duration(found['seconds'])}, {len(tried)} sizes tried, memory ran out {_times(out)}{more}"))
    return rows


def _sizes(sizes: list[int]) -> str:
    return " and ".join(map(str, sizes))


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def without_answer(directory: Path, ended: Ended) -> list[str]:
    """Return the end of a search that found no batch size, with the changes as they are typed."""
    if ended.state == "cancelled":
        return [f"cancelled; the same command continues {directory.name}"]
    lines = [ended.reason]
    if ended.missing_bytes is not None:
        lines = [f"{ended.reason}: at least {size(ended.missing_bytes)} are missing"]
    if ended.changes and all(change.missing_bytes for change in ended.changes):
        lines.append("no change of knobs is enough by the prediction; the closest:")
    for change in ended.changes:
        settings = " ".join(f"--set {knob}={value}" for knob, value in change.settings.items())
        doubt = ", not known to be enough" if change.predicted_bytes is None else ""
        costs = f"; speed: {change.costs}" if change.costs else ""
        lines.append(f"  {settings}: {change.saves}{doubt}{costs}")
    return [plain(line) for line in lines]

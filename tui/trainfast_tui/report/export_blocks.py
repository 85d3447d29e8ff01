"""The settings of runs as blocks of a report, in every form of `export` that takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainfast_runner.errors import UserError
from trainfast_runner.export.formats import FORMS, export_run
from trainfast_tui.report.blocks import Block, Code, Heading, Prose
from trainfast_tui.report.reported_run import ReportedRun


def export_blocks(runs: Sequence[ReportedRun]) -> list[Block]:
    """Return each run's settings in every form, and for a form that refuses the run its reason."""
    return [Heading("Settings to use elsewhere"), *(block for run in runs for block in _exports(run))]


def _exports(run: ReportedRun) -> Iterator[Block]:
    if run.run_file is None:
        yield Prose(f"{run.result.run_id} has no readable run.json, so there are no settings to export.")
        return
    yield Heading(f"Run {run.label}: {run.result.run_id}", 3)
    refusals = []
    for form in FORMS:
        try:
            exported = export_run(run.run_file, run.directory, form)
        except UserError as error:
            refusals.append(f"Not as {form}: {error.message}.")
            continue
        left_out = f" (cannot be expressed: {', '.join(exported.left_out)})" if exported.left_out else ""
        yield Code(f"{form}{left_out}", exported.text)
    yield from map(Prose, refusals)

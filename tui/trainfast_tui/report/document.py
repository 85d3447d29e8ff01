"""The document of a report: of runs, or of one search with the runs that confirmed its answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase

from trainfast_runner.errors import UserError
from trainfast_runner.memory.oom import with_newer_explanation
from trainfast_runner.records.home import Home, is_conducted, search_directories
from trainfast_runner.running.settling import final_result
from trainfast_runner.search.batch_journal import BatchFollower
from trainfast_runner.search.best.answer import BestSoFar
from trainfast_runner.search.best_journal import read_best_journal
from trainfast_tui.report.blocks import Document, Prose
from trainfast_tui.report.run_blocks import ReportedRun, read_run, runs_report
from trainfast_tui.report.search_blocks import batch_search_report, best_search_report, confirming_run_ids


def report_document(home: Home, references: Sequence[str]) -> tuple[Document, list[str]]:
    """Return the report of these runs, or of the one search, and the ids of the runs in it. Raises UserError."""
    searches = {directory.name: directory for directory in search_directories(home)}
    ids = list(dict.fromkeys(home.find(reference, list(searches)) for reference in references))
    search_ids = [listed_id for listed_id in ids if listed_id in searches]
    if search_ids and len(ids) > 1:
        raise UserError(
            "a report covers several runs or exactly one search", key=search_ids[0], advice=f"{search_ids[0]} alone"
        )
    if search_ids:
        return _search_document(home, searches[search_ids[0]])
    runs = _read_runs(home, ids)
    names = " and ".join(dict.fromkeys(run.result.name for run in runs))
    title = f"{names}: {ids[0]}" if len(runs) == 1 else f"{names}: {len(runs)} runs"
    return Document(title, tuple(runs_report(runs))), ids


def _search_document(home: Home, directory: Path) -> tuple[Document, list[str]]:
    """Return the report of a search of either kind, with the runs that confirmed its answer."""
    best, batch = BestSoFar(tuple(read_best_journal(directory))), BatchFollower(directory).poll()
    confirmed = confirming_run_ids(batch.answer if best.question is None else best.answer)
    run_ids = [run_id for run_id in confirmed if home.directory(run_id).is_dir()]
    runs = _read_runs(home, run_ids)
    if best.question is not None:
        kind, blocks = "Best-fit search", best_search_report(best, best.question, runs)
    elif batch.question is not None:
        kind, blocks = "Batch search", batch_search_report(batch, batch.question, runs)
    else:
        raise UserError(f"the journal of {directory.name} has no readable question", key=directory.name)
    if is_conducted(directory):
        blocks.insert(0, Prose("The search is still running: this is its journal so far."))
    return Document(f"{kind} {directory.name}", tuple(blocks)), run_ids


def _read_runs(home: Home, run_ids: Sequence[str]) -> list[ReportedRun]:
    """Return the runs with all their records, labelled A, B, C and so on; raises UserError if one is running."""
    runs = []
    for run_id, label in zip(run_ids, _labels(len(run_ids)), strict=True):
        directory = home.directory(run_id)
        result = with_newer_explanation(directory, final_result(home, run_id, "the report"))
        runs.append(read_run(label, directory, result))
    return runs


def _labels(count: int) -> list[str]:
    """Return A, B, C and so on, as in `runs compare`; numbers when there are more runs than letters."""
    return list(ascii_uppercase[:count]) if count <= len(ascii_uppercase) else [str(n) for n in range(1, count + 1)]

"""`export --prove`: one run of the export, and the proof line that its records give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from trainfast_runner.errors import UserError
from trainfast_runner.export.formats import Exported
from trainfast_runner.export.proving import proof_of
from trainfast_runner.records.export_proof import append_proof
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import read_result
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_states import exit_code_of, state_text
from trainfast_runner.running.exported_run import plan_exported
from trainfast_tui.cli.exit_codes import EXIT_HUNG_UP
from trainfast_tui.cli.launching.follow_run import follow
from trainfast_tui.cli.launching.start_run import run_started_when_free
from trainfast_tui.cli.printing.output import print_notice
from trainfast_tui.cli.printing.progress import progress_when_slow
from trainfast_tui.text.format import plain, with_sizes


def prove(run_file: RunFile, directory: Path, exported: Exported, command: Sequence[str], *, wait: bool) -> int:
    """Run the export, follow it to its end, and keep the proof; 0, or 129 if the terminal went away.

    With `wait` the run is started once no other run uses the devices. Raises UserError for a device in use, and, with
    the run's exit code, for a run that does not finish or that ran other settings.
    """
    with TemporaryDirectory(prefix="trainfast-export-") as folder:
        for name, text in exported.files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        with progress_when_slow("checking…"):
            plan = plan_exported(run_file, exported, command, Path(folder))
        with run_started_when_free(plan, Home(), wait=wait) as (started, signals):
            print_notice(f"{started.name} runs the export")
            result = follow(started, signals, interrupt_stops=True)
    if result is None:
        return EXIT_HUNG_UP
    if result.state != "finished":
        raise UserError(
            plain(f"{result.run_id} did not finish: {with_sizes(result.reason) or state_text(result.state)}"),
            key="--prove",
            advice=f"trainfast-tui logs {result.run_id}",
            exit_code=exit_code_of(result.state),
        )
    proof = proof_of(run_file, read_result(directory), exported, started, result)
    append_proof(directory, proof)
    print_notice(plain(proof.line()))
    return 0

"""Files about runs and searches that a person asks for: settings in the form of another tool, and reports."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainfast_runner.errors import UserError
from trainfast_runner.records.run_directory import read_run_file
from trainfast_tui.control.messages import Notified, Post
from trainfast_tui.control.threads import start_thread

if TYPE_CHECKING:
    from trainfast_runner.records.home import Home

FORMS = (
    ("training-args", "a block for your own Trainer script"),
    ("accelerate", "a configuration file of accelerate"),
    ("deepspeed", "a configuration file of DeepSpeed, for its zero strategies"),
    ("torchrun", "the command that starts a script with torchrun"),
    ("command", "the command that runs the same here"),
    ("preset", "a preset with every setting"),
)
"""The forms of an export, each with its description."""


def start_export(directory: Path, form: str, cwd: str, post: Post) -> None:
    """Write the settings of a run into files in `cwd`; posts a notice that names them."""
    start_thread("export", partial(_export, directory, form, Path(cwd)), post)


def start_report(home: Home, references: Sequence[str], cwd: str, post: Post) -> None:
    """Write an HTML report of these runs, or of one search, into `cwd`; posts a notice that names it."""
    start_thread("report", partial(_report, home, tuple(references), Path(cwd)), post)


def _export(directory: Path, form: str, folder: Path) -> Notified:
    from trainfast_runner.export.formats import export_run

    run_file = read_run_file(directory)
    if run_file is None:
        raise UserError(f"{directory.name} has no readable run.json", key=form)
    files = export_run(run_file, directory, form).files
    paths = [_free(folder / name) for name in files]
    for path, text in zip(paths, files.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return Notified(f"Exported to {', '.join(map(str, paths))}")


def _report(home: Home, references: Sequence[str], folder: Path) -> Notified:
    from trainfast_tui.report.document import as_html, report_document

    path = _free(folder / f"report-{references[-1]}.html")
    path.write_text(as_html(report_document(home, references)[0]), encoding="utf-8")
    return Notified(f"Reported in {path}")


def _free(path: Path) -> Path:
    """Return the path, with a number where a file of that name exists already."""
    names = (path.with_stem(f"{path.stem}-{number}") for number in range(2, 1000))
    return path if not path.exists() else next(name for name in names if not name.exists())

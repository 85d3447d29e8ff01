"""`report` of runs of the user's own scripts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cli.command import Cli
from cli.history import result, write
from trainfast_runner.records.run_file import ClockAnchor, RunFile
from trainfast_runner.records.script_run import Overridden, ScriptAsked, ScriptFigures


def ran_script(cli: Cli, run_id: str, folder: str, *overridden: Overridden) -> None:
    """A run of `train.py` in this folder."""
    command = ["python", "train.py"]
    figures = ScriptFigures(command=command, cwd=folder, overridden=list(overridden))
    write(cli.home, result(run_id, preset="train.py", knobs={}, script=figures))
    asked = ScriptAsked(command=command, argv=command)
    clock = ClockAnchor(monotonic_ns=0, wall_ns=0)
    run = RunFile(run_id=run_id, preset="train.py", model={}, data={}, knobs={}, script=asked, cwd=folder, clock=clock)
    (cli.home / "runs" / run_id / "run.json").write_bytes(msgspec.json.encode(run))


def reported(cli: Cli, tmp_path: Path, *references: str) -> str:
    """The report of these runs as Markdown."""
    done = cli("report", *references, "-o", str(tmp_path / "report.md"))
    assert done.code == 0, done.err
    return (tmp_path / "report.md").read_text()


def test_overridden_knobs_stand_beside_what_was_asked(cli: Cli, tmp_path: Path) -> None:
    knobs = [Overridden(knob="lr", asked=0.5, ran=0.1, by="torch"), Overridden(knob="seed", asked=3, ran=None, by="x")]
    ran_script(cli, "20261101-100000-train-py-aaaa", "/a", *knobs)
    markdown = reported(cli, tmp_path, "last")
    assert "| A | lr | 0.5 | 0.1 (by torch) |" in markdown
    assert "| A | seed | 3 | unknown |" in markdown
    assert "is the one that was asked for" not in markdown


def test_scripts_of_one_name_in_two_folders_share_no_picture(cli: Cli, tmp_path: Path) -> None:
    ran_script(cli, "20261101-100000-train-py-aaaa", "/a")
    ran_script(cli, "20261102-100000-train-py-bbbb", "/b")
    ran_script(cli, "20261103-100000-train-py-cccc", "/a")
    apart = reported(cli, tmp_path, "20261101", "20261102")
    assert "Memory against throughput" not in apart
    assert "| not comparable: different scripts |" in apart
    assert "Memory against throughput" in reported(cli, tmp_path, "20261101", "20261103")

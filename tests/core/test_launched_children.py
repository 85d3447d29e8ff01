"""Children that the app starts and does not wait for are collected, and leave no processes behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cli.command import COMMAND, PATIENCE_S, until
from trainfast_runner.errors import UserError
from trainfast_runner.machine import worker_programs
from trainfast_runner.machine.processes import boot_id, identify
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import newest, read_all
from trainfast_runner.records.run_file import ClockAnchor, RunFile
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.search_directories import search_directories
from trainfast_runner.running.launch import _spawn_supervisor
from trainfast_runner.search import control
from trainfast_runner.search.control import CONDUCTOR_MODULE, SearchRequest, start_search
from trainfast_runner.search.journal.batch import BatchEnded, read_batch_journal
from trainfast_runner.search.journal.lines import newest_conducted
from trainfast_runner.settings.spec import resolve


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


def test_a_supervisor_that_ended_is_collected(tmp_path: Path) -> None:
    run = RunFile(
        run_id=tmp_path.name,
        preset="none",
        argv=["true"],
        boot_id=boot_id(),
        clock=ClockAnchor(monotonic_ns=time.monotonic_ns(), wall_ns=time.time_ns()),
    )
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(run))
    _spawn_supervisor(tmp_path)
    pid = read_all(tmp_path / "events.jsonl", Event)[0][0].pid
    assert pid in children()
    until(lambda: pid not in children(), "the supervisor to end and be collected")
    assert (tmp_path / "result.json").exists()


def test_a_conductor_that_ended_is_collected(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(UserError, match="no Python at /nowhere"):
        start_search(resolve("tiny-llama", []), Home(tmp_path), "/nowhere")
    until(lambda: children() <= before, "the conductor to be collected")


@pytest.mark.parametrize("title_length", [1, 1 << 18])
def test_a_conductor_that_ends_without_an_answer_is_an_error_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, title_length: int
) -> None:
    monkeypatch.setattr(control, "CONDUCTOR_MODULE", "trainfast_runner.no_such_module")
    reason = r"ended before it answered: .*No module named trainfast_runner\.no_such_module"
    with pytest.raises(UserError, match=reason):
        start_search(replace(resolve("tiny-llama", []), title="x" * title_length), Home(tmp_path))


def test_a_conductor_whose_starter_has_gone_goes_on(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("TRAINFAST_HOME", str(tmp_path))
    home, spec = Home(tmp_path), resolve("tiny-llama", ["data.kind=random", "memory_limit=1GiB"])
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.Popen([sys.executable, "-P", "-m", CONDUCTOR_MODULE], stdin=subprocess.PIPE, stdout=writing)
    os.close(writing)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(SearchRequest(home=str(tmp_path), **spec.record_fields())))
    process.stdin.close()
    (directory,) = until(lambda: search_directories(home), "the search to begin")
    until(lambda: newest_conducted(directory), "its conductor")
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    ended = newest(read_batch_journal(directory), BatchEnded)
    assert ended is not None
    assert ended.state == "cancelled"


def test_forks_of_a_script_that_ended_by_itself_are_ended(tmp_path: Path) -> None:
    """They also kept its output open, for which the answer waited two minutes."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nsleep 1000 & echo $! > {tmp_path}/fork; echo '{{\"answer\": 1}}'\n")
    python.chmod(0o755)
    assert worker_programs.ask_worker(str(python), "inspect_model.py", ["a request"]) == {"answer": 1}
    fork = int((tmp_path / "fork").read_text())
    until(lambda: identify(fork) is None, "the fork to be ended")


def test_f07_a_program_of_the_worker_ends_with_the_command_that_asked_it(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}}\\n')\ntime.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = subprocess.Popen(
        [*COMMAND, "run", "tiny-llama"], env={**environment, "TRAINFAST_HOME": str(tmp_path / "home")}
    )
    asked = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the program"))
    command.terminate()
    command.wait(PATIENCE_S)
    assert until(lambda: identify(asked) is None, "its end")

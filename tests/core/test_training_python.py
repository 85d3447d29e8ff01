"""Asking the training Python: its answer or its last words; and children that are collected when they end."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cli.command import COMMAND, PATIENCE_S, until
from on_disk import put, run_file
from trainfast_runner.errors import UserError
from trainfast_runner.machine import training_python
from trainfast_runner.machine.processes import boot_id, identify
from trainfast_runner.machine.training_python import ask_worker
from trainfast_runner.machine.warm_python import torch_build
from trainfast_runner.records.home import Home, search_directories
from trainfast_runner.records.json_lines import newest, read_all
from trainfast_runner.records.run_file import ClockAnchor
from trainfast_runner.records.run_lines import Event
from trainfast_runner.running.launch import _start_supervisor
from trainfast_runner.search import control
from trainfast_runner.search.batch_journal import BatchEnded, BatchSnapshot
from trainfast_runner.search.control import CONDUCTOR_MODULE, SearchRequest, start_search
from trainfast_runner.search.journal import newest_conducted
from trainfast_runner.settings.spec import resolve


@pytest.mark.parametrize(
    ("writes", "words"), [("x", "x"), ("", "it exited without reporting an error")], ids=["its last line", "nothing"]
)
def test_a_script_that_fails_is_named_with_its_last_words(tmp_path, writes, words):
    script = tmp_path / "script.py"
    script.write_text(f"print('noise'); raise SystemExit({writes!r})")
    with pytest.raises(UserError, match=f"cannot describe the model: {words}$"):
        ask_worker(sys.executable, str(script), ["first"])


def test_a_limit_is_named_for_the_last_error_line_alone_and_no_place_in_a_job_is_inherited(tmp_path, monkeypatch):
    monkeypatch.setattr(training_python, "inherited_limits", lambda: {"RLIMIT_AS": 600 << 20})
    script = tmp_path / "script.py"
    for ending, words in (("TypeError('x')", "TypeError: x"), ("MemoryError", r"MemoryError; RLIMIT_AS .* 600 MiB")):
        script.write_text(f"import sys; print('MemoryError: retried', file=sys.stderr); raise {ending}")
        with pytest.raises(UserError, match=f"cannot describe the model: {words}$"):
            ask_worker(sys.executable, str(script), ["x"])
    script = tmp_path / "script.py"
    seen = "{'seen': [n for n in ('RANK', 'OF_THE_USER') if n in os.environ]}"
    script.write_text(f"import json, os; print('noise'); print(json.dumps({seen}))")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("OF_THE_USER", "1")
    assert ask_worker(sys.executable, str(script), ["a request"]) == {"seen": ["OF_THE_USER"]}


def executable(path, line):
    """The path of an executable shell script of this line."""
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


def test_a_python_that_fails_is_named_with_its_task_and_another_program_is_none(tmp_path):
    python = executable(tmp_path / "python", "echo no cpu >&2; exit 1")
    tasks = {
        "report its torch": torch_build,
        "calibrate": lambda path: ask_worker(path, "calibrate.py", ["cpu"], task="calibrate"),
    }
    for task, ask in tasks.items():
        with pytest.raises(UserError, match=f"^{python} cannot {task}: no cpu$"):
            ask(python)
    shell = executable(tmp_path / "shell", 'echo "$1: line 3: import: command not found" >&2; exit 127')
    for program in (shell, "/bin/ls"):
        with pytest.raises(UserError, match=f"^{program} is not a Python interpreter$"):
            torch_build(program)


def children():
    return {int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


def test_a_supervisor_that_ended_is_collected(tmp_path):
    clock = ClockAnchor(monotonic_ns=time.monotonic_ns(), wall_ns=time.time_ns())
    put(tmp_path / "run.json", run_file(run_id=tmp_path.name, argv=["true"], boot_id=boot_id(), clock=clock))
    _start_supervisor(tmp_path, None, "")
    pid = read_all(tmp_path / "events.jsonl", Event)[0][0].pid
    assert pid in children()
    until(lambda: pid not in children(), "the supervisor to end and be collected")
    assert (tmp_path / "result.json").exists()


def test_a_conductor_that_ended_is_collected(tmp_path):
    before = children()
    with pytest.raises(UserError, match="no Python at /nowhere"):
        start_search(resolve("tiny-llama", []), Home(tmp_path), "/nowhere")
    until(lambda: children() <= before, "the conductor to be collected")


@pytest.mark.parametrize("title_length", [1, 1 << 18])
def test_a_conductor_that_ends_without_an_answer_is_an_error_with_its_reason(tmp_path, monkeypatch, title_length):
    monkeypatch.setattr(control, "CONDUCTOR_MODULE", "trainfast_runner.no_such_module")
    reason = r"ended before it answered: .*No module named trainfast_runner\.no_such_module"
    with pytest.raises(UserError, match=reason):
        start_search(replace(resolve("tiny-llama", []), title="x" * title_length), Home(tmp_path))


def test_a_conductor_whose_starter_has_gone_goes_on(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("TRAINFAST_HOME", str(tmp_path))
    home, spec = Home(tmp_path), resolve("tiny-llama", ["data.kind=random", "memory_limit=1GiB"])
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.Popen([sys.executable, "-P", "-m", CONDUCTOR_MODULE], stdin=subprocess.PIPE, stdout=writing)
    os.close(writing)
    process.stdin.write(msgspec.json.encode(SearchRequest(home=str(tmp_path), **spec.record_fields())))
    process.stdin.close()
    (directory,) = until(lambda: search_directories(home), "the search to begin")
    until(lambda: newest_conducted(directory), "its conductor")
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    ended = newest(BatchSnapshot.read(directory).lines, BatchEnded)
    assert ended.state == "cancelled"


def test_forks_of_a_script_that_ended_by_itself_are_ended(tmp_path):
    """They also kept its output open, for which the answer waited two minutes."""
    python = executable(tmp_path / "python", f"sleep 1000 & echo $! > {tmp_path}/fork; echo '{{\"answer\": 1}}'")
    assert ask_worker(python, "calibrate.py", ["a request"]) == {"answer": 1}
    fork = int((tmp_path / "fork").read_text())
    until(lambda: identify(fork) is None, "the fork to be ended")


def test_f07_a_program_of_the_worker_ends_with_the_command_that_asked_it(tmp_path):
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

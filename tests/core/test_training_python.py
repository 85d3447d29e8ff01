"""Asking the training Python: an answer nobody waits for any more ends with the process that worked on it."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from trainfast_runner.errors import UserError
from trainfast_runner.machine.processes.identity import identify
from trainfast_runner.machine.worker_scripts import GivenUp, ask, ask_each

STUBBORN = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(600)
"""


def test_an_answer_that_is_given_up_takes_its_process_along(tmp_path: Path) -> None:
    script, pid = tmp_path / "stubborn.py", tmp_path / "pid"
    script.write_text(STUBBORN)
    given_up = threading.Event()
    caught: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(GivenUp) as raised:
            ask(sys.executable, str(script), [str(pid)], given_up)
        caught.append(raised.value)

    thread = threading.Thread(target=wait)
    thread.start()
    deadline = time.monotonic() + 120
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    given_up.set()
    thread.join(60)
    assert caught
    assert identify(int(pid.read_text())) is None


def test_an_answer_in_time_is_given(tmp_path: Path) -> None:
    script = tmp_path / "quick.py"
    script.write_text("print('noise'); print('{\"answer\": 42}')")
    assert ask(sys.executable, str(script), ["x"], threading.Event()) == {"answer": 42}


@pytest.mark.parametrize(
    ("writes", "words"), [("x", "x"), ("", "it exited without reporting an error")], ids=["its last line", "nothing"]
)
def test_each_answer_is_given_before_the_script_fails(tmp_path: Path, writes: str, words: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"print('noise'); print('{{\"answer\": 42}}', flush=True); raise SystemExit({writes!r})")
    answers = ask_each(sys.executable, str(script), ["first", "second"], threading.Event())
    assert next(answers) == {"answer": 42}
    with pytest.raises(UserError, match=f"cannot describe the model: {words}$"):
        next(answers)


def test_a_script_does_not_inherit_a_place_in_somebody_elses_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os; print(json.dumps({'seen': [n for n in ('RANK', 'OF_THE_USER') if n in os.environ]}))"
    )
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("OF_THE_USER", "1")
    assert ask(sys.executable, str(script), ["a request"]) == {"seen": ["OF_THE_USER"]}

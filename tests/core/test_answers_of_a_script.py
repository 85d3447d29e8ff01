"""Several answers from one process of the training Python: each as it comes, and what happens when it does not."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from trainfast_runner.errors import UserError
from trainfast_runner.machine.worker_scripts import GivenUp, ask_each

ECHO = """
import json, sys
for argument in sys.argv[1:]:
    print("a library says something")
    print()
    print(json.dumps({"asked": argument}), flush=True)
"""
DIES = ECHO + '    sys.exit("there is no more memory")\n'
STAYS = "import json, os, time\nprint(json.dumps({'pid': os.getpid()}), flush=True)\ntime.sleep(600)\n"


def script(tmp_path: Path, text: str) -> str:
    file = tmp_path / "script.py"
    file.write_text(text)
    return str(file)


def test_one_answer_an_argument_in_their_order(tmp_path: Path) -> None:
    answers = ask_each(sys.executable, script(tmp_path, ECHO), ["one", "two"], threading.Event())
    assert list(answers) == [{"asked": "one"}, {"asked": "two"}]


def test_what_was_answered_before_the_end_is_kept(tmp_path: Path) -> None:
    answers = ask_each(sys.executable, script(tmp_path, DIES), ["one", "two"], threading.Event())
    assert next(answers) == {"asked": "one"}
    with pytest.raises(UserError, match="there is no more memory"):
        next(answers)


def test_nothing_is_left_of_a_script_whose_answers_nobody_wants(tmp_path: Path) -> None:
    given_up = threading.Event()
    answers = ask_each(sys.executable, script(tmp_path, STAYS), ["one", "two"], given_up)
    pid = next(answers)["pid"]
    given_up.set()
    with pytest.raises(GivenUp):
        next(answers)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)

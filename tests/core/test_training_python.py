"""Asking the training Python: its answer, or its last words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainfast_runner.errors import UserError
from trainfast_runner.machine.worker_scripts import ask_script


def test_an_answer_in_time_is_given(tmp_path: Path) -> None:
    script = tmp_path / "quick.py"
    script.write_text("print('noise'); print('{\"answer\": 42}')")
    assert ask_script(sys.executable, str(script), ["x"]) == {"answer": 42}


@pytest.mark.parametrize(
    ("writes", "words"), [("x", "x"), ("", "it exited without reporting an error")], ids=["its last line", "nothing"]
)
def test_a_script_that_fails_is_named_with_its_last_words(tmp_path: Path, writes: str, words: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"print('noise'); raise SystemExit({writes!r})")
    with pytest.raises(UserError, match=f"cannot describe the model: {words}$"):
        ask_script(sys.executable, str(script), ["first"])


def test_a_script_does_not_inherit_a_place_in_somebody_elses_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os; print(json.dumps({'seen': [n for n in ('RANK', 'OF_THE_USER') if n in os.environ]}))"
    )
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("OF_THE_USER", "1")
    assert ask_script(sys.executable, str(script), ["a request"]) == {"seen": ["OF_THE_USER"]}

"""Asking the training Python: its answer, or its last words."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainfast_runner.errors import UserError
from trainfast_runner.machine import worker_programs
from trainfast_runner.machine.training_python import cuda_devices, torch_build
from trainfast_runner.machine.worker_programs import ask_worker


def test_an_answer_in_time_is_given(tmp_path: Path) -> None:
    script = tmp_path / "quick.py"
    script.write_text("print('noise'); print('{\"answer\": 42}')")
    assert ask_worker(sys.executable, str(script), ["x"]) == {"answer": 42}


@pytest.mark.parametrize(
    ("writes", "words"), [("x", "x"), ("", "it exited without reporting an error")], ids=["its last line", "nothing"]
)
def test_a_script_that_fails_is_named_with_its_last_words(tmp_path: Path, writes: str, words: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"print('noise'); raise SystemExit({writes!r})")
    with pytest.raises(UserError, match=f"cannot describe the model: {words}$"):
        ask_worker(sys.executable, str(script), ["first"])


def test_a_limit_is_named_for_the_last_error_line_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_programs, "inherited_limits", lambda: {"RLIMIT_AS": 600 << 20})
    script = tmp_path / "script.py"
    for ending, words in (("TypeError('x')", "TypeError: x"), ("MemoryError", r"MemoryError; RLIMIT_AS .* 600 MiB")):
        script.write_text(f"import sys; print('MemoryError: retried', file=sys.stderr); raise {ending}")
        with pytest.raises(UserError, match=f"cannot describe the model: {words}$"):
            ask_worker(sys.executable, str(script), ["x"])


def executable(path: Path, line: str) -> str:
    """The path of an executable shell script of this line."""
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


def test_another_program_is_not_taken_for_a_python(tmp_path: Path) -> None:
    shell = executable(tmp_path / "shell", 'echo "$1: line 3: import: command not found" >&2; exit 127')
    for program in (shell, "/bin/ls"):
        with pytest.raises(UserError, match=f"^{program} is not a Python interpreter$"):
            torch_build(program)


def test_a_python_that_fails_is_named_with_its_task(tmp_path: Path) -> None:
    python = executable(tmp_path / "python", "echo no cpu >&2; exit 1")
    tasks: dict[str, Callable[[str], object]] = {
        "report its torch": torch_build,
        "list its GPUs": cuda_devices,
        "calibrate": lambda path: ask_worker(path, "calibrate.py", ["cpu"], task="calibrate"),
    }
    for task, ask in tasks.items():
        with pytest.raises(UserError, match=f"^{python} cannot {task}: no cpu$"):
            ask(python)


def test_a_script_does_not_inherit_a_place_in_somebody_elses_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os; print(json.dumps({'seen': [n for n in ('RANK', 'OF_THE_USER') if n in os.environ]}))"
    )
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("OF_THE_USER", "1")
    assert ask_worker(sys.executable, str(script), ["a request"]) == {"seen": ["OF_THE_USER"]}

"""The help of the command line, its terminal, and input that cannot be used: one line, and no run left behind."""

import errno
import io
import json
import os
import pty
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from cli.command import COMMAND
from trainfast_runner.errors import UserError
from trainfast_runner.records.home import home_error
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_tui.cli.printing import print_json


def test_a_shell_completes_commands_and_options(cli):
    script = cli("completion", "bash").out
    asked = """
    complete() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _trainfast_tui; echo "${COMPREPLY[*]}"; }
    complete trainfast-tui mon
    complete trainfast-tui runs co
    complete trainfast-tui search best tiny-llama --bud
    """
    source = script.replace("complete -o default", ": complete -o default") + asked
    done = subprocess.run(["bash", "-c", source], capture_output=True, text=True)
    assert done.stdout.split() == ["monitor", "compare", "--budget"], done.stderr
    assert "bashcompinit" in cli("completion", "zsh").out
    assert "__fish_seen_subcommand_from runs" in cli("completion", "fish").out


def test_the_first_frame_waits_for_nothing_that_samples_predicts_or_judges():
    parts = ["machine.telemetry.sampler", "machine.telemetry.nvml", "results.bottleneck", "results.verdict", "memory"]
    parts += ["running.supervisor", "search"]
    assert all(find_spec(f"trainfast_runner.{part}") for part in parts)
    script = (
        "import sys\nimport trainfast_tui.app\n"
        f"late = ['psutil', 'pynvml', 'tomlkit', *('trainfast_runner.' + part for part in {parts})]\n"
        "print([name for name in late if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("term", "words"), [("dumb", "TERM is dumb"), ("", "TERM is not set"), ("unknown", "unknown")])
def test_a_terminal_that_cannot_move_its_cursor_is_refused_before_a_frame(cli, term, words):
    code, text = in_terminal(cli, TERM=term)
    assert code == 2
    assert text.startswith("trainfast-tui: the app needs a terminal that can move its cursor")
    assert words in text
    assert "trainfast-tui run PRESET, or trainfast-tui monitor --once" in text
    assert text.count("\n") == 1
    assert "\x1b" not in text


def test_columns_is_obeyed_on_a_terminal(cli):
    _, text = in_terminal(cli, "presets", "show", "tiny-llama", TERM="xterm", COLUMNS="200")
    widest = max(map(len, text.splitlines()))
    _, text = in_terminal(cli, "knobs", TERM="xterm", COLUMNS="44")
    assert max(map(len, text.splitlines())) == 44 < widest


def in_terminal(cli, *words, **environment):
    """Run a command with a terminal as all three streams; return its exit code and its output."""
    ours, theirs = pty.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    done = subprocess.run([*COMMAND, *words], env={**cli.environment, **environment}, timeout=60, **streams)
    os.close(theirs)
    text = os.read(ours, 1 << 20).decode().replace("\r", "")
    os.close(ours)
    return done.returncode, text


@pytest.mark.parametrize("words", [["presets", "list"], ["--version"]])
def test_a_full_disk_behind_stdout_is_printed(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.strip()) == (4, "trainfast-tui: No space left on device")


def test_json_stays_json_on_a_stdout_that_is_not_utf8(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="latin-1", write_through=True))
    value = {"title": "“Ours”", "folder": "/home/用户", "unit": "°C"}
    print_json(value)
    assert json.loads(written.getvalue().decode("latin-1")) == value


@pytest.mark.parametrize("words", ["presets list", "--help", "run --help", "--version"])
def test_a_reader_that_leaves_is_no_error(words):
    done = subprocess.run(
        ["bash", "-c", f"'{COMMAND[0]}' {' '.join(COMMAND[1:])} {words} | true"], capture_output=True, text=True
    )
    assert done.stderr == ""


def test_knobs_are_listed_with_the_values_they_take(cli):
    done = cli("knobs")
    assert done.code == 0
    assert {line.split()[0] for line in done.out.splitlines()[1:]} == set(KNOBS_BY_NAME)
    assert "a whole number from 1 to 1048576" in done.out


def test_a_python_whose_name_is_not_utf8_is_refused(cli, tmp_path):
    python = tmp_path / os.fsdecode(b"caf\xe9")
    python.symlink_to(sys.executable)
    assert "is not UTF-8" in cli("run", "tiny-llama", "--python", str(python)).refused()


def test_a_refusal_is_quick_and_does_not_ask_the_training_python_again(cli, tmp_path):
    refused = ("run", "tiny-llama", "--set", "strategy=ddp", "--set", "devices=9", "--json")
    for _ in range(2):
        done = cli(*refused)
        assert done.json["error"]["nearest"] == "devices=8"
    # Its own time, which on an idle machine is the time that passes: others use this machine as well.
    assert done.cpu_s < 1.0
    started = tmp_path / "started"
    note = f"import sys\nwith open({str(started)!r}, 'a') as file:\n    print(sys.orig_argv, file=file)\n"
    (tmp_path / "sitecustomize.py").write_text(note)
    cli(*refused, PYTHONPATH=str(tmp_path)).refused()
    assert "bootstrap.py" not in started.read_text()


def test_a_slow_training_python_is_waited_for_in_words(cli, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 2\n")
    python.chmod(0o755)
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [*COMMAND, "run", "tiny-llama", "--python", str(python)],
        env={**cli.environment, "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    text = os.read(ours, 65536).decode()
    os.close(ours)
    assert done.returncode == 2
    assert text.index("checking…") < text.index("\x1b[K") < text.index("it exited without reporting an error")


def test_an_error_names_at_most_twenty_values_and_a_full_disk_has_two_cures():
    line = UserError("no such thing", allowed=[f"value{number}" for number in range(300)]).line()
    assert line.count("value") == 20
    assert line.endswith("… and 280 more)")
    line = home_error(Path("/x"), OSError(errno.ENOSPC, "")).line()
    assert line == "cannot use /x: the disk is full: free some space, or set TRAINFAST_HOME to another directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_home_without_permission(cli, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    assert "no permission" in cli("run", "tiny-llama", TRAINFAST_HOME=str(locked / "home")).refused()

"""Input that cannot be used: one line that names the file, the key and the nearest name, and no run left behind."""

import errno
import os
import pty
import subprocess
from pathlib import Path

import pytest

from cli.command import COMMAND
from trainfast_runner.errors import UserError
from trainfast_runner.records.home import home_error


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


def test_an_error_names_at_most_twenty_values():
    line = UserError("no such thing", allowed=[f"value{number}" for number in range(300)]).line()
    assert line.count("value") == 20
    assert line.endswith("… and 280 more)")


def test_a_home_on_a_full_disk_has_two_cures():
    line = home_error(Path("/x"), OSError(errno.ENOSPC, "")).line()
    assert line == "cannot use /x: the disk is full: free some space, or set TRAINFAST_HOME to another directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_home_without_permission(cli, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    assert "no permission" in cli("run", "tiny-llama", TRAINFAST_HOME=str(locked / "home")).refused()

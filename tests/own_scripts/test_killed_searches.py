"""Searches of scripts of one's own that are killed at random moments: the same command goes on where they were."""

import random
import shutil
import signal
from contextlib import suppress

import psutil
import pytest

from cli.command import Started, until
from own_scripts.conftest import PYTHON, SCRIPTS, files_below, preset_of
from trainfast_runner.search.batch_journal import BatchSnapshot, ConfirmationRun, Probe
from trainfast_runner.search.best_journal import BestJournal, ColdRun, Trial

pytestmark = pytest.mark.long
KILLS = 6
MAX_LINES = 30
"""A run of a few steps records about as many lines."""


def processes_of(cli):
    """Every process that works for this home: commands, supervisors, trainings."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            if process.environ().get("TRAINFAST_HOME") == str(cli.home):
                found.append(process)
    return found


def lines_recorded(cli):
    """The lines of the journal and of all runs: a clock that goes as the search does."""
    files = [*cli.home.glob("searches/*/*.jsonl"), *cli.home.glob("runs/*/*.jsonl")]
    return sum(file.read_bytes().count(b"\n") for file in files)


def kill_everything(cli):
    """Send SIGKILL to every process of the home, until none is left."""

    def is_over():
        left = processes_of(cli)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return not left

    until(is_over, "the end of every process")


def killed(cli, command, lines, *, alone):
    """Start the command, and kill it when so many more lines are recorded: `alone`, or all that it has started too."""
    moment = lines_recorded(cli) + lines
    started = Started(cli, command)
    until(lambda: lines_recorded(cli) >= moment or started.process.poll() is not None, "the moment")
    assert started.process.poll() is None, f"it ended before it was killed:\n{started.err}"
    # The command first: it sees nothing of what becomes of its run.
    started.signal(signal.SIGKILL)
    if not alone:
        kill_everything(cli)
    started.end()


def answered_after_kills(cli, command, work):
    """The answer of a search of a script in `work` that was killed again and again, and the search's only directory."""
    shutil.copy(SCRIPTS / "wide_argparse.py", work / "train.py")
    preset_of(cli, "--", PYTHON, "train.py")
    moments = random.Random(13)
    for _ in range(KILLS):
        killed(cli, command, moments.randint(1, MAX_LINES), alone=moments.random() < 0.3)
    done = cli(*command)
    assert done.code == 0, done.err
    until(lambda: not processes_of(cli), "the last supervisor to end behind its result")
    assert files_below(work) == [work / "train.py"], "a trial has written into the script's folder"
    cli("runs", "list", "--probes")
    assert list(cli.home.glob("runs/*/sandbox")) == [], "a killed trial has left its files"
    (directory,) = (cli.home / "searches").iterdir()
    return done, directory


def test_batch_search_of_a_killed_script_tries_no_size_twice(cli, work):
    command = ("search", "max-batch", "mine", "--json", "--proof-steps=5", "--set", "memory_limit=256MiB")
    done, directory = answered_after_kills(cli, command, work)
    assert done.json["max_batch"] > 100
    assert done.json["too_large"] > done.json["max_batch"]
    lines = BatchSnapshot.read(directory).lines
    tried = [line.batch_size for line in lines if isinstance(line, Probe)]
    assert len(tried) == len(set(tried)), "a size was measured twice"
    confirmed = [line.run_id for line in lines if isinstance(line, ConfirmationRun)]
    assert len(confirmed) == len(set(confirmed)), "a run was recorded twice"


def test_best_fit_of_a_killed_script_goes_on_and_confirms_its_answer(cli, work):
    command = ("search", "best", "mine", "--json", "--budget=300s", "--vary=batch_size=2,4,8")
    done, directory = answered_after_kills(cli, command, work)
    assert len(done.json["best"]["run_ids"]) >= 2
    lines = BestJournal.read(directory).lines
    measured = [line.candidate_number for line in lines if isinstance(line, Trial) and line.outcome == "measured"]
    assert len(measured) == len(set(measured)), "a setting was measured twice"
    cold_runs = [line.run_id for line in lines if isinstance(line, ColdRun)]
    assert len(cold_runs) == len(set(cold_runs)), "a run was recorded twice"

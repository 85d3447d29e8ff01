"""Searches of scripts of one's own that are killed at random moments: the same command goes on where they were."""

import random
import shutil
import signal
from contextlib import suppress

import psutil
import pytest

from cli.command import Started, until
from own_scripts.conftest import PYTHON, SCRIPTS, files_below, preset_of, script
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import read_result
from trainfast_runner.search.batch_journal import BatchLaunched, ConfirmationRun, Probe, read_batch_journal
from trainfast_runner.search.best_journal import BestLaunched, ColdRun, Trial, read_best_journal
from trainfast_runner.worker.shared.words import PROBE, TRIAL

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
    """Answer a search of a script in `work` that is killed again and again; the search's only directory."""
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
    return directory


@pytest.mark.parametrize(
    ("words", "read_journal", "tried", "of", "confirmed"),
    [
        (
            ("max-batch", "--proof-steps=5", "--set", "memory_limit=256MiB"),
            read_batch_journal,
            Probe,
            "batch_size",
            ConfirmationRun,
        ),
        ("best --budget=300s --vary=batch_size=2,4,8", read_best_journal, Trial, "candidate_number", ColdRun),
    ],
)
def test_search_of_a_killed_script_measures_nothing_twice(cli, work, words, read_journal, tried, of, confirmed):
    kind, *options = words.split()
    lines = read_journal(answered_after_kills(cli, ("search", kind, "mine", "--json", *options), work))
    measured = [
        getattr(line, of) for line in lines if isinstance(line, tried) and line.outcome not in ("void", "failed")
    ]
    assert len(measured) == len(set(measured)), "a size or setting was measured twice"
    recorded = [line.run_id for line in lines if isinstance(line, confirmed)]
    assert len(recorded) == len(set(recorded)), "a run was recorded twice"
    launched = [line for line in lines if isinstance(line, BatchLaunched | BestLaunched)]
    cold = [line.run_id for line in launched if line.role not in (PROBE, TRIAL)]
    assert set(finished(cli, cold)) <= set(recorded), "a finished run was not taken"


@pytest.mark.ci
@pytest.mark.parametrize("words", [("max-batch",), ("best", "--vary=batch_size=4,8", "--budget=300s")])
def test_trial_that_ended_after_its_search_was_killed_is_taken(cli, words):
    preset_of(cli, *script("plain_torch.py"))
    kind, *options = words
    command = ("search", kind, "mine", "--set", "memory_limit=512MiB", *options)
    started = Started(cli, command)
    (left,) = until(lambda: runs_in_journals(cli, BatchLaunched, BestLaunched), "the first trial")
    started.signal(signal.SIGKILL)
    started.end()
    until(lambda: read_result(Home(cli.home).directory(left)) is not None, "the end of the trial")
    assert not runs_in_journals(cli, Probe, Trial), "the search was killed too late"
    again = Started(cli, command)
    recorded = until(lambda: runs_in_journals(cli, Probe, Trial), "the trial in the journal")
    again.signal(signal.SIGINT)
    again.end()
    assert recorded[0] == left


def runs_in_journals(cli, *kinds):
    """The runs of all lines of these kinds in the journal of the only search, of either kind."""
    folders = [journal.parent for journal in cli.home.glob("searches/*/journal.jsonl")]
    lines = [line for folder in folders for line in (*read_batch_journal(folder), *read_best_journal(folder))]
    return [line.run_id for line in lines if isinstance(line, kinds)]


def finished(cli, run_ids):
    """Those of the runs that finished."""
    results = [read_result(Home(cli.home).directory(run_id)) for run_id in run_ids]
    return [one.run_id for one in results if one is not None and one.state == "finished"]

"""Commands that meet: launches on one device, a run deleted the moment it ends, runs started in one second."""

import argparse
import errno
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.command import SMALL, until, until_measured
from on_disk import put, run_file
from plans import PLAN
from trainfast_runner.errors import UserError
from trainfast_runner.memory.tracing import Traces
from trainfast_runner.records.home import JOURNAL_FILE, LAUNCH_LOCK_FILE, Home, cache_directory, conductor_lock
from trainfast_runner.records.run_directory import locked, shared_lock
from trainfast_runner.running import launch
from trainfast_runner.settings.spec import resolve
from trainfast_runner.worker.shared.host import lock_holder
from trainfast_tui.cli import launching
from trainfast_tui.cli import logs as stop_command
from trainfast_tui.cli.logs import directory_to_stop, search_notice

HOLD_LOCK = """
import fcntl, signal, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
signal.pause()
"""
RUN = ["run", "tiny-llama", *SMALL, "--set", "steps=6", "--json"]


def test_of_launches_at_the_same_time_one_gets_the_device_and_ctrl_c_stops_it(cli, endless):
    # The winner keeps the device, so that the slower launch comes in time.
    started = [cli.start("run", "--json", *endless) for _ in range(2)]
    (winner,) = until(lambda: len(left := [one for one in started if one.process.poll() is None]) == 1 and left, "one")
    (loser,) = (one for one in started if one is not winner)
    done = loser.end()
    assert done.code == 2
    assert "in use by" in done.json["error"]["message"]
    until_measured(cli)
    winner.signal(signal.SIGINT)
    stopped = winner.end()
    assert stopped.code == 130, stopped.err
    assert "stopping the run; SIGKILL follows after 30 s, Ctrl-C again sends it now" in stopped.err
    assert stopped.json["state"] == "stopped"
    assert stopped.json["steps"]["measured"] > 0
    assert len(cli("runs", "list", "--json").json["runs"]) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 129)])
def test_f14_a_launch_that_is_cancelled_while_another_one_is_under_way_starts_nothing(cli, tmp_path, number, code):
    (tmp_path / "git").write_text(f"#!/bin/sh\ntouch {tmp_path / 'asked'}\n")
    (tmp_path / "git").chmod(0o755)
    cli.home.mkdir()
    with locked(cli.home / LAUNCH_LOCK_FILE):
        started = cli.start("run", "--", sys.executable, "-c", "print(1)", PATH=f"{tmp_path}:{os.environ['PATH']}")
        started.until_printed(f"waiting for process {os.getpid()} (")
        assert (tmp_path / "asked").exists(), "git is asked before the lock is taken"
        assert f"which has locked {cli.home / LAUNCH_LOCK_FILE}" in started.err
        started.signal(number)
        assert started.end().code == code
    assert list(cli.home.glob("runs/*")) == []


def test_the_holder_of_a_lock_is_not_one_of_a_file_with_its_number_on_another_disk(tmp_path, monkeypatch):
    path = tmp_path / "a.lock"
    with locked(path) as fd:
        real = re.findall(rf"^.*:{os.fstat(fd).st_ino} .*$", Path("/proc/locks").read_text(), re.MULTILINE)
        elsewhere = f"1: FLOCK  ADVISORY  WRITE 1 ff:ff:{os.fstat(fd).st_ino} 0 EOF"
        for lines, holder in (([elsewhere], "another process"), ([elsewhere, *real], f"process {os.getpid()} (")):
            monkeypatch.setattr(Path, "read_text", lambda path, lines=lines: "\n".join(lines) + "\n")
            assert lock_holder(fd).startswith(holder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "command", [["run"], pytest.param(["search", "max-batch"], marks=[pytest.mark.ci, pytest.mark.long])]
)
def test_f05_a_wait_for_a_trace_says_who_makes_it_and_can_be_cancelled(cli, tmp_path, monkeypatch, command, number):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cli.cache))
    limited = "memory_limit=400MiB"
    spec = resolve("tiny-llama", [*SMALL[1::2], "seq_len=17", limited])
    lock = cache_directory() / "traced" / f"{Traces('cpu', sys.executable).requests_for(spec).name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen([sys.executable, "-c", HOLD_LOCK, lock], stdout=subprocess.PIPE) as holder:
        try:
            holder.stdout.readline()
            holder.send_signal(signal.SIGSTOP)
            started = cli.start(*command, "tiny-llama", *SMALL, "--set", "seq_len=17", "--set", limited)
            started.until_printed(f"waiting for process {holder.pid} ({sys.executable} -c ")
            assert f", suspended), which has locked {lock}" in started.err
            started.signal(number)
            assert started.end().code in (129, 130)
        finally:
            # A suspended process never ends by itself.
            holder.kill()


@pytest.mark.long
def test_launches_that_wait_get_the_device_one_after_the_other(cli):
    started = [cli.start(*RUN, "--wait") for _ in range(3)]
    ended = [one.end() for one in started]
    assert [done.json["state"] for done in ended] == ["finished"] * 3
    times = []
    for done in ended:
        run = json.loads((cli.home / "runs" / done.json["run_id"] / "run.json").read_text())
        begin = run["clock"]["wall_ns"]
        times.append((begin, begin + done.json["seconds"] * 1e9))
    times.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(times))


@pytest.mark.long
def test_a_run_can_be_deleted_the_moment_its_result_is_there(cli):
    started = cli.start(*RUN)
    until(lambda: list(cli.home.glob("runs/*/result.json")), "the result")
    done = cli("runs", "rm", "last")
    assert done.code == 0, done.err
    # Its own command either saw the result before, or says what became of it.
    assert started.end().code in (0, 5)


def test_runs_sort_in_the_order_of_their_launches(tmp_path):
    home = Home(tmp_path)
    made = [home.new_run(word)[0] for word in ("zebra", "monkey", "ant")]
    assert [home.number_launch(run_id) for run_id in made] == [1, 2, 3]
    assert (home.run_ids(), home.find("last")) == (made, made[-1])
    # A clock that once was years ahead does not lead the ids along.
    home.directory("20991231-235959-future-0000").mkdir()
    assert home.new_run("now")[0] < "2099"


@pytest.mark.parametrize("file", ["alive.lock", "launches", "run.json"])
def test_a_launch_without_room_for_one_of_its_files_leaves_no_run(tmp_path, monkeypatch, file):
    home = Home(tmp_path)
    right = os.open

    def opened(path, flags, *arguments, **options):
        if file in Path(os.fsdecode(path)).name and flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return right(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(UserError, match="the disk is full"):
        launch.start(PLAN, home)
    assert list(home.runs.iterdir()) == []


@pytest.mark.parametrize("is_search", [True, False])
def test_a_run_of_a_search_is_waited_for_and_stopped_by_the_searchs_name(tmp_path, monkeypatch, capsys, is_search):
    monkeypatch.setenv("TRAINFAST_HOME", str(tmp_path))
    home = Home(tmp_path)
    search = home.search_directory("20261121-070000-tiny-llama-5ea2")
    search.mkdir(parents=True)
    if is_search:  # a bench with warm rows has such a directory too, without a journal
        (search / JOURNAL_FILE).touch()
    run_id, directory = home.new_run("probe")
    run = run_file(run_id=run_id, search_id=search.name)
    put(directory / "run.json", run)
    monkeypatch.setattr(launching, "wait_for_devices", lambda plan, home, show: show(run, 12.0))
    with conductor_lock(search):
        launching.await_devices(PLAN, home)
        notice = search_notice(directory)
    named = f"search {search.name}" if is_search else run_id
    assert capsys.readouterr().err == f"waiting for {named} to end, 12 s so far\n"
    words = f"{run_id} belongs to search {search.name}, which ends with it; the same search command continues it"
    assert notice == (words if is_search else None)
    assert search_notice(directory) is None, "its conductor is gone"


def test_stop_last_is_the_live_process_of_a_search_which_no_list_shows(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINFAST_HOME", str(tmp_path))
    home = Home(tmp_path)
    _, listed = home.new_run("listed")
    _, probe = home.new_run("probe")
    for directory, role in ((listed, None), (probe, "probe")):
        run = run_file(run_id=directory.name, role=role)
        put(directory / "run.json", run)
    with shared_lock(probe):
        assert directory_to_stop("last") == probe
    assert directory_to_stop("last") == listed


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGTERM, 129)])
def test_a_stop_that_is_left_early_says_in_its_exit_code_how(tmp_path, monkeypatch, number, code):
    monkeypatch.setenv("TRAINFAST_HOME", str(tmp_path))
    _, directory = Home(tmp_path).new_run("stubborn")
    monkeypatch.setattr(stop_command, "stop_run", lambda *arguments, **options: signal.raise_signal(number))
    arguments = argparse.Namespace(reference=directory.name, now=False, json=False)
    with shared_lock(directory):
        assert stop_command.stop(arguments) == code

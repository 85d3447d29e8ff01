"""`runs prune`: old runs and searches go; what is alive never does. The rest stands in transcripts/prune.txt."""

import fcntl
import time

from on_disk import ended, lost, search, started
from trainfast_runner.records.home import STAMP_FORMAT
from trainfast_runner.records.run_directory import shared_lock
from trainfast_runner.worker.shared.words import PROBE

OLD, MIDDLE, NEW = (f"2025110{n}-100000-tiny-llama-aaaa" for n in (1, 2, 3))


def old_search(home, minute=0):
    return search(home, {"kind": "paused", "t_ns": 1}, search_id=f"20251101-09{minute:02}00-tiny-llama-5555")


def runs(cli):
    return sorted(path.name for path in (cli.home / "runs").iterdir())


def test_a_live_run_or_search_and_what_belongs_to_it_stay(cli):
    lost(cli.home, OLD)
    live, idle = (old_search(cli.home, minute) for minute in (1, 2))
    for run_id, of_search in ((MIDDLE, live), (NEW, idle)):
        for write in (ended, started):
            write(cli.home, run_id, role=PROBE, search_id=of_search.name)
    being_made = f"{time.strftime(STAMP_FORMAT, time.gmtime(time.time() - 1))}-tiny-llama-bbbb"
    (cli.home / "runs" / being_made).mkdir()
    with shared_lock(cli.home / "runs" / OLD), (live / "search.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = cli("runs", "prune", "--keep", "0", "--yes", "--json").json
    assert found["live"] == [OLD, MIDDLE, being_made, live.name]
    assert runs(cli) == [OLD, MIDDLE, being_made]
    assert [path.name for path in (cli.home / "searches").iterdir()] == [live.name]
    assert found["left"] == []


def test_foreign_folders_below_runs_and_searches_stay(cli):
    """`runs` is TensorBoard's default folder, and TRAINFAST_HOME may be a project's own directory."""
    ended(cli.home, OLD)
    old_search(cli.home)
    foreign = [
        *(cli.home / "runs" / name for name in ("CartPole_Nov22", "20240101-notes", "20240101-100000-cartpole-beef")),
        cli.home / "searches" / "20240101-notes",
        cli.home / "searches" / "hyperparameters",
    ]
    for folder in foreign:
        folder.mkdir()
        (folder / "events.out.tfevents").touch()
    (foreign[-1] / "journal.jsonl").write_text("{}")
    (cli.home / "runs" / "zzz-empty").mkdir()
    left_by_a_launch = cli.home / "runs" / "20240101-100000-tiny-llama-cccc"
    left_by_a_launch.mkdir()
    found = cli("runs", "prune", "--keep", "0", "--yes", "--json").json
    assert [one["run_id"] for one in found["runs"]] == [left_by_a_launch.name, OLD]
    assert runs(cli) == sorted([*(folder.name for folder in foreign[:3]), "zzz-empty"])
    assert sorted((cli.home / "searches").iterdir()) == sorted(foreign[3:])
    assert all((folder / "events.out.tfevents").exists() for folder in foreign)

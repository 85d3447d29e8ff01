"""`runs prune`: old runs and searches go; what is alive never does."""

import fcntl
import time
from pathlib import Path

import pytest

from cli.command import Cli
from on_disk import ended, lost, search, started
from trainfast_runner.records.home import STAMP_FORMAT
from trainfast_runner.records.run_directory import shared_lock
from trainfast_runner.worker.shared.words import PROBE

DAY_S = 86400.0
OLD, MIDDLE, NEW = (f"2025110{n}-100000-tiny-llama-aaaa" for n in (1, 2, 3))


def recent(age_s: float) -> str:
    """An id of a run that began so long ago."""
    return f"{time.strftime(STAMP_FORMAT, time.gmtime(time.time() - age_s))}-tiny-llama-bbbb"


def write_run_of(home: Path, run_id: str, search_id: str, role: str) -> None:
    ended(home, run_id, role=role, search_id=search_id)
    started(home, run_id, role=role, search_id=search_id)


def old_search(home: Path, minute: int = 0) -> Path:
    return search(home, {"kind": "paused", "t_ns": 1}, search_id=f"20251101-09{minute:02}00-tiny-llama-5555")


def runs(cli: Cli) -> list[str]:
    return sorted(path.name for path in (cli.home / "runs").iterdir())


def test_keep_leaves_the_newest_runs_and_says_first_what_goes(cli):
    for run_id in (OLD, MIDDLE, NEW):
        ended(cli.home, run_id)
    total, nothing = cli("runs", "prune", "--keep", "1").out.splitlines()[-2:]
    assert total.startswith("to delete: 2 runs, ")
    assert nothing == "nothing was deleted: --yes deletes all of this"
    dry = cli("runs", "prune", "--keep", "1", "--json").json
    assert [one["run_id"] for one in dry["runs"]] == [OLD, MIDDLE]
    assert dry["total_bytes"] == sum(one["bytes"] for one in dry["runs"]) > 0
    assert dry["deleted"] is False
    assert runs(cli) == [OLD, MIDDLE, NEW]
    done = cli("runs", "prune", "--keep", "1", "--yes")
    assert done.code == 0
    assert done.out.splitlines()[-1].startswith("freed ")
    assert runs(cli) == [NEW]
    assert cli("runs", "prune", "--keep", "1", "--yes").out == "nothing to delete\n"


def test_older_than_goes_by_the_time_a_run_began_and_both_must_let_it_go(cli):
    week, hour = recent(7 * DAY_S), recent(3600)
    for run_id in (OLD, week, hour):
        ended(cli.home, run_id)
    both = cli("runs", "prune", "--keep", "1", "--older-than", "2w", "--json").json
    assert [one["run_id"] for one in both["runs"]] == [OLD]
    alone = cli("runs", "prune", "--older-than", "2d", "--json").json
    assert [one["run_id"] for one in alone["runs"]] == [OLD, week]


def test_without_a_limit_nothing_is_planned(cli):
    ended(cli.home, OLD)
    assert "needs a limit" in cli("runs", "prune", "--yes").refused()
    assert runs(cli) == [OLD]


def test_a_live_run_or_search_and_what_belongs_to_it_stay(cli):
    lost(cli.home, OLD)
    live, idle = (old_search(cli.home, minute) for minute in (1, 2))
    write_run_of(cli.home, MIDDLE, live.name, PROBE)
    write_run_of(cli.home, NEW, idle.name, PROBE)
    being_made = recent(1)
    (cli.home / "runs" / being_made).mkdir()
    with shared_lock(cli.home / "runs" / OLD), (live / "search.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = cli("runs", "prune", "--keep", "0", "--yes", "--json").json
    assert found["live"] == [OLD, MIDDLE, being_made, live.name]
    assert runs(cli) == [OLD, MIDDLE, being_made]
    assert [path.name for path in (cli.home / "searches").iterdir()] == [live.name]
    assert found["left"] == []


def test_a_search_stays_as_long_as_one_of_its_runs(cli):
    of_both = old_search(cli.home)
    write_run_of(cli.home, OLD, of_both.name, PROBE)
    write_run_of(cli.home, MIDDLE, of_both.name, "proof")
    # A probe is not among the runs that are listed, and counts for none of those that are kept.
    ended(cli.home, NEW)
    kept = cli("runs", "prune", "--keep", "2", "--json").json
    assert [one["run_id"] for one in kept["runs"]] == [OLD]
    assert kept["searches"] == []
    gone = cli("runs", "prune", "--keep", "1", "--json").json
    assert [one["search_id"] for one in gone["searches"]] == [of_both.name]


@pytest.mark.parametrize("run_ids", [[], [NEW], [MIDDLE, NEW]])
def test_every_search_stays_while_there_are_no_more_runs_than_are_kept(cli, run_ids):
    for minute in (1, 2):
        old_search(cli.home, minute)
    for run_id in run_ids:
        ended(cli.home, run_id)
    assert cli("runs", "prune", "--keep", "3").out == "nothing to delete\n"
    assert cli("runs", "prune", "--keep", "100", "--older-than", "1d").out == "nothing to delete\n"
    searches = cli("runs", "prune", "--keep", "0", "--json").json["searches"]
    assert len(searches) == 2


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


def test_foreign_folders_are_not_counted_among_the_runs_that_are_kept(cli):
    for run_id in (OLD, NEW):
        ended(cli.home, run_id)
    (cli.home / "runs" / "CartPole_Nov22").mkdir()
    assert cli("runs", "prune", "--keep", "1", "--yes").code == 0
    assert runs(cli) == [NEW, "CartPole_Nov22"]


def test_what_stays_is_named_not_counted_as_freed_and_makes_the_exit_code_4(cli):
    """A link to a run on another disk is listed as a run, and is not followed to delete it."""
    for run_id in (OLD, MIDDLE):
        ended(cli.home, run_id)
    elsewhere = cli.home / "elsewhere"
    (cli.home / "runs" / OLD).rename(elsewhere)
    (cli.home / "runs" / OLD).symlink_to(elsewhere)
    planned = cli("runs", "prune", "--keep", "0", "--json").json
    alone = next(one["bytes"] for one in planned["runs"] if one["run_id"] == MIDDLE)
    done = cli("runs", "prune", "--keep", "0", "--yes", "--json")
    assert (done.code, done.json["left"], done.json["total_bytes"]) == (4, [OLD], alone)
    again = cli("runs", "prune", "--keep", "0", "--yes")
    assert again.code == 4
    assert again.out.splitlines()[-2:] == ["freed 0 B", f"not deleted, in use again or no permission: {OLD}"]
    assert (elsewhere / "result.json").exists()

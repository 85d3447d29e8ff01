"""`runs prune`: old runs and searches and unused cache entries go; what is alive never does."""

import fcntl
import os
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


@pytest.fixture
def own(cli: Cli, tmp_path: Path) -> Cli:
    """With a cache of its own: that of the session is shared."""
    return Cli(cli.home, cli.config, tmp_path / "cache")


def recent(age_s: float) -> str:
    """An id of a run that began so long ago."""
    return f"{time.strftime(STAMP_FORMAT, time.gmtime(time.time() - age_s))}-tiny-llama-bbbb"


def write_run_of(home: Path, run_id: str, search_id: str, role: str) -> None:
    ended(home, run_id, role=role, search_id=search_id)
    started(home, run_id, role=role, search_id=search_id)


def old_search(home: Path, minute: int = 0) -> Path:
    return search(home, {"kind": "paused", "t_ns": 1}, search_id=f"20251101-09{minute:02}00-tiny-llama-5555")


def cached(cli: Cli, name: str, age_s: float = 0.0) -> Path:
    path = cli.cache / "trainfast-tui" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * 9000)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def runs(cli: Cli) -> list[str]:
    return sorted(path.name for path in (cli.home / "runs").iterdir())


def test_keep_leaves_the_newest_runs_and_says_first_what_goes(own):
    for run_id in (OLD, MIDDLE, NEW):
        ended(own.home, run_id)
    asked = own("runs", "prune", "--keep", "1")
    assert asked.out.splitlines()[-2].startswith("to delete: 2 runs, ")
    assert asked.out.splitlines()[-1] == "nothing was deleted: --yes deletes all of this"
    dry = own("runs", "prune", "--keep", "1", "--json").json
    assert [one["run_id"] for one in dry["runs"]] == [OLD, MIDDLE]
    assert dry["total_bytes"] == sum(one["bytes"] for one in dry["runs"]) > 0
    assert dry["deleted"] is False
    assert runs(own) == [OLD, MIDDLE, NEW]
    done = own("runs", "prune", "--keep", "1", "--yes")
    assert done.code == 0
    assert done.out.splitlines()[-1].startswith("freed ")
    assert runs(own) == [NEW]
    assert own("runs", "prune", "--keep", "1", "--yes").out == "nothing to delete\n"


def test_older_than_goes_by_the_time_a_run_began_and_both_must_let_it_go(own):
    week, hour = recent(7 * DAY_S), recent(3600)
    for run_id in (OLD, week, hour):
        ended(own.home, run_id)
    both = own("runs", "prune", "--keep", "1", "--older-than", "2w", "--json").json
    assert [one["run_id"] for one in both["runs"]] == [OLD]
    alone = own("runs", "prune", "--older-than", "2d", "--json").json
    assert [one["run_id"] for one in alone["runs"]] == [OLD, week]


def test_without_a_limit_no_run_goes(own):
    ended(own.home, OLD)
    old_search(own.home)
    stale = cached(own, "traced/a-b.lock")
    found = own("runs", "prune", "--yes", "--json").json
    assert (found["runs"], found["searches"]) == ([], [])
    assert [one["path"] for one in found["locks"]] == [str(stale)]
    assert found["deleted"] is True
    assert not stale.exists()
    assert runs(own) == [OLD]


def test_a_live_run_or_search_and_what_belongs_to_it_stay(own):
    lost(own.home, OLD)
    live, idle = (old_search(own.home, minute) for minute in (1, 2))
    write_run_of(own.home, MIDDLE, live.name, PROBE)
    write_run_of(own.home, NEW, idle.name, PROBE)
    being_made = recent(1)
    (own.home / "runs" / being_made).mkdir()
    with shared_lock(own.home / "runs" / OLD), (live / "search.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = own("runs", "prune", "--keep", "0", "--yes", "--json").json
    assert found["live"] == [OLD, MIDDLE, being_made, live.name]
    assert runs(own) == [OLD, MIDDLE, being_made]
    assert [path.name for path in (own.home / "searches").iterdir()] == [live.name]
    assert found["left"] == []


def test_a_search_stays_as_long_as_one_of_its_runs(own):
    of_both = old_search(own.home)
    write_run_of(own.home, OLD, of_both.name, PROBE)
    write_run_of(own.home, MIDDLE, of_both.name, "proof")
    # A probe is not among the runs that are listed, and counts for none of those that are kept.
    ended(own.home, NEW)
    kept = own("runs", "prune", "--keep", "2", "--json").json
    assert [one["run_id"] for one in kept["runs"]] == [OLD]
    assert kept["searches"] == []
    gone = own("runs", "prune", "--keep", "1", "--json").json
    assert [one["search_id"] for one in gone["searches"]] == [of_both.name]


@pytest.mark.parametrize("run_ids", [[], [NEW], [MIDDLE, NEW]])
def test_every_search_stays_while_there_are_no_more_runs_than_are_kept(own, run_ids):
    for minute in (1, 2):
        old_search(own.home, minute)
    for run_id in run_ids:
        ended(own.home, run_id)
    assert own("runs", "prune", "--keep", "3").out == "nothing to delete\n"
    assert own("runs", "prune", "--keep", "100", "--older-than", "1d").out == "nothing to delete\n"
    searches = own("runs", "prune", "--keep", "0", "--json").json["searches"]
    assert len(searches) == 2


def test_orphans_of_the_caches_go(own):
    used, unused = cached(own, "traced/used.json"), cached(own, "inspected/unused.json", age_s=31 * DAY_S)
    half_made = cached(own, f"traced/.used.json.{2**22 + 1}-7")
    held, free = cached(own, "traced/held.lock"), cached(own, "traced/free.lock")
    tokens = cached(own, "tokens/text-1/ids.bin", age_s=31 * DAY_S).parent
    os.utime(tokens, (time.time() - 31 * DAY_S,) * 2)
    with held.open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = own("runs", "prune", "--yes", "--json").json
    assert [(one["path"], one["why"]) for one in found["caches"]] == [
        (str(unused), "not read or changed for 31 days by its file times"),
        (str(half_made), "left half-made"),
        (str(tokens), "not read or changed for 31 days by its file times"),
    ]
    assert all(one["bytes"] > 9000 for one in found["caches"])
    assert [path.exists() for path in (used, unused, half_made, held, free, tokens)] == [
        *(True, False, False, True, False, False)
    ]


def test_a_link_to_a_folder_frees_its_own_size_alone(own, tmp_path):
    tokens = cached(own, "tokens/text-1/ids.bin").parent
    elsewhere = tmp_path / "elsewhere"
    tokens.rename(elsewhere)
    tokens.symlink_to(elsewhere)
    os.utime(tokens, (time.time() - 31 * DAY_S,) * 2, follow_symlinks=False)
    link_bytes = tokens.lstat().st_blocks * 512
    found = own("runs", "prune", "--yes", "--json").json
    assert [(one["path"], one["bytes"]) for one in found["caches"]] == [(str(tokens), link_bytes)]
    assert (elsewhere / "ids.bin").exists()


def test_the_data_of_a_training_stay_in_the_cache(own):
    lost(own.home, OLD)
    tokens = cached(own, "tokens/text-1/ids.bin", age_s=31 * DAY_S)
    os.utime(tokens.parent, (time.time() - 31 * DAY_S,) * 2)
    with shared_lock(own.home / "runs" / OLD):
        assert own("runs", "prune", "--yes").out == "nothing to delete\n"
    assert tokens.exists()


def test_foreign_folders_below_runs_and_searches_stay(own):
    """`runs` is TensorBoard's default folder, and TRAINFAST_HOME may be a project's own directory."""
    ended(own.home, OLD)
    old_search(own.home)
    foreign = [
        *(own.home / "runs" / name for name in ("CartPole_Nov22", "20240101-notes", "20240101-100000-cartpole-beef")),
        own.home / "searches" / "20240101-notes",
        own.home / "searches" / "hyperparameters",
    ]
    for folder in foreign:
        folder.mkdir()
        (folder / "events.out.tfevents").touch()
    (foreign[-1] / "journal.jsonl").write_text("{}")
    (own.home / "runs" / "zzz-empty").mkdir()
    left_by_a_launch = own.home / "runs" / "20240101-100000-tiny-llama-cccc"
    left_by_a_launch.mkdir()
    found = own("runs", "prune", "--keep", "0", "--yes", "--json").json
    assert [one["run_id"] for one in found["runs"]] == [left_by_a_launch.name, OLD]
    assert runs(own) == sorted([*(folder.name for folder in foreign[:3]), "zzz-empty"])
    assert sorted((own.home / "searches").iterdir()) == sorted(foreign[3:])
    assert all((folder / "events.out.tfevents").exists() for folder in foreign)


def test_foreign_folders_are_not_counted_among_the_runs_that_are_kept(own):
    for run_id in (OLD, NEW):
        ended(own.home, run_id)
    (own.home / "runs" / "CartPole_Nov22").mkdir()
    assert own("runs", "prune", "--keep", "1", "--yes").code == 0
    assert runs(own) == [NEW, "CartPole_Nov22"]


def test_what_stays_is_named_not_counted_as_freed_and_makes_the_exit_code_4(own):
    """A link to a run on another disk is listed as a run, and is not followed to delete it."""
    for run_id in (OLD, MIDDLE):
        ended(own.home, run_id)
    elsewhere = own.home / "elsewhere"
    (own.home / "runs" / OLD).rename(elsewhere)
    (own.home / "runs" / OLD).symlink_to(elsewhere)
    planned = own("runs", "prune", "--keep", "0", "--json").json
    alone = next(one["bytes"] for one in planned["runs"] if one["run_id"] == MIDDLE)
    done = own("runs", "prune", "--keep", "0", "--yes", "--json")
    assert (done.code, done.json["left"], done.json["total_bytes"]) == (4, [OLD], alone)
    again = own("runs", "prune", "--keep", "0", "--yes")
    assert again.code == 4
    assert again.out.splitlines()[-2:] == ["freed 0 B", f"not deleted, in use again or no permission: {OLD}"]
    assert (elsewhere / "result.json").exists()


def test_an_extension_is_as_old_as_the_newest_file_in_any_folder_of_it(own):
    library = cached(own, "extensions/torch-2/cpu_adam/cpu_adam.so")
    extension = library.parents[1]
    for path in (library.parent, extension):
        os.utime(path, (time.time() - 60 * DAY_S,) * 2)
    assert own("runs", "prune", "--yes").out == "nothing to delete\n"
    os.utime(library, (time.time() - 31 * DAY_S,) * 2)
    # Looking reads the folders, and must not make them count as used.
    for arguments in ((), ("--yes",)):
        found = own("runs", "prune", "--json", *arguments).json
        assert [one["path"] for one in found["caches"]] == [str(extension)]
    assert not extension.exists()

"""Records, results and journals that hold anything at all: every command answers, and prints no control sequence."""

import copy
import functools
import io
import json
import operator
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from cli.command import Done
from on_disk import RECORDED
from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import write_cached
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.running.present_state import live_runs
from trainfast_runner.search.searches import new_search
from trainfast_tui.cli import main

OTHER = "20261121-133322-tiny-llama-d702"
"""The id of a run of the same records as they are."""
RECORD_FILES = ("run.json", "result.json")
LINE_FILES = ("events.jsonl", "worker.jsonl", "steps.jsonl", "telemetry.jsonl")
FORMS = ("training-args", "accelerate", "deepspeed", "torchrun", "command", "preset")
COMMANDS = [
    *("runs list", "runs list --json", "runs show last", "runs show last --json", "runs show last --steps"),
    *("runs show last --why", f"runs compare {OTHER} last", f"runs compare last {OTHER} --json", "logs last"),
    *("attach last", "runs prune --keep 0", "stop last", *(f"export last --to {form}" for form in FORMS)),
    *("export last --to command --json", "report last -o FOLDER/r.md"),
]
SEQUENCES = ["\x1b]52;c;eA==\x07", "\x1b[2J", "\x9b31m", "\x9d52;c;eA==\x9c", "\u202e", "\x85", "\r", "\x7f", "\x08"]
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
UNFILLED = ("script", "host", "number", "search_id", "role", "tried")
"""Fields that make another run of it."""
JsonPath = tuple[str | int, ...]


def run_in_process(home, command):
    """Run a command in this process; an exception of it is the test's."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2))
    words = command.replace("FOLDER", str(home)).split()
    folders = {"TRAINFAST_HOME": home, "XDG_CACHE_HOME": home / "cache", "XDG_CONFIG_HOME": home / "config"}
    with (
        patch.dict(os.environ, {name: str(folder) for name, folder in folders.items()}),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = main(words)
    texts = []
    for stream in (out, err):
        stream.flush()
        stream.seek(0)
        texts.append(stream.read())
    return Done(code, *texts)


def leaves(value, at=()):
    """Yield the path of every value within a JSON value, tables and lists included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from leaves(item, (*at, key))


def value_at(value, at):
    """Return the value at a path."""
    return functools.reduce(operator.getitem, at, value)


def changed(value, at, change):
    """Put another value at a path, or take the value away for `...`."""
    table = value_at(value, at[:-1])
    if change is ...:
        del table[at[-1]]
    else:
        table[at[-1]] = change


def filled_up(value, kind):
    """Return a JSON value of the type with every field of it, those that it lacks with any value."""
    match kind:
        case inspect.UnionType(types=kinds):
            return filled_up(value, next(kind for kind in kinds if not isinstance(kind, inspect.NoneType)))
        case inspect.StructType(fields=fields):
            value = value or {}
            return value | {
                field.encode_name: filled_up(value.get(field.encode_name), field.type)
                for field in fields
                if field.encode_name not in UNFILLED
            }
        case inspect.ListType(item_type=item):
            return value or [filled_up(None, item)]
        case inspect.DictType(value_type=item):
            return value or dict.fromkeys(("forward", "data"), filled_up(None, item))
        case _:
            samples = {inspect.StrType: "x", inspect.BoolType: False, inspect.IntType: 1, inspect.FloatType: 1.0}
            return samples.get(type(kind)) if value is None else value


RECORDS = {name: json.loads((RECORDED / name).read_text()) for name in RECORD_FILES}
# The records are of an earlier version: fields that came later have a value of their type.
RECORDS["run.json"] = filled_up(RECORDS["run.json"], inspect.type_info(RunFile))
RECORDS["result.json"] = filled_up(RECORDS["result.json"], inspect.type_info(Result))
RECORDS |= {name: json.loads((RECORDED / name).read_text().splitlines()[0]) for name in LINE_FILES}
PLACES = [(name, place) for name, record in RECORDS.items() for place in leaves(record)]
TEXT_PLACES = [(name, place) for name, place in PLACES if isinstance(value_at(RECORDS[name], place), str)]


def home_with(folder, name, place, change):
    """Return a home with the recorded run twice, one value of the newer one changed, in the first line of a file."""
    directory = Path(folder) / "runs" / RECORDED.name
    shutil.copytree(RECORDED, directory.with_name(OTHER))
    shutil.copytree(RECORDED, directory)
    (directory / "output.log").write_text(f"a line {change if isinstance(change, str) else ''}\n")
    _, *rest = (directory / name).read_text().splitlines(keepends=True) if name in LINE_FILES else [""]
    record = copy.deepcopy(RECORDS[name])
    changed(record, place, change)
    (directory / name).write_text("".join([json.dumps(record) + "\n", *rest]))
    return Path(folder)


@pytest.mark.parametrize("command", COMMANDS)
@settings(max_examples=40)
@given(place=st.sampled_from(TEXT_PLACES), text=st.sampled_from(SEQUENCES), is_key=st.booleans())
def test_f02_no_text_of_a_record_reaches_the_terminal_raw(command, place, text, is_key):
    with tempfile.TemporaryDirectory() as folder:
        done = run_in_process(home_with(folder, *place, {text: 1} if is_key else f"a{text}b"), command)
        written = [file.read_text() for file in Path(folder).glob("r.*")]
    for printed in (done.out, done.err, *written):
        assert not RAW.search(printed), printed


CHANGES = st.sampled_from([..., None, True, -1, 0, 10**18, 1.5, 1e300, "", "unknown", [], ["x"], {}, {"x": "y"}])


@pytest.mark.parametrize("command", COMMANDS)
@settings(max_examples=60)
@given(place=st.sampled_from(PLACES), change=CHANGES)
def test_f12_any_value_of_a_record_is_a_missing_figure_or_one_line(command, place, change):
    with tempfile.TemporaryDirectory() as folder:
        done = run_in_process(home_with(folder, *place, change), command)
    assert done.code != 2 or len(done.refused().splitlines()) == 1


@pytest.mark.ci
@pytest.mark.long
@settings(max_examples=3)
@given(place=st.sampled_from(PLACES), change=CHANGES | st.sampled_from(SEQUENCES))
@example(place=("result.json", ("throughput", "predicted", "median")), change=-1)
@example(place=("result.json", ("preset",)), change="$\\nothing$")
def test_f02_f12_a_page_with_pictures_shows_any_value_of_a_record(place, change):
    with tempfile.TemporaryDirectory() as folder:
        done = run_in_process(home_with(folder, *place, change), "report last -o FOLDER/r.html")
        assert done.code != 0 or not RAW.search((Path(folder) / "r.html").read_text())
    assert done.code != 2 or len(done.refused().splitlines()) == 1


NOT_REGULAR: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "link to itself": lambda file: file.symlink_to(file.name),
    "device": lambda file: file.symlink_to("/dev/zero"),
    "huge": lambda file: (file.touch(), os.truncate(file, 1 << 40))[0],
}
"""What makes a file of each kind."""


@pytest.mark.parametrize("kind", NOT_REGULAR)
@pytest.mark.parametrize("name", [*RECORDS, "alive.lock", "control.jsonl"])
def test_f04_a_file_that_is_not_regular_costs_only_its_own_run(name, kind, tmp_path):
    file = home_with(str(tmp_path), "run.json", ("title",), "x") / "runs" / RECORDED.name / name
    file.unlink(missing_ok=True)
    NOT_REGULAR[kind](file)
    listed = run_in_process(tmp_path, "runs list --json").json["runs"]
    assert OTHER in [row["run_id"] for row in listed]
    for command in COMMANDS[:-1]:
        done = run_in_process(tmp_path, command)
        assert done.code in (0, 2, 3, 4, 5), command
        assert done.code != 2 or len(done.refused().splitlines()) == 1


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to itself", "device"])
def test_f04_a_preset_or_an_output_that_is_not_regular_is_refused_in_one_line(kind, tmp_path):
    file = tmp_path / "mine.toml"
    NOT_REGULAR[kind](file)
    assert str(file) in run_in_process(tmp_path, f"presets show {file}").refused()
    output = home_with(str(tmp_path), "run.json", ("title",), "x") / "runs" / RECORDED.name / "output.log"
    output.unlink()
    NOT_REGULAR[kind](output)
    assert "output.log" in run_in_process(tmp_path, "logs last").refused()


OF_ANOTHER_USER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def as_another(work):
    """Do the work in a fork as an unprivileged user, who may not be able to start this Python."""
    read_fd, write_fd = os.pipe()
    if (pid := os.fork()) == 0:
        os.setgroups([])
        os.setgid(OF_ANOTHER_USER)
        os.setuid(OF_ANOTHER_USER)
        try:
            os.write(write_fd, pickle.dumps(work()))
        finally:
            os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as stream:
        answer = stream.read()
    os.waitpid(pid, 0)
    done = pickle.loads(answer)
    assert isinstance(done, Done)
    return done


def give_away(home):
    """Make a home another user's, after imports of commands that the fork cannot read."""
    for command in ("runs list --json", "runs prune --keep 9 --yes"):
        run_in_process(home, command)
    for path in (home, *home.rglob("*")):
        os.chown(path, OF_ANOTHER_USER, OF_ANOTHER_USER)
    return home


@as_root
@pytest.mark.parametrize("name", ["", "run.json", "result.json", "alive.lock"])
def test_f03_a_run_of_another_user_is_listed_with_its_owner_and_hides_no_other(name):
    with tempfile.TemporaryDirectory() as folder:
        home = give_away(home_with(folder, "run.json", ("title",), "x"))
        directory = home / "runs" / RECORDED.name
        if name == "alive.lock":
            (directory / "result.json").unlink()
            (directory / name).touch()
        for path in (directory / name, home / "launch.lock"):
            path.touch()
            os.chown(path, 0, 0)
            path.chmod(0o600 if path.is_file() else 0o700)
        listed = as_another(lambda: run_in_process(home, "runs list --json"))
        assert listed.code == 0, listed.err
        rows = {row["run_id"]: row for row in listed.json["runs"]}
        assert rows[OTHER]["state"] == "finished"
        if name != "run.json":
            # The result alone is enough for a row.
            assert rows[RECORDED.name]["state"] == "unreadable"
            assert "belongs to root" in rows[RECORDED.name]["reason"]
            assert "belongs to root" in as_another(lambda: run_in_process(home, f"stop {RECORDED.name}")).refused()
        assert as_another(lambda: run_in_process(home, "runs prune --keep 0 --yes")).code == 0
        assert not (home / "runs" / OTHER).exists()
        assert directory.exists()


@as_root
def test_f03_the_launch_lock_of_another_user_is_replaced():
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "launch.lock"
        lock.touch(0o600)
        os.chown(folder, OF_ANOTHER_USER, OF_ANOTHER_USER)

        def launch():
            with Home(Path(folder)).launching(lambda holder: None):
                return Done(0, "", "")

        as_another(launch)
        assert lock.stat().st_uid == OF_ANOTHER_USER


@as_root
def test_f03_the_searches_of_another_user_stop_no_reader():
    with tempfile.TemporaryDirectory() as folder:
        home = give_away(home_with(folder, "run.json", ("title",), "x"))
        (home / "searches").mkdir(0o700)
        done = as_another(lambda: run_in_process(home, "runs prune --keep 0 --yes"))
        assert done.code == 0, done.err
        assert list((home / "runs").iterdir()) == []

        def search():
            with pytest.raises(UserError, match="no permission"):
                new_search(Home(home), "tiny-llama")
            return Done(0, "", "")

        assert as_another(search).code == 0


def test_f10_folders_are_private_under_any_umask(tmp_path):
    before = os.umask(0)
    try:
        Home(tmp_path / "a" / "home").create()
        write_cached(tmp_path / "cache" / "python" / "facts.json", {})
    finally:
        os.umask(before)
    made = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(made) == 5
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}


def test_f11_last_is_the_run_that_was_launched_last(tmp_path):
    home = Home(home_with(str(tmp_path), "run.json", ("title",), "x"))
    future = "20310101-000000-tiny-llama-d704"
    shutil.copytree(home.directory(OTHER), home.directory(future))
    assert [home.number_launch(run_id) for run_id in (future, OTHER)] == [1, 2]
    assert home.run_ids() == [RECORDED.name, future, OTHER]
    assert (home.find("last"), home.find("1"), home.find("2")) == (OTHER, future, OTHER)
    rows = run_in_process(tmp_path, "runs list --json").json["runs"]
    assert [(row["run_id"], row["number"]) for row in rows] == [(OTHER, 2), (future, 1), (RECORDED.name, None)]
    assert run_in_process(tmp_path, "runs prune --keep 1 --yes").code == 0
    assert home.run_ids() == [OTHER]


def test_f17_a_run_of_another_host_is_shown_as_such_and_left_alone(tmp_path):
    home = home_with(str(tmp_path), "run.json", ("host",), "node7")
    directory = home / "runs" / RECORDED.name
    (directory / "result.json").unlink()
    assert "delete its folder if node7 is gone" in run_in_process(tmp_path, "runs rm last").refused()
    assert run_in_process(tmp_path, "runs prune --keep 9 --yes").code == 0
    assert directory.exists(), "without its lock too"
    (directory / "alive.lock").touch()
    text = run_in_process(tmp_path, "runs list").out
    assert "on host node7" in text
    assert not re.search("lost|unsupervised", text)
    for command in ("stop last", "runs rm last", "attach last"):
        assert "node7" in run_in_process(tmp_path, command).refused()
    assert run_in_process(tmp_path, "runs prune --keep 0 --yes").code == 0
    assert not (directory / "result.json").exists()
    assert directory.exists()
    assert live_runs(Home(home)) == []

"""Commands typed where a person may well be: beside a random.py, in a deleted folder, without HOME, without stdout."""

import itertools
import os
import subprocess

import pytest

from cli.command import COMMAND, PATIENCE_S, SMALL, Done

AMBIENT = ["--ambient-caps=+dac_override"]
CALLS = itertools.count()
TEXT_RUN = ["run", "tiny-llama", "--set", "steps=4", "--json"]
SHADOWED = ("random", "json", "tempfile", "socket", "torch", "numpy", "transformers", "trainfast_runner")
RUN = ["run", "tiny-llama", *SMALL, "--set", "steps=6"]


def typed_in(cli, cwd, *arguments, before=":", after="", **changed):
    """A command after `cd folder`, through a shell that does `before` it and closes or redirects with `after`."""
    done = subprocess.run(
        ["bash", "-c", f'{before}; "$@" {after}', "bash", *COMMAND, *arguments], cwd=cwd,
        env={name: value for name, value in {**cli.environment, **changed}.items() if value},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def shadows(tmp_path):
    """A working directory with files named like modules that the training imports."""
    folder = tmp_path / "my project"
    folder.mkdir()
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(f"raise RuntimeError('the {name}.py of the working directory')\n")
    return folder


@pytest.mark.long
def test_files_named_like_modules_do_not_reach_torchrun_the_tokenizer_and_the_loaders(cli, shadows, tmp_path):
    text = shadows / "my text [1].txt"
    text.write_text("to be or not to be, that is the question\n" * 200)
    settings = ["data.kind=files", f"data.paths={text}", "steps=5", "seq_len=16", "batch_size=2", "workers=1"]
    arguments = [word for setting in (*settings, "strategy=ddp", "devices=2") for word in ("--set", setting)]
    done = typed_in(cli, shadows, "run", "tiny-llama", *arguments, "--json", XDG_CACHE_HOME=str(tmp_path / "empty"))
    assert done.json["state"] == "finished", done.json["reason"]
    cached = [folder for folder in (tmp_path / "empty").rglob("tokens/*") if folder.is_dir()]
    assert [oct(folder.stat().st_mode & 0o777) for folder in cached] == ["0o700"]


def test_files_named_like_modules_do_not_reach_doctor(cli, shadows):
    assert typed_in(cli, shadows, "doctor", "--json").json["healthy"]


GONE = "mkdir gone && cd gone && rmdir ../gone"


@pytest.mark.parametrize("words", [[], ["run", "tiny-llama", "--python", "venv"], ["report", "last", "-o", "r.html"]])
def test_a_name_in_a_deleted_working_directory_is_refused(cli, tmp_path, words):
    line = typed_in(cli, tmp_path, *words, before=GONE).refused()
    assert line == "trainfast-tui: the current directory has been deleted: cd to another one"


@pytest.mark.parametrize("words", [["runs", "list"], ["presets", "show", "tiny-llama"], ["import", "none.json"]])
def test_other_commands_do_without_a_working_directory(cli, tmp_path, words):
    done = typed_in(cli, tmp_path, *words, before=GONE)
    assert done.code == (2 if words[0] == "import" else 0), done.err
    assert "Traceback" not in done.err


@pytest.mark.long
@pytest.mark.parametrize(("folder", "before"), [(b"", GONE), (b"caf\xe9", ":")], ids=["deleted", "not UTF-8"])
def test_a_deleted_working_directory_and_one_that_is_not_utf8_are_no_obstacle(cli, tmp_path, folder, before):
    place = os.path.join(os.fsencode(tmp_path), folder)
    os.makedirs(place, exist_ok=True)
    done = typed_in(cli, place, *RUN, "--json", before=before)
    assert done.json["state"] == "finished", done.json["reason"]


def test_a_relative_home_in_a_deleted_working_directory_and_one_that_is_not_utf8_are_refused(cli, tmp_path):
    refusal = typed_in(cli, tmp_path, "runs", "list", before=GONE, TRAINFAST_HOME="relative").refused()
    assert "the current directory, which has been deleted" in refusal
    assert "is not UTF-8" in typed_in(cli, tmp_path, "runs", "list", TRAINFAST_HOME="/tmp/caf\udce9").refused()


@pytest.mark.long
def test_a_relative_home_with_spaces_and_letters(cli, tmp_path):
    done = typed_in(cli, tmp_path, *RUN, "--json", TRAINFAST_HOME="mein Häuschen", LC_ALL="C")
    assert done.json["state"] == "finished", done.json["reason"]
    folder = tmp_path / "mein Häuschen" / "runs" / done.json["run_id"]
    for path in (folder, *folder.iterdir()):
        assert path.stat().st_mode & 0o077 == 0, path
    # A run needs no open stream.
    assert typed_in(cli, tmp_path, *RUN, after="<&- >&- 2>&-").code == 0
    assert cli("runs", "show", "last", "--json").json["state"] == "finished"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_nothing_but_what_is_seen(cli, tmp_path, closed):
    done = typed_in(cli, tmp_path, "runs", "list", "--json", after=closed)
    assert (done.code, done.err) == (0, "")


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize(
    ("option", "name"),
    [("--nproc=3:3", "RLIMIT_NPROC"), ("--nproc=6:6", "RLIMIT_NPROC"), ("--as=614400000", "RLIMIT_AS")],
)
def test_f06_f08_a_limit_of_the_shell_fails_the_start_and_is_named(cli, tmp_path, option, name):
    """With a cold cache, as a user whom a limit on processes binds: it counts all of the user, so each has its own."""
    uid = 100_000 + os.getpid() % 100_000 * 10 + next(CALLS)
    user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=+dac_override", *AMBIENT]
    done = subprocess.run(
        [*(user if os.geteuid() == 0 else []), "prlimit", option, *COMMAND, *TEXT_RUN],
        env={**cli.environment, "XDG_CACHE_HOME": str(tmp_path / "cold"), "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    done = Done(done.returncode, done.stdout, done.stderr)
    assert done.code == 4, done.err
    # With three processes the question about the model leaves none for a run.
    assert done.json.get("state", "failed_to_start") == "failed_to_start"
    assert f"; {name} (ulimit" in (done.json.get("reason") or done.json["error"]["message"])

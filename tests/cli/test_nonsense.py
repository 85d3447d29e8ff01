"""Input that no one means: numbers beyond any record, texts with NUL, names that are not UTF-8. Each is one line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec
import pytest

from cli.command import Cli
from core.test_export_command import recorded
from trainfast_runner.records.home import Home

GIGANTIC = "1" + "0" * 20
SCRIPT = ("--", sys.executable, "-c", "0")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("runs", "list", "-n", GIGANTIC), f"-n: must be at most 1000000000, not '{GIGANTIC}'"),
        (("runs", "list", "-n", "0"), "-n: must be a whole number from 1 on, not '0'"),
        (("logs", "last", "-n", "-1"), "-n: must be a whole number from 0 on, not '-1'"),
        (("run", "--steps", GIGANTIC, *SCRIPT), f"--steps: must be at most 1000000000, not '{GIGANTIC}'"),
        (("monitor", "--interval", "1e400"), "--interval: must be a number, not '1e400'"),
        (("monitor", "--interval", "nan"), "--interval: must be a number, not 'nan'"),
        (("bench", "benchmarks-bert", "--repeat", "0"), "--repeat: must be a whole number from 1 on, not '0'"),
        (
            ("bench", "benchmarks-bert", "--scale-batch", "1e300"),
            "--scale-batch must be above 0 and at most 1000000",
        ),
        (("run", "--steps-from-log", "", *SCRIPT), "--steps-from-log is empty: every line would count"),
        (
            ("run", "--steps-from-log", "a{99999999999999999999}", *SCRIPT),
            "--steps-from-log 'a{99999999999999999999}': the repetition number is too large",
        ),
        (
            ("run", "--preset", "tiny-lama"),
            "--preset takes a file with [script.knobs], and there is no tiny-lama; try trainfast-tui run tiny-llama",
        ),
        (("run", "~nobody-of-this-name/x.toml"), "there is no preset file ~nobody-of-this-name/x.toml"),
        (("run", ""), "there is no preset ''"),
        (("run", "./mine"), "there is no preset './mine'; try a path that ends in .toml"),
        (("run", "/home/me/mine"), "there is no preset '/home/me/mine'; try a path that ends in .toml"),
        (("runs", "show", "../runs"), "there is no run '../runs': no runs yet; try trainfast-tui run tiny-llama"),
        (("runs", "rm", ""), "there is no run '': no runs yet; try trainfast-tui run tiny-llama"),
        (
            ("search", "best", "tiny-llama", "--record", "/nowhere/found.json"),
            "there is no folder /nowhere",
        ),
    ],
)
def test_a_word_that_cannot_be_is_one_line(cli: Cli, words: tuple[str, ...], line: str) -> None:
    assert cli(*words).refused().startswith(f"trainfast-tui: {line}")


def test_a_digit_that_is_no_decimal_is_no_number_of_processes(cli: Cli, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=²", str(script))
    assert "'²' is not a number of processes" in cli("run", "--", *torchrun).refused()


def test_a_number_of_thousands_of_digits_is_refused_in_one_line(cli: Cli, tmp_path: Path) -> None:
    home, digits = Home(cli.home), "1" * 5000
    run_id, _ = home.new_run("tiny-llama")
    home.number_launch(run_id)
    assert (home.find("1"), home.find("001")) == (run_id, run_id)
    assert "there is no run '111" in cli("runs", "show", digits).refused()
    (script := tmp_path / "train.py").touch()
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", digits, str(script))
    assert "is not a number of processes" in cli("run", "--", *torchrun).refused()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'schema = 1\nextends = "caf\xe9"\n', "can't decode byte 0xe9"),
        (b'schema = 1\nextends = "a\\u0000.toml"\n', ":2: extends must be text, not 'a\\x00.toml'"),
        (b'schema = 1\nextends = "~nobody-of-this-name/x.toml"\n', "there is no preset file "),
        (b'schema = 1\n[model]\npath = "a\\u0000"\n', ":3: model.path cannot be text with a NUL character"),
        (b'schema = 1\n[model]\nfamily = "llama"\nx = 2020-01-01\n', ":4: model.x cannot be a date or a time"),
        (b'schema = 1\n[model]\nfamily = "llama"\nx = [1, -inf]\n', ":4: model.x cannot be infinite or NaN"),
        (b"schema = 1\nextends = " + b"[" * 5000, "not valid TOML"),
        (b'schema = 1\n[script]\ncwd = "\\u0000"\n', ":3: cwd must be text, not '\\x00'"),
        (b'schema = 1\n[script]\ncommand = ["a\\u0000"]\n', ":3: command must be a list of words"),
        (
            b'schema = 1\nextends = "tiny-llama"\n[knobs]\noffload_path = "\\u0000"\n',
            ":4: offload_path: must be a path",
        ),
    ],
)
def test_a_preset_that_cannot_be_is_one_line(cli: Cli, text: bytes, expected: str) -> None:
    path = cli.presets / "mine.toml"
    path.write_bytes(text)
    assert expected in cli("run", "mine").refused()
    assert expected in cli("run", str(path)).refused()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("2020-01-01", "a date or a time"),
        ("nan", "infinite or NaN"),
        ("1e400", "infinite or NaN"),
        (GIGANTIC, "a whole number of more than 64 bits"),
        ('{ deep = ["\\u0000"] }', "text with a NUL character"),
    ],
)
def test_a_field_that_no_record_holds_is_refused(cli: Cli, value: str, kind: str) -> None:
    line = cli("run", "tiny-llama", "--set", f"model.rope_theta={value}").refused()
    assert line == f"trainfast-tui: model.rope_theta cannot be {kind}"


def test_names_that_are_not_utf8_are_listed(cli: Cli) -> None:
    name = os.fsdecode(b"caf\xe9")
    (cli.presets / f"{name}.toml").write_text('schema = 1\nextends = "tiny-llama"\n')
    assert name in [one["name"] for one in cli("presets", "list", "--json").json["presets"]]
    assert cli("presets", "list").code == 0


def test_a_python_whose_name_is_not_utf8_is_refused(cli: Cli, tmp_path: Path) -> None:
    python = tmp_path / os.fsdecode(b"caf\xe9")
    python.symlink_to(sys.executable)
    assert "is not UTF-8" in cli("run", "tiny-llama", "--python", str(python)).refused()


def test_an_export_into_a_file_is_refused(cli: Cli, tmp_path: Path) -> None:
    run = recorded("tiny-llama")
    directory = cli.home / "runs" / run.run_id
    directory.mkdir(parents=True)
    (directory / "run.json").write_bytes(msgspec.json.encode(run))
    file = tmp_path / "file"
    file.touch()
    assert f"{file} is a file" in cli("export", run.run_id, "--to", "command", "-o", str(file)).refused()


def test_a_script_keeps_its_own_json_flag(cli: Cli) -> None:
    done = cli("run", "--", "no-such-command", "--json")
    assert "there is no command 'no-such-command'" in done.refused()
    assert done.out == ""
    assert json.loads(cli("run", "--json", "--", "no-such-command").out)["error"]["key"] == "no-such-command"

"""The help of the command line, and its answer to a misspelt word."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from importlib.util import find_spec

import pytest

from cli.command import COMMAND, Cli
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_tui.cli.printing.output import print_json

LISTED = ("run", "runs", "logs", "stop", "attach", "presets", "export", "monitor", "topo", "doctor")


def test_help_lists_every_command(cli: Cli) -> None:
    done = cli("--help")
    assert done.code == 0
    for word in (*LISTED, "list, show, compare, rm", "list, show, new"):
        assert word in done.out


@pytest.mark.parametrize(
    "words",
    [["run"], ["runs"], ["runs", "list"], ["runs", "compare"], ["logs"], ["stop"], ["presets", "new"], ["monitor"]],
)
def test_every_command_has_help(cli: Cli, words: list[str]) -> None:
    done = cli(*words, "--help")
    assert done.code == 0
    assert done.out.startswith(f"usage: trainfast-tui {' '.join(words)}")


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom trainfast_tui.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([n for n in ('msgspec', 'textual', 'rich', 'psutil', 'pynvml', 'tomlkit') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_first_frame_waits_for_nothing_that_samples_predicts_or_judges() -> None:
    telemetry, judging = (
        ("machine.telemetry.sampler", "machine.telemetry.nvml"),
        ("results.bottleneck", "results.verdict"),
    )
    parts = (*telemetry, *judging, "memory", "running.supervision", "search")
    assert all(find_spec(f"trainfast_runner.{part}") for part in parts)
    script = (
        "import sys\nimport trainfast_tui.app\n"
        f"late = ['psutil', 'pynvml', 'tomlkit', *('trainfast_runner.' + part for part in {parts})]\n"
        "print([name for name in late if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["rnus"], "runs"),
        (["--presett", "x"], "--preset"),
        (["presets", "lst"], "presets list"),
        (["doctr"], "doctor"),
        (["run", "tiny-llama", "--detatch"], "--detach"),
        (["runs", "list", "--jsn"], "--json"),
        (["monitor", "--onec"], "--once"),
    ],
)
def test_a_misspelt_word_names_the_nearest(cli: Cli, words: list[str], nearest: str) -> None:
    assert f"did you mean {nearest}?" in cli(*words).refused()


def test_help_keeps_the_case_of_names(cli: Cli) -> None:
    assert "This machine's GPUs and host" in cli("monitor", "--help").out


def test_a_refusal_is_an_object_with_json(cli: Cli) -> None:
    done = cli("runs", "lst", "--json")
    done.refused()
    error = done.json["error"]
    assert error["key"] == "lst"
    assert error["nearest"] == "runs list"
    assert error["allowed"] == ["list", "show", "compare", "rm", "prune"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["runs"], "runs needs a command (allowed: list, show, compare, rm, prune)"),
        (["run"], "run needs a preset, or a command after --; see trainfast-tui run --help"),
        (["runs", "list", "-n", "x"], "-n: must be a whole number, not 'x'"),
        (["run", "tiny-llama", "--steps", "0"], "--steps: must be a whole number from 1 on, not '0'"),
        (["monitor", "--interval", "x"], "--interval: must be a number, not 'x'"),
        (["runs", "list", "extra"], "runs list does not take 'extra'"),
    ],
)
def test_incomplete_commands_are_one_line(cli: Cli, words: list[str], line: str) -> None:
    assert cli(*words).refused() == f"trainfast-tui: {line}"


def test_the_app_needs_a_terminal(cli: Cli) -> None:
    assert "trainfast-tui run PRESET, or trainfast-tui monitor --once" in cli().refused()


@pytest.mark.parametrize(("term", "words"), [("dumb", "TERM is dumb"), ("", "TERM is not set"), ("unknown", "unknown")])
def test_a_terminal_that_cannot_move_its_cursor_is_refused_before_a_frame(cli: Cli, term: str, words: str) -> None:
    code, text = in_terminal(cli, TERM=term)
    assert code == 2
    assert text.startswith("trainfast-tui: the app needs a terminal that can move its cursor")
    assert words in text
    assert "trainfast-tui run PRESET, or trainfast-tui monitor --once" in text
    assert text.count("\n") == 1
    assert "\x1b" not in text


def test_columns_is_obeyed_on_a_terminal(cli: Cli) -> None:
    _, text = in_terminal(cli, "presets", "show", "tiny-llama", TERM="xterm", COLUMNS="200")
    widest = max(map(len, text.splitlines()))
    _, text = in_terminal(cli, "knobs", TERM="xterm", COLUMNS="44")
    assert max(map(len, text.splitlines())) == 44 < widest


def in_terminal(cli: Cli, *words: str, **environment: str) -> tuple[int, str]:
    """Run a command with a terminal as all three streams; return its exit code and its output."""
    ours, theirs = pty.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    done = subprocess.run([*COMMAND, *words], env={**cli.environment, **environment}, timeout=60, **streams)
    os.close(theirs)
    text = os.read(ours, 1 << 20).decode().replace("\r", "")
    os.close(ours)
    return done.returncode, text


@pytest.mark.parametrize("words", [["presets", "list"], ["--version"]])
def test_a_full_disk_behind_stdout_is_printed(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 4
    assert done.stderr.strip() == "trainfast-tui: No space left on device"


def test_json_stays_json_on_a_stdout_that_is_not_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="latin-1", write_through=True))
    value = {"title": "“Ours”", "folder": "/home/用户", "unit": "°C"}
    print_json(value)
    assert json.loads(written.getvalue().decode("latin-1")) == value


@pytest.mark.parametrize("words", ["presets list", "--help", "run --help", "--version"])
def test_a_reader_that_leaves_is_no_error(words: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"'{COMMAND[0]}' {' '.join(COMMAND[1:])} {words} | true"],
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""


def test_knobs_are_listed_with_the_values_they_take(cli: Cli) -> None:
    done = cli("knobs")
    assert done.code == 0
    assert {line.split()[0] for line in done.out.splitlines()[1:]} == set(KNOBS_BY_NAME)
    assert "a whole number from 1 to 1048576" in done.out


def test_a_knob_prints_its_whole_help(cli: Cli) -> None:
    entry = KNOBS_BY_NAME["reshard"]
    done = cli("knobs", "reshard")
    assert done.code == 0
    for text in (entry.what, entry.speed, entry.memory, entry.training, "on off", "fsdp, fsdp+tp"):
        assert text in done.out
    [fields] = cli("knobs", "reshard", "--json").json["knobs"]
    assert (fields["name"], fields["default"], fields["only_with"]) == ("reshard", "on", ["fsdp", "fsdp+tp"])
    assert "did you mean reshard?" in cli("knobs", "resherd").refused()

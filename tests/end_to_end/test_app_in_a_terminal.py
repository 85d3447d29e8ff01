"""The app as a person meets it: in a terminal, by keyboard, with real runs."""

from __future__ import annotations

import json
import os
import signal
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.command import COMMAND, SMALL, Cli, until
from end_to_end.terminal import Terminal, needs_tmux
from trainfast_runner.records.json_lines import read_all
from trainfast_runner.records.run_lines import Event

pytestmark = needs_tmux
# The model of `SMALL`: what one test has asked of the training Python, the others find in the cache.
QUICK = """schema = 1
extends = "tiny-llama"
[model]
hidden_size = 32
num_hidden_layers = 1
[data]
kind = "random"
[knobs]
seq_len = 16
steps = 150
"""


@pytest.fixture
def terminal(tmp_path: Path, cli: Cli) -> Iterator[Terminal]:
    (cli.presets / "quick.toml").write_text(QUICK)
    opened = Terminal(tmp_path, 160, 48, cli.environment)
    yield opened
    opened.close()


def results(cli: Cli) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(cli.home.glob("runs/*/result.json"))]


def live_steps(cli: Cli) -> int:
    return sum(len(path.read_text().splitlines()) for path in cli.home.glob("runs/*/steps.jsonl"))


def newest(cli: Cli) -> tuple[str, int]:
    """The newest run's id and the pid of its training."""
    events = max(cli.home.glob("runs/*/events.jsonl"))
    (pid,) = [event.pid for event in read_all(events, Event)[0] if event.kind == "launched"]
    assert pid is not None
    return events.parent.name, pid


@pytest.mark.long
@pytest.mark.ci
def test_run_turn_a_knob_run_again_lose_the_app_and_compare(cli: Cli, terminal: Terminal) -> None:
    terminal.open([*COMMAND, "--preset", "quick"])
    terminal.until_shows("No run yet", "batch_size", "r run", "q quit")
    terminal.press("r")
    terminal.until_shows("finished", "step 150 of 150", "samples/s")
    terminal.press("Right")
    terminal.until_shows("global batch 16")
    terminal.press("r")
    until(lambda: live_steps(cli) > 155, "steps of the second run")
    _, training = newest(cli)
    # Held still meanwhile: it may not reach its end while a terminal is slow.
    os.kill(training, signal.SIGSTOP)
    terminal.kill_program()
    terminal.until_shows("ended with 137")
    assert len(results(cli)) == 1
    terminal.close()
    terminal.open([*COMMAND])
    terminal.until_shows("run 2", "of 150")
    os.kill(training, signal.SIGCONT)
    until(lambda: len(results(cli)) == 2, "the second run's own end")
    terminal.until_shows("finished  run 2", "step 150 of 150")
    assert live_steps(cli) == 300
    terminal.press("c")
    screen = terminal.until_shows("compare ─", "throughput")
    assert any(line.split() == ["batch_size", "8", "16"] for line in screen.splitlines())
    assert [run["knobs"]["batch_size"] for run in results(cli)] == [8, 16]
    assert [run["state"] for run in results(cli)] == ["finished", "finished"]


def test_ctrl_l_repaints_what_another_program_wrote_over(terminal: Terminal) -> None:
    terminal.open([*COMMAND, "--preset", "quick"])
    terminal.until_shows("No run yet", "batch_size", "q quit")

    def ruined() -> None:
        # Colours, a cursor, a scroll region and text all over it, as a message of the kernel or `wall` leaves them.
        terminal.scribble(
            "\x1b[?25h\x1b[5;9r\x1b[31m" + "".join(f"\x1b[{y};1HFOREIGN{'#' * 150}" for y in range(1, 49))
        )
        terminal.until_shows("FOREIGN####", seconds=60)

    def whole(*words: str) -> None:
        def is_whole() -> bool:
            now = terminal.screen()
            return "FOREIGN" not in now and "##" not in now and all(word in now for word in words)

        until(is_whole, f"{words} and no foreign text on the screen", 60)

    ruined()
    terminal.press("C-l")
    whole("No run yet", "batch_size", "q quit")
    # Of the keys of the app a dialog has this one alone.
    terminal.press("p")
    terminal.until_shows("Enter chooses", seconds=60)
    ruined()
    terminal.press("C-l")
    whole("Enter chooses")
    assert "FOREIGN" not in terminal.screen()


def test_q_leaves_the_command_that_follows_a_live_run_on_a_line_of_80_columns(cli: Cli, tmp_path: Path) -> None:
    run_id = cli("run", "tiny-llama", *SMALL, "--set", "steps=1000000", "--detach").out.strip()
    terminal = Terminal(tmp_path, 80, 24, cli.environment)
    try:
        terminal.open([*COMMAND])
        terminal.until_shows("run 1", "q quit")
        terminal.press("q")
        lines = terminal.until_shows("ended with 0").splitlines()
    finally:
        terminal.close()
        cli("stop", run_id)
    assert f"trainfast-tui attach {run_id}" in lines


def test_plain_output_in_ascii_starts_shows_and_quits(terminal: Terminal) -> None:
    terminal.open([*COMMAND, "--plain-output", "--ascii", "--preset", "quick"])
    assert terminal.until_shows("No run yet", "batch_size", "q quit").isascii()
    terminal.press("p")
    assert terminal.until_shows("Enter chooses").isascii()
    terminal.press("Escape")
    # Esc and a key in one read would be one key without our parser.
    until(lambda: "Enter chooses" not in terminal.screen(), "the end of the dialog", 60)
    assert "batch_size" in terminal.screen()
    terminal.press("C-c")
    assert "ended with 0" in terminal.until_shows("ended with 0")


@pytest.mark.parametrize(("no_color", "background"), [("1", "15;0"), ("1", "0;15"), ("", "15;0")])
def test_no_color_leaves_the_terminals_own_two_colours(
    cli: Cli, tmp_path: Path, no_color: str, background: str
) -> None:
    terminal = Terminal(tmp_path, 80, 24, {**cli.environment, "NO_COLOR": no_color, "COLORFGBG": background})
    try:
        terminal.open([*COMMAND, "--preset", "tiny-llama"])
        terminal.until_shows("batch_size", "q quit")
        assert (terminal.colours() == {"1", "2", "7"}) == bool(no_color)
        terminal.press("p")
        terminal.until_shows("Enter chooses")
        assert (terminal.colours() <= {"1", "2", "7"}) == bool(no_color)
    finally:
        terminal.close()


@pytest.mark.long
def test_out_of_memory_is_shown_with_its_cures(cli: Cli, terminal: Terminal) -> None:
    terminal.open([*COMMAND, "--preset", "tiny-llama"])
    terminal.until_shows("No run yet")
    terminal.press("Enter")
    terminal.until_shows("╭")
    terminal.press("C-u")
    terminal.press("4096", "Enter")
    terminal.until_shows("global batch 4,096")
    cli("presets", "new", "huge", "--from", "tiny-llama", "--set", "batch_size=4096", "--set", "memory_limit=512MiB")
    terminal.press("q")
    terminal.until_shows("ended with 0")
    terminal.close()
    terminal.open([*COMMAND, "--preset", "huge"])
    terminal.until_shows("No run yet")
    terminal.press("r")
    terminal.until_shows("DefaultCPUAllocator", "OUT OF MEMORY", " 1 batch_size = ")
    # The screen knows it from the training's own record, before the result is written.
    until(lambda: results(cli), "the result")
    assert results(cli)[0]["state"] == "oom"


def test_the_app_trains_with_the_python_it_is_given(cli: Cli, terminal: Terminal, tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", with_pip=False, symlinks=True)
    terminal.open([*COMMAND, "--python", str(tmp_path / "empty")])
    terminal.until_shows("No run yet")
    terminal.press("r")
    screen = terminal.until_shows("has no torch", "pip install torch")
    assert "Refused" in screen
    assert "No run yet" in screen
    assert results(cli) == [], "nothing was started with another Python"

"""The app as a person meets it: in a terminal, by keyboard, with real runs."""

import json
import os
import re
import signal
from contextlib import closing

import pytest

from cli.command import COMMAND, SMALL, until
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
def terminal(tmp_path, cli):
    (cli.presets / "quick.toml").write_text(QUICK)
    with closing(Terminal(tmp_path, 160, 48, cli.environment)) as opened:
        yield opened


def results(cli):
    return [json.loads(path.read_text()) for path in sorted(cli.home.glob("runs/*/result.json"))]


def live_steps(cli):
    return sum(len(path.read_text().splitlines()) for path in cli.home.glob("runs/*/steps.jsonl"))


@pytest.mark.long
@pytest.mark.ci
def test_run_turn_a_knob_run_again_lose_the_app_and_compare(cli, terminal):
    terminal.open([*COMMAND, "--preset", "quick"])
    terminal.until_shows("No run yet", "batch_size", "r run", "q quit")
    terminal.press("r")
    terminal.until_shows("finished", "step 150 of 150", "samples/s")
    terminal.press("Right")
    terminal.until_shows("global batch 16")
    terminal.press("r")
    until(lambda: live_steps(cli) > 155, "steps of the second run")
    launched = read_all(max(cli.home.glob("runs/*/events.jsonl")), Event)[0]
    (training,) = (event.pid for event in launched if event.kind == "launched")
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
    assert "batch_size 8 -> 16" in screen
    assert [run["knobs"]["batch_size"] for run in results(cli)] == [8, 16]
    assert [run["state"] for run in results(cli)] == ["finished", "finished"]


def test_ctrl_l_repaints_what_another_program_wrote_over(terminal):
    terminal.open([*COMMAND, "--preset", "quick"])
    terminal.until_shows("No run yet", "batch_size", "q quit")

    def ruined():
        # Colours, a cursor, a scroll region and text all over it, as a message of the kernel or `wall` leaves them.
        terminal.scribble(
            "\x1b[?25h\x1b[5;9r\x1b[31m" + "".join(f"\x1b[{y};1HFOREIGN{'#' * 150}" for y in range(1, 49))
        )
        terminal.until_shows("FOREIGN####", seconds=60)

    def whole(*words):
        until(lambda: not re.search("FOREIGN|##", terminal.screen()), "a screen without foreign text", 60)
        terminal.until_shows(*words, seconds=60)

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


def test_q_leaves_the_command_that_follows_a_live_run_on_a_line_of_80_columns(cli, tmp_path):
    run_id = cli("run", "tiny-llama", *SMALL, "--set", "steps=1000000", "--detach").out.strip()
    with closing(Terminal(tmp_path, 80, 24, cli.environment)) as terminal:
        terminal.open([*COMMAND])
        terminal.until_shows("run 1", "q quit")
        terminal.press("q")
        lines = terminal.until_shows("ended with 0").splitlines()
    cli("stop", run_id)
    assert f"trainfast-tui attach {run_id}" in lines


def test_plain_output_in_ascii_starts_shows_and_quits(terminal):
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


@pytest.mark.parametrize("no_color", ["1", ""])
def test_no_color_leaves_the_terminals_own_two_colours(cli, tmp_path, no_color):
    environment = {**cli.environment, "NO_COLOR": no_color, "COLORFGBG": "0;15"}
    with closing(Terminal(tmp_path, 80, 24, environment)) as terminal:
        terminal.open([*COMMAND, "--preset", "tiny-llama"])
        terminal.until_shows("batch_size", "q quit")
        assert (terminal.colours() == {"1", "2", "7"}) == bool(no_color)
        terminal.press("p")
        terminal.until_shows("Enter chooses")
        assert (terminal.colours() <= {"1", "2", "7"}) == bool(no_color)

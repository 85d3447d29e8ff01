"""The best-fit search by keys alone: `B`, Enter, pause, quit, reattach, Enter takes, with real trials."""

import json

import pytest

from cli.command import COMMAND
from end_to_end.terminal import Terminal, needs_tmux

pytestmark = [needs_tmux, pytest.mark.longest]
SMALL = """schema = 1
extends = "tiny-llama"
[model]
hidden_size = 64
num_hidden_layers = 2
[knobs]
seq_len = 32
"""


@pytest.fixture(params=[(160, 48), (80, 24)], ids=["160x48", "80x24"])
def terminal(request, tmp_path, cli):
    opened = Terminal(tmp_path, *request.param, cli.environment)
    yield opened
    opened.close()


def kinds(cli):
    (path,) = cli.home.glob("searches/*/journal.jsonl")
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()]


def test_a_question_is_put_paused_left_found_again_answered_and_its_best_taken(cli, terminal):
    (cli.presets / "small.toml").write_text(SMALL)
    terminal.open([*COMMAND, "--preset", "small"])
    terminal.until_shows("No run yet", "small")
    terminal.press("B")
    terminal.until_shows("best fit: small", "settings", "Enter starts the search")
    terminal.press("v")
    terminal.until_shows("Knobs to vary")
    terminal.press(*"precison=fp32", "Enter")
    terminal.until_shows("mean")
    terminal.press("C-u", *"precision=fp32,bf16", "Space", *"optimizer=adamw,adamw-fused,sgd", "Enter")
    terminal.until_shows("settings 6, 6 of them can run here")
    terminal.press("t")
    terminal.until_shows("Time budget")
    terminal.press(*"90s", "Enter")
    terminal.until_shows("1 min 30 s, plus the runs that confirm the best")
    terminal.press("Enter")
    terminal.until_shows("best so far", seconds=300)
    terminal.press("Space")
    terminal.until_shows("paused: no process is running", seconds=300)
    terminal.press("Q")
    terminal.until_shows("The best-fit search keeps running without this screen", "then B", "ended with 0")
    assert kinds(cli)[-1] == "paused"
    terminal.close()
    terminal.open([*COMMAND, "--preset", "small"])
    terminal.until_shows("small")
    terminal.press("B")
    terminal.until_shows("paused: no process is running")
    terminal.press("Space")
    terminal.until_shows("✓", "gained over the baseline's value", seconds=600)
    assert kinds(cli)[-1] == "best-ended"
    terminal.press("Enter")
    terminal.until_shows("r runs it")

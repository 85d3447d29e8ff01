"""The batch search as a person meets it: `b`, Esc, again, Enter, with real probes and a real confirmation run."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from cli.command import COMMAND, Cli
from end_to_end.terminal import Terminal, needs_tmux

pytestmark = [needs_tmux, pytest.mark.longest]
LIMITED = """schema = 1
extends = "tiny-llama"
[model]
hidden_size = 64
num_hidden_layers = 2
[knobs]
seq_len = 32
memory_limit = "256MiB"
"""


def journal(cli: Cli) -> list[dict[str, Any]]:
    (path,) = cli.home.glob("searches/*/journal.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_b_draws_the_ladder_s_stops_and_enter_applies(cli: Cli, terminal: Terminal) -> None:
    (cli.presets / "limited.toml").write_text(LIMITED)
    terminal.open([*COMMAND, "--preset", "limited"])
    terminal.until_shows("No run yet", "b max batch", "predicted")
    terminal.press("b")
    terminal.until_shows("Enter starts the search")
    terminal.press("Enter")
    terminal.until_shows("largest batch: limited", "limit 256 MiB", "● fits", seconds=120)
    terminal.press("s")
    terminal.until_shows("cancelled; its journal is kept, F5 continues")
    before = [line["batch_size"] for line in journal(cli) if line["kind"] == "probe"]
    terminal.press("F5")
    screen = terminal.until_shows("confirmed in a fresh process", "✓ confirmed", "Enter applies", seconds=300)
    tried = [line["batch_size"] for line in journal(cli) if line["kind"] == "probe" and line["outcome"] != "void"]
    assert tried[: len(before)] == before
    assert len(set(tried)) == len(tried), "what was tried before the cancel is not tried again"
    found = re.search(r"▸ recommended\s+batch_size=(\d+)", screen)
    assert found is not None, screen
    terminal.press("Enter")
    terminal.until_shows(f"batch_size = {found[1]}; r runs it", f"batch_size     {found[1]}")

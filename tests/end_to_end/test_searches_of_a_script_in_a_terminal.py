"""Both searches of a script's preset by keys alone: `B`, Enter, its best taken, then `b`, Enter, its batch taken."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.command import COMMAND, Cli
from end_to_end.terminal import Terminal, needs_tmux

pytestmark = [needs_tmux, pytest.mark.longest]
SCRIPT = """import argparse, time, torch
parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=1)
parser.add_argument("--accum", type=int, default=4)
asked = parser.parse_args()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(64, 4))
place = 0
while True:
    for (rows,) in torch.utils.data.DataLoader(data, batch_size=asked.bs):
        time.sleep(0.02)
        model(rows).mean().backward()
        place += 1
        if place % asked.accum == 0:
            optimizer.step()
"""
"""A script whose forward and backward take as long for one sample as for all 64 that it has."""


def journal(cli: Cli, kind: str) -> list[dict[str, Any]]:
    """The lines of the search whose journal begins with this kind of line."""
    found = [list(map(json.loads, path.open())) for path in cli.home.glob("searches/*/journal.jsonl")]
    (lines,) = (lines for lines in found if lines[0]["kind"] == kind)
    return lines


def test_best_and_largest_batch_of_a_script_are_found_and_taken(cli: Cli, terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (cli.presets / "mine.toml").write_text(
        f"schema = 1\n[script]\ncommand = ['{sys.executable}', 'train.py']\ncwd = '{tmp_path}'\n"
        "[script.knobs]\nbatch_size = '--bs {}'\ngrad_accum = '--accum {}'\n"
        "[knobs]\nbatch_size = 1\ngrad_accum = 4\n"
    )
    terminal.open([*COMMAND, "--preset", "mine"])
    terminal.until_shows("No run yet", "mine")
    terminal.press("B")
    terminal.until_shows("best fit: mine", "candidates 3, 3 of them can run here", "Enter starts the search")
    terminal.press("t")
    terminal.until_shows("Time budget")
    terminal.press(*"90s", "Enter")
    terminal.until_shows("1 min 30 s, plus the runs that confirm the best")
    terminal.press("Enter")
    terminal.until_shows("best so far", "● the baseline", "new", seconds=300)
    terminal.until_shows("✓ batch_size=4", "● batch_size=4", "gained over the baseline's value", seconds=600)
    tried = [line for line in journal(cli, "question") if line["kind"] == "trial"]
    assert {line["candidate"] for line in tried if line["outcome"] == "measured"} == {0, 1, 2}
    terminal.press("Enter")
    terminal.until_shows("batch_size = 4, grad_accum = 1; r runs it", "•batch_size     4", "•grad_accum     1")
    terminal.press("b")
    terminal.until_shows("largest batch: mine", "each size is a process of its own", "Enter starts the search")
    terminal.press("Enter")
    terminal.until_shows("● fits", seconds=300)
    screen = terminal.until_shows("✓ confirmed", "Enter applies", seconds=300)
    assert max(line["batch_size"] for line in journal(cli, "asked") if line["kind"] == "probe") == 64
    found = re.search(r"▸ recommended\s+batch_size=(\d+)", screen)
    assert found is not None, screen
    terminal.press("Enter")
    terminal.until_shows(f"batch_size = {found[1]}; r runs it", f"•batch_size     {found[1]}")

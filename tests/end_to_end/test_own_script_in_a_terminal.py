"""A script of one's own as a person meets it: `o`, its flags, its preset, a real run of it, and a batch search."""

import json
import shlex
import sys

import pytest

from cli.command import COMMAND
from end_to_end.terminal import needs_tmux
from own_scripts.conftest import SCRIPTS

pytestmark = [needs_tmux, pytest.mark.long, pytest.mark.ci]


def test_o_finds_the_flags_r_runs_the_script_and_b_searches_its_batch(cli, terminal):
    terminal.open([*COMMAND])
    terminal.until_shows("No run yet", "o script")
    terminal.press("o")
    terminal.until_shows("The command that starts your script")
    terminal.press(shlex.join([sys.executable, str(SCRIPTS / "plain_torch.py")]), "Enter")
    terminal.until_shows("stopped at the parser: argparse, 8 flags", "▸ batch_size      --batch-size {}", "now 4")
    terminal.press("w")
    terminal.until_shows("Save this script as")
    terminal.press("Enter")
    terminal.until_shows("plain_torch is the next run", "script plain_torch.py", "script --batch-size {}")
    terminal.press("Right")
    terminal.until_shows("•batch_size     8")
    terminal.press("r")
    terminal.until_shows("runs to completion")
    terminal.press("y")
    # Beside other tests the run may be doubtful: ? instead of ✓.
    terminal.until_shows(" finished ", "step 12")
    (path,) = cli.home.glob("runs/*/result.json")
    result = json.loads(path.read_text())
    assert result["script"]["command"][-2:] == ["--batch-size", "8"], "the flag that the knob is mapped to"
    assert (result["preset"], result["steps"]["measured"]) == ("plain_torch", 9)
    terminal.press("b")
    terminal.until_shows("largest batch: plain_torch", "Enter starts the search")
    terminal.press("Enter")
    terminal.until_shows("  fits", seconds=300)
    terminal.press("s")
    terminal.until_shows("its journal is kept")

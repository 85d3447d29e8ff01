"""A command line with a home of its own for every test of a user's own script."""

import sys
from pathlib import Path

import pytest

from cli.command import Cli
from trainfast_runner.records.json_lines import read_all
from trainfast_runner.records.run_directory import rank_file
from trainfast_runner.records.run_lines import Step

SCRIPTS = Path(__file__).parent / "scripts"
PYTHON = sys.executable
TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
"""Starts two ranks."""
ARGPARSE = """
import argparse, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=16)
parser.add_argument("--eval-batch-size", type=int, default=64)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
parser.add_argument("--workers", "-j", type=int, default=2)
parser.add_argument("--grad-checkpointing", action="store_true")
parser.add_argument("--optim", default="adamw")
args = parser.parse_args()
pathlib.Path("trained").write_text("the training has begun")
"""
"""A script that writes the file `trained` after its parser has read the flags."""
LINEAR = (
    "import argparse, torch\nparser = argparse.ArgumentParser()\n"
    "parser.add_argument('--batch-size', type=int, default=4)\nargs = parser.parse_args()\n"
    "model = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "def loader(samples, size=args.batch_size):\n"
    "    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(samples, 4)), size)\n"
    "def step(rows):\n    model(rows).mean().backward()\n    optimizer.step()\n"
)
"""The first lines of a script with a flag for its batch."""


@pytest.fixture
def cli(tmp_path, cache):
    """The command line with nothing in its history."""
    return Cli(tmp_path / "home", tmp_path / "config", cache)


def run_script(cli, *words, code=0):
    """The result of `run --json` with these words, which must end with that exit code."""
    done = cli("run", "--json", *words)
    assert done.code == code, f"exit code {done.code}\n{done.out}\n{done.err}"
    return done.json


def script(name, *arguments):
    """The words behind `run` that start a script of this folder."""
    return ("--", PYTHON, str(SCRIPTS / name), *arguments)


def written(folder, text):
    """The words behind `run` or `presets new` that start a script of these lines."""
    path = folder / "train.py"
    path.write_text(text)
    return ("--", PYTHON, str(path))


def no_step(done):
    """The reason of a run that finished without a step."""
    assert done.code == 0, done.err
    reason = done.json["reason"]
    assert reason.startswith("no optimizer step seen: "), reason
    return reason


def counted(result):
    """All steps of rank 0, warm-up included."""
    return result["steps"]["measured"] + result["steps"]["warmup"]


def samples_of_steps(cli, result, rank=0):
    """The samples of the measured steps of a rank, as recorded: one number if all had as many."""
    steps = read_all(rank_file(cli.home / "runs" / result["run_id"], "steps", rank), Step)[0]
    return {step.samples for step in steps if not step.warmup}


def preset_of(cli, *words):
    """Make the preset `mine` of a script."""
    done = cli("presets", "new", "mine", *words)
    assert done.code == 0, done.err


def files_below(folder):
    """Every file of a folder and its folders."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def work(tmp_path, monkeypatch):
    """An empty folder that is the current one."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder

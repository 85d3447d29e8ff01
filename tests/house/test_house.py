"""A strategy, an optimizer or a knob is one entry and one file: each is added to a copy of the product and used there.

The copy trains, lists, refuses and exports what was added, and no other file of it differs from the original.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli.command import Done

ROOT = Path(__file__).parents[2]
RUNNER = "runner/trainfast_runner"
STRATEGIES = f"{RUNNER}/worker/catalog/strategies.py"
OPTIMIZERS = f"{RUNNER}/worker/catalog/optimizers.py"
KNOBS = f"{RUNNER}/settings/knobs.py"
SMALL = (
    *("data.kind=random", "model.hidden_size=32", "model.num_hidden_layers=1", "model.vocab_size=512"),
    *("batch_size=2", "seq_len=16", "steps=3", "timing_warmup=1"),
)
PATIENCE_S = 200.0
ASK = """
import contextlib, io, json, sys
from trainfast_tui.cli import main
from trainfast_runner.settings.knobs import KNOBS_BY_NAME

answers = []
for words in json.loads(sys.argv[1]):
    out, err, code = *(io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if words[0] == "help":
            knob = KNOBS_BY_NAME[words[1]]
            print(knob.what, knob.speed, knob.memory, knob.values.describe())
        else:
            try:
                code = main(words) or 0
            except SystemExit as end:
                code = end.code
    answers.append((code, *(stream.buffer.getvalue().decode() for stream in (out, err))))
print(json.dumps(answers))
"""


def run(*settings: str) -> list[str]:
    """The command line of a run of a small model."""
    return ["run", "tiny-llama", *(word for one in (*SMALL, *settings) for word in ("--set", one)), "--json"]


@dataclass
class House:
    """A copy of the product in an environment of its own, whose Python imports the copy."""

    folder: Path
    cache: Path

    @property
    def source(self) -> Path:
        """The folder that holds the copy's runner, tui and presets."""
        return self.folder / "source"

    def add_entry(self, file: str, table: str, entry: str) -> None:
        """Put an entry first in one of a file's tables, which begins with the line `table`."""
        path = self.source / file
        before, begin, after = path.read_text().partition(f"{table}\n")
        assert begin, f"{file} has no line {table!r}"
        path.write_text(before + begin + entry + after)

    def answers(self, *commands: Sequence[str]) -> list[Done]:
        """Exit code, output and error of several command lines, run one after the other in one process of the copy."""
        environment = {
            **os.environ,
            "TRAINFAST_HOME": str(self.folder / "home"),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "XDG_CACHE_HOME": str(self.cache),
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            [str(self.folder / "env" / "bin" / "python"), "-P", "-c", ASK, json.dumps(commands)],
            env=environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [Done(*answer) for answer in json.loads(done.stdout.splitlines()[-1])]

    def trained(self, *settings: str) -> dict[str, Any]:
        """The result of a run that finished."""
        [answer] = self.answers(run(*settings))
        assert answer.code == 0, answer
        result = answer.json
        assert (result["state"], result["steps"]) == ("finished", {"measured": 2, "warmup": 1})
        return result

    def refused(self, *runs: Sequence[str]) -> list[dict[str, Any]]:
        """The errors of runs that are refused before launch, each given by its settings."""
        answers = self.answers(*(run(*settings) for settings in runs))
        assert [answer.code for answer in answers] == [2] * len(runs), answers
        return [answer.json["error"] for answer in answers]

    def shown_for(self, knob: str, *forms: str) -> list[str]:
        """The help of a knob, and the last run in some of the forms of export."""
        answers = self.answers(["help", knob], *(["export", "last", "--to", form] for form in forms))
        assert [answer.code for answer in answers] == [0] * len(answers), answers
        return [answer.out for answer in answers]

    def changed(self) -> set[str]:
        """Files of the copy that the original has not, or has otherwise."""
        files = (path for path in self.source.rglob("*") if path.is_file() and path.suffix != ".pyc")
        copies = {path.relative_to(self.source) for path in files}
        assert len(copies) > 200
        same = {path for path in copies if (ROOT / path).exists()}
        different = {path for path in same if (ROOT / path).read_bytes() != (self.source / path).read_bytes()}
        return {str(path) for path in (copies - same) | different}


@pytest.fixture
def house(tmp_path: Path, cache: Path) -> House:
    """A fresh copy."""
    for part in ("runner", "tui", "presets"):
        shutil.copytree(ROOT / part, tmp_path / "source" / part)
    builder = venv.EnvBuilder(symlinks=True)
    builder.create(tmp_path / "env")
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")}))
    path = (tmp_path / "source" / "runner", tmp_path / "source" / "tui", sysconfig.get_path("purelib"))
    (packages / "house.pth").write_text("".join(f"{folder}\n" for folder in path))
    return House(tmp_path, cache)


@pytest.mark.long
@pytest.mark.ci
def test_a_strategy_is_one_entry_and_one_file(house: House) -> None:
    house.add_entry(
        STRATEGIES,
        "_STRATEGIES = (",
        """    StrategyEntry(
        name="mirror",
        path="mirror:Mirrored",
        wrapper="Mirror",
        what="one device, the model behind a mirror",
        fallback="single",
        memory_rule="Unshared",
        one_process=True,
        accelerate_type="NO",
    ),
""",
    )
    file = f"{RUNNER}/worker/strategies/mirror.py"
    (house.source / file).write_text(
        '''"""One process, one device, the model in a wrapper."""

from torch import nn

from .base import Strategy


class Mirror(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs, **fields):
        return self.model(*inputs, **fields)


class Mirrored(Strategy):
    def wrap(self, model):
        return Mirror(super().wrap(model))

    def actual_fields(self, module):
        return {**super().actual_fields(module), "wrapper": type(module).__name__}
'''
    )
    result = house.trained("strategy=mirror")
    assert (result["actual"]["wrapper"], result["knobs"]["strategy"]) == ("Mirror", "mirror")
    help, command, accelerate = house.shown_for("strategy", "command", "accelerate")
    assert "mirror: one device, the model behind a mirror." in help
    assert "--set strategy=mirror" in command
    assert "distributed_type: 'NO'" in accelerate
    wrong = ("engine=trainer", "compile=default", "devices=2")
    misspelt, *refused = house.refused(["strategy=miror"], *(["strategy=mirror", setting] for setting in wrong))
    assert misspelt["nearest"] == "mirror"
    for setting, error in zip(wrong, refused, strict=True):
        assert "strategy=mirror" in error["message"]
        assert setting in error["message"]
    assert house.changed() == {STRATEGIES, file}


@pytest.mark.long
@pytest.mark.parametrize("own", [True, False], ids=["in a file", "of torch.optim"])
def test_an_optimizer_is_one_entry_and_one_file_or_none(house: House, own: bool) -> None:
    name, class_name, path = ("signs", "Signs", ".signs:Signs") if own else ("nadam", "NAdam", "torch.optim:NAdam")
    arguments = () if own else (("decoupled_weight_decay", True),)
    house.add_entry(
        OPTIMIZERS,
        "_OPTIMIZERS = (",
        f"""    OptimizerEntry(
        name="{name}",
        path="{path}",
        arguments={arguments},
        class_name="{class_name}",
        what="one more way of descending",
        refuses=((SLICES, "counts signs"),),
    ),
""",
    )
    file = f"{RUNNER}/worker/model/signs.py"
    if own:
        (house.source / file).write_text(
            '''"""Descent by the gradient's signs."""

import torch


class Signs(torch.optim.Optimizer):
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter *= 1 - group["lr"] * group["weight_decay"]
                parameter -= group["lr"] * parameter.grad.sign()
'''
        )
    result = house.trained(f"optimizer={name}", "weight_decay=0.1")
    assert result["actual"]["optimizer"] == class_name
    help, command, arguments = house.shown_for("optimizer", "command", "training-args")
    assert f"{name}: one more way of descending." in help
    assert f"--set optimizer={name}" in command
    assert "optim=" not in arguments, "the Trainer has no name for it"
    [error] = house.refused([f"optimizer={name}", "strategy=fsdp", "devices=2"])
    assert f"optimizer={name} counts signs, and with strategy=fsdp" in error["message"]
    assert "strategy=ddp" in error["nearest"]
    assert house.changed() == ({OPTIMIZERS, file} if own else {OPTIMIZERS})


@pytest.mark.long
def test_a_knob_is_one_entry_and_its_handling(house: House) -> None:
    house.add_entry(
        KNOBS,
        "KNOBS: tuple[Knob, ...] = (",
        """    Knob(
        "lr_warmup",
        Whole(0, 1000, (0, 10, 100)),
        0,
        "optimization",
        "Steps in which the learning rate rises to lr.",
        "none",
        "none",
        same_as=Equivalent("warmup_steps", "get_scheduler(num_warmup_steps)"),
        only_with=("single", "ddp"),
    ),
""",
    )
    file = f"{RUNNER}/worker/model/optimizer.py"
    with (house.source / file).open("a") as handling:
        handling.write(
            """

_full_rate_at = rate_at


def rate_at(step: int, knobs: Knobs) -> float:
    warmup = knobs.others["lr_warmup"]
    return _full_rate_at(step, knobs) * min(1.0, step / warmup if warmup else 1.0)
"""
        )
    result = house.trained("lr_warmup=4", "lr=1e-3")
    lines = (house.folder / "home" / "runs" / result["run_id"] / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["lr"] for line in lines] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3])
    help, command, arguments = house.shown_for("lr_warmup", "command", "training-args")
    assert "Steps in which the learning rate rises to lr." in help
    assert "--set lr_warmup=4" in command
    assert "warmup_steps=4," in arguments
    negative, useless = house.refused(["lr_warmup=-1"], ["lr_warmup=4", "strategy=fsdp", "devices=2"])
    assert negative["key"] == "lr_warmup"
    assert "lr_warmup does nothing with strategy=fsdp" in useless["message"]
    assert house.changed() == {KNOBS, file}

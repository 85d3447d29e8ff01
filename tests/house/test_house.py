"""A strategy, an optimizer or a knob is one entry and one file: each is added to a copy of the product and used there.

The copy trains, lists, refuses and exports what was added, and no other file of it differs from the original.
"""

import json
import shutil
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.command import Cli

ROOT = Path(__file__).parents[2]
RUNNER = "runner/trainfast_runner"
STRATEGIES = f"{RUNNER}/worker/catalog/strategies.py"
OPTIMIZERS = f"{RUNNER}/worker/catalog/optimizers.py"
KNOBS = f"{RUNNER}/settings/knobs.py"
SMALL = (
    *("data.kind=random", "model.hidden_size=32", "model.num_hidden_layers=1", "model.vocab_size=512"),
    *("batch_size=2", "seq_len=16", "steps=3", "timing_warmup=1"),
)


def run(*settings):
    """The command line of a run of a small model."""
    return ["run", "tiny-llama", *(word for one in (*SMALL, *settings) for word in ("--set", one)), "--json"]


@dataclass
class House:
    """A copy of the product in an environment of its own, whose Python imports the copy."""

    folder: Path
    cache: Path

    @property
    def source(self):
        """The folder that holds the copy's runner, tui and presets."""
        return self.folder / "source"

    def add_entry(self, file, table, entry):
        """Put an entry first in one of a file's tables, which begins with the line `table`."""
        path = self.source / file
        before, begin, after = path.read_text().partition(f"{table}\n")
        assert begin, f"{file} has no line {table!r}"
        path.write_text(before + begin + entry + after)

    def answers(self, *commands):
        """How several command lines of the copy end, run one after the other."""
        cli = Cli(self.folder / "home", self.folder / "config", self.cache)
        python = str(self.folder / "env" / "bin" / "python")
        command = [python, "-P", "-m", "trainfast_tui.cli"]
        return [cli.cold(*words, command=command, PYTHONPATH="") for words in commands]

    def trained(self, *settings):
        """The result of a run that finished."""
        [answer] = self.answers(run(*settings))
        assert answer.code == 0, answer
        result = answer.json
        assert (result["state"], result["steps"]) == ("finished", {"measured": 2, "warmup": 1})
        return result

    def exported(self, *forms):
        """The last run in some of the forms of export."""
        answers = self.answers(*(["export", "last", "--to", form] for form in forms))
        assert [answer.code for answer in answers] == [0] * len(answers), answers
        return [answer.out for answer in answers]

    def changed(self):
        """Files of the copy that the original has not, or has otherwise."""
        files = (path for path in self.source.rglob("*") if path.is_file() and path.suffix != ".pyc")
        copies = {path.relative_to(self.source) for path in files}
        assert len(copies) > 200
        same = {path for path in copies if (ROOT / path).exists()}
        different = {path for path in same if (ROOT / path).read_bytes() != (self.source / path).read_bytes()}
        return {str(path) for path in (copies - same) | different}


@pytest.fixture
def house(tmp_path, cache):
    """A fresh copy."""
    for part in ("runner", "tui", "presets"):
        shutil.copytree(ROOT / part, tmp_path / "source" / part)
    venv.EnvBuilder(symlinks=True).create(tmp_path / "env")
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")}))
    path = (tmp_path / "source" / "runner", tmp_path / "source" / "tui", sysconfig.get_path("purelib"))
    (packages / "house.pth").write_text("".join(f"{folder}\n" for folder in path))
    return House(tmp_path, cache)


ENTRIES = {
    (STRATEGIES, "_STRATEGIES = ("): """    StrategyEntry(
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
    (OPTIMIZERS, "_OPTIMIZERS = ("): """    OptimizerEntry(
        name="signs",
        path=".signs:Signs",
        class_name="Signs",
        what="one more way of descending",
        refuses=((SLICES, "counts signs"),),
    ),
""",
    (KNOBS, "KNOBS: tuple[Knob, ...] = ("): """    Knob(
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
}
"""What is added by the file and the first line of its table."""
HANDLING = {
    f"{RUNNER}/worker/strategies/mirror.py": '''"""One process, one device, the model in a wrapper."""

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
''',
    f"{RUNNER}/worker/model/signs.py": '''"""Descent by the gradient's signs."""

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
''',
    f"{RUNNER}/worker/model/optimizer.py": """

_full_rate_at = rate_at


def rate_at(step: int, knobs: Knobs) -> float:
    warmup = knobs.others["lr_warmup"]
    return _full_rate_at(step, knobs) * min(1.0, step / warmup if warmup else 1.0)
""",
}
"""What is written at the end of a file, which may be a new one."""


@pytest.mark.long
@pytest.mark.ci
def test_a_strategy_an_optimizer_and_a_knob_are_one_entry_and_their_handling(house):
    for (file, table), entry in ENTRIES.items():
        house.add_entry(file, table, entry)
    for file, text in HANDLING.items():
        with (house.source / file).open("a") as stream:
            stream.write(text)
    assert house.trained("strategy=mirror")["actual"]["wrapper"] == "Mirror"
    (accelerate,) = house.exported("accelerate")
    assert "distributed_type: 'NO'" in accelerate
    result = house.trained("optimizer=signs", "weight_decay=0.1", "lr_warmup=4", "lr=1e-3")
    assert result["actual"]["optimizer"] == "Signs"
    lines = (house.folder / "home" / "runs" / result["run_id"] / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["lr"] for line in lines] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3])
    helps = {
        "strategy": "mirror: one device, the model behind a mirror.",
        "optimizer": "signs: one more way of descending.",
        "lr_warmup": "Steps in which the learning rate rises to lr.",
    }
    shown = house.answers(*(["knobs", knob] for knob in helps))
    assert all(text in " ".join(answer.out.split()) for text, answer in zip(helps.values(), shown, strict=True)), shown
    command, arguments = house.exported("command", "training-args")
    assert "--set optimizer=signs" in command
    assert "--set lr_warmup=4" in command
    assert "optim=" not in arguments, "the Trainer has no name for it"
    assert "warmup_steps=4," in arguments
    wrong = {
        "strategy=miror": "",
        "strategy=mirror engine=trainer": "engine=trainer",
        "strategy=mirror compile=default": "compile=default",
        "strategy=mirror devices=2": "strategy=mirror",
        "lr_warmup=-1": "lr_warmup",
        "lr_warmup=4 strategy=fsdp devices=2": "lr_warmup does nothing with strategy=fsdp",
        "optimizer=signs strategy=fsdp devices=2": "optimizer=signs counts signs, and with strategy=fsdp",
    }
    answers = house.answers(*(run(*words.split()) for words in wrong))
    errors = [answer.json["error"] for answer in answers if answer.code == 2]
    assert len(errors) == len(wrong), answers
    for expected, error in zip(wrong.values(), errors, strict=True):
        assert expected in error["message"]
    assert (errors[0]["nearest"], errors[4]["key"]) == ("mirror", "lr_warmup")
    assert "strategy=ddp" in errors[-1]["nearest"]
    assert house.changed() == {*HANDLING, *(file for file, _ in ENTRIES)}

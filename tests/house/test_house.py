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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RUNNER = "runner/trainfast_runner"
CATALOG = f"{RUNNER}/worker/catalog.py"
KNOBS = f"{RUNNER}/settings/knobs.py"
SMALL = (
    *("data.kind=random", "model.hidden_size=32", "model.num_hidden_layers=1", "model.vocab_size=512"),
    *("batch_size=2", "seq_len=16", "steps=3", "timing_warmup=1"),
)
PATIENCE_S = 200.0


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

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the copy's command line to its end."""
        environment = {
            **os.environ,
            "TRAINFAST_HOME": str(self.folder / "home"),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "XDG_CACHE_HOME": str(self.cache),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("PYTHONPATH", None)
        return subprocess.run(
            [str(self.folder / "env" / "bin" / "python"), "-P", *arguments],
            env=environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def run(self, *settings: str) -> tuple[int, dict[str, Any]]:
        """Exit code and result of a run of tiny-llama with these settings."""
        words = [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
        done = self.command("-m", "trainfast_tui.cli", "run", "tiny-llama", *words, "--json")
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout.splitlines()[-1])

    def trained(self, *settings: str) -> dict[str, Any]:
        """The result of a run that finished."""
        code, result = self.run(*settings)
        assert (code, result.get("state")) == (0, "finished"), result
        assert result["steps"] == {"measured": 2, "warmup": 1}
        return result

    def refused(self, *settings: str) -> dict[str, Any]:
        """The error of a run that was refused before launch."""
        code, answer = self.run(*settings)
        assert code == 2, answer
        error = answer["error"]
        assert isinstance(error, dict)
        return error

    def exported(self, to: str) -> str:
        """The last run in one of the forms of export."""
        done = self.command("-m", "trainfast_tui.cli", "export", "last", "--to", to)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def help_of(self, knob: str) -> str:
        """All that the help screen says of a knob."""
        words = "one.what, one.speed, one.memory, one.values.describe()"
        program = f"from trainfast_runner.settings.knobs import BY_NAME; one = BY_NAME[{knob!r}]; print({words})"
        done = self.command("-c", program)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def changed(self) -> set[str]:
        """Files of the copy that the original has not, or has otherwise."""
        copies = {path.relative_to(self.source) for path in self.source.rglob("*") if path.is_file()}
        assert len(copies) > 300
        same = {path for path in copies if (ROOT / path).exists()}
        different = {path for path in same if (ROOT / path).read_bytes() != (self.source / path).read_bytes()}
        return {str(path) for path in (copies - same) | different}


@pytest.fixture
def house(tmp_path: Path, cache: Path) -> House:
    """A fresh copy."""
    for part in ("runner", "tui", "presets"):
        shutil.copytree(ROOT / part, tmp_path / "source" / part, ignore=shutil.ignore_patterns("__pycache__"))
    builder = venv.EnvBuilder(symlinks=True)
    builder.create(tmp_path / "env")
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")}))
    path = (tmp_path / "source" / "runner", tmp_path / "source" / "tui", sysconfig.get_path("purelib"))
    (packages / "house.pth").write_text("".join(f"{folder}\n" for folder in path))
    return House(tmp_path, cache)


def test_a_strategy_is_one_entry_and_one_file(house: House) -> None:
    house.add_entry(
        CATALOG,
        "_STRATEGIES = (",
        """    StrategyEntry(
        name="mirror",
        path="mirror:Mirrored",
        wrapper="Mirror",
        what="one device, the model behind a mirror",
        instead="single",
        memory_rule="Sharing",
        one_process=True,
        accelerate="NO",
    ),
""",
    )
    file = f"{RUNNER}/worker/strategies/mirror.py"
    (house.source / file).write_text(
        '''"""One process, one device, the model in a wrapper."""

from torch import nn

from .single import Single


class Mirror(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs, **fields):
        return self.model(*inputs, **fields)


class Mirrored(Single):
    def wrap(self, model):
        return Mirror(super().wrap(model))

    def facts(self, module):
        return {**super().facts(module), "wrapper": type(module).__name__}
'''
    )
    result = house.trained("strategy=mirror")
    assert (result["actual"]["wrapper"], result["knobs"]["strategy"]) == ("Mirror", "mirror")
    said = house.help_of("strategy")
    assert "mirror: one device, the model behind a mirror." in said
    assert house.refused("strategy=miror")["nearest"] == "mirror"
    for wrong in ("engine=trainer", "compile=default", "devices=2"):
        message = house.refused("strategy=mirror", wrong)["message"]
        assert "strategy=mirror" in message
        assert wrong in message
    assert "--set strategy=mirror" in house.exported("command")
    assert 'distributed_type: "NO"' in house.exported("accelerate")
    assert house.changed() == {CATALOG, file}


@pytest.mark.parametrize("own", [True, False], ids=["in a file", "of torch.optim"])
def test_an_optimizer_is_one_entry_and_one_file_or_none(house: House, own: bool) -> None:
    name, live, path = ("signs", "Signs", ".signs:Signs") if own else ("radam", "RAdam", "torch.optim:RAdam")
    house.add_entry(
        CATALOG,
        "_OPTIMIZERS = (",
        f"""    OptimizerEntry(
        name="{name}",
        path="{path}",
        live="{live}",
        what="one more way of descending",
        refuses=((SLICES, "counts signs"),),
    ),
""",
    )
    file = f"{RUNNER}/worker/signs.py"
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
                parameter -= group["lr"] * parameter.grad.sign()
'''
        )
    result = house.trained(f"optimizer={name}")
    assert result["actual"]["optimizer"] == live
    assert f"{name}: one more way of descending." in house.help_of("optimizer")
    error = house.refused(f"optimizer={name}", "strategy=fsdp", "devices=2")
    assert f"optimizer={name} counts signs, and with strategy=fsdp" in error["message"]
    assert "strategy=ddp" in error["nearest"]
    assert f"--set optimizer={name}" in house.exported("command")
    assert "optim=" not in house.exported("training-args"), "the Trainer has no name for it"
    assert house.changed() == ({CATALOG, file} if own else {CATALOG})


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
    file = f"{RUNNER}/worker/optimizer.py"
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
    assert "Steps in which the learning rate rises to lr." in house.help_of("lr_warmup")
    assert house.refused("lr_warmup=-1")["key"] == "lr_warmup"
    message = house.refused("lr_warmup=4", "strategy=fsdp", "devices=2")["message"]
    assert "lr_warmup does nothing with strategy=fsdp" in message
    assert "--set lr_warmup=4" in house.exported("command")
    assert "warmup_steps=4," in house.exported("training-args")
    assert house.changed() == {KNOBS, file}

"""The way of a knob into a script before the run, and the short title of a script's command."""

from __future__ import annotations

import os
import sys

import pytest

from own_scripts.conftest import SCRIPTS
from trainfast_runner.running.scripts.command import read_command
from trainfast_runner.running.scripts.script_plan import plan_script
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.script_reach import Way, reach_of

MAPPED = {"batch_size": "--bs {}", "precision": {"bf16": "--bf16", "fp32": ""}}
TRAIN = str(SCRIPTS / "plain_torch.py")


@pytest.mark.parametrize(
    ("framework", "knob", "way", "words"),
    [
        ("torch", "batch_size", Way.FLAG, "--bs {}"),
        ("torch", "precision", Way.FLAG, "bf16: --bf16, fp32: nothing"),
        ("torch", "steps", Way.LAUNCH, "ends the script after so many steps"),
        ("torch", "workers", Way.FRAMEWORK, "by DataLoader's defaults"),
        ("HF Trainer", "lr", Way.FRAMEWORK, "by the fields of TrainingArguments"),
        ("accelerate", "grad_accum", Way.FRAMEWORK, "by accelerate's environment"),
        ("accelerate", "lr", Way.NONE, "without a flag accelerate takes only precision, grad_accum"),
        ("", "lr", Way.FRAMEWORK, "only if a Trainer, accelerate or Lightning takes it"),
        ("HF Trainer", "strategy", Way.NONE, "no flag of the script is mapped to it"),
    ],
)
def test_each_knob_has_its_way_into_the_script(framework: str, knob: str, way: Way, words: str) -> None:
    reach = reach_of(knob, ScriptPreset(places=dict(MAPPED), framework=framework))
    assert reach.way is way
    assert words in reach.words


@pytest.mark.parametrize(
    ("words", "title"),
    [
        ((sys.executable, TRAIN, "--lr", "3e-4"), "plain_torch.py --lr 3e-4"),
        ((sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", TRAIN), "plain_torch.py"),
        ((sys.executable, "-u", "-m", "json.tool", "a b"), "json.tool 'a b'"),
        ((sys.executable, "-c", "pass"), f"{sys.executable} -c pass"),
    ],
)
def test_a_title_is_the_script_and_its_own_arguments(words: tuple[str, ...], title: str) -> None:
    assert read_command(words).title == title


@pytest.mark.parametrize(("asked", "ranks"), [("3", 3), ("auto", os.cpu_count())])
def test_a_launcher_is_asked_for_a_number_of_ranks_or_for_one_on_each_device(asked: str, ranks: int) -> None:
    words = (sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={asked}", TRAIN)
    assert plan_script(words, ["devices=cpu"]).world_size == ranks

"""`--set` with a script of one's own: its flags by a preset's mapping, the Trainer's fields, DataLoader's defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.command import Cli
from own_scripts.conftest import PYTHON, run_script, samples_of_steps, script
from trainfast_runner.errors import UserError
from trainfast_runner.settings import script_preset

MAPPING = """
schema = 1
[script.knobs]
batch_size = "--batch-size {}"
[knobs]
batch_size = 8
"""


@pytest.fixture
def mapping(tmp_path: Path) -> Path:
    """A preset with the flag of one knob."""
    path = tmp_path / "mine.toml"
    path.write_text(MAPPING)
    return path


def test_flags_defaults_an_overridden_rate_and_the_steps_asked_for(cli: Cli, mapping: Path) -> None:
    asked = ("--preset", str(mapping), "--set", "batch_size=16", "--set", "pin_memory=off", "--set", "lr=0.5")
    endless = script("plain_torch.py", "--steps=100000", "--batch-size=2")
    result = run_script(cli, "--steps=8", *asked, *endless)
    assert result["steps"] == {"measured": 5, "warmup": 3}
    assert result["script"]["exit_code"] == 0
    assert "took" not in (cli.home / "runs" / result["run_id"] / "output.log").read_text(), "it ended at the step"
    assert result["knobs"]["batch_size"] == 16
    assert samples_of_steps(cli, result) == {16}
    assert result["script"]["overridden"] == [{"knob": "lr", "asked": 0.5, "ran": 0.001, "by": "torch"}]
    assert "lr: asked for 0.5, ran 0.001" in cli("runs", "show", "last").out


def test_knobs_that_the_script_may_not_take_are_named_before_the_start(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("print('trained')\n")
    done = cli("run", "--json", "--set", "lr=0.5", "--set", "precision=bf16", "--", PYTHON, str(path))
    assert done.code == 0, done.err
    assert done.err.startswith("lr, precision: set without a flag, so the script may keep its own;"), done.err
    assert [one["knob"] for one in done.json["script"]["overridden"]] == ["lr", "precision"]


def test_knob_that_cannot_reach_the_script_is_refused_before_the_start(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('schema = 1\n[script]\nframework = "torch"\n')
    refused = cli("run", "--preset", str(path), "--set", "lr=0.1", *script("plain_torch.py")).refused()
    assert "lr cannot reach the script: without a flag torch takes only workers, pin_memory" in refused
    assert "try presets new NAME --map lr=--FLAG -- COMMAND" in refused


@pytest.mark.long
def test_hard_coded_trainer_takes_the_knobs(cli: Cli) -> None:
    settings = {"batch_size": 2, "grad_accum": 3, "lr": 0.01, "checkpointing": "full", "precision": "bf16"}
    asked = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    result = run_script(cli, *asked, *script("hard_coded_trainer.py"))
    assert result["script"]["overridden"] == []
    assert result["actual"]["compute_dtype"] == "bfloat16"
    assert samples_of_steps(cli, result) == {6}


@pytest.mark.long
def test_accelerate_takes_its_environment(cli: Cli) -> None:
    result = run_script(cli, "--set", "precision=bf16", "--set", "seed=3", *script("with_accelerate.py"))
    assert result["actual"]["compute_dtype"] == "bfloat16"
    assert result["script"]["overridden"] == [{"knob": "seed", "asked": 3, "ran": None, "by": "accelerate"}]


@pytest.mark.parametrize(
    ("place", "words", "flags"),
    [
        ("--batch {}", ["python", "t.py"], ["--batch", "8"]),
        ("--batch {}", ["python", "t.py", "--batch", "2", "--lr", "1"], ["--batch", "8", "--lr", "1"]),
        ("--batch {}", ["python", "t.py", "--batch=2"], ["--batch=8"]),
        ("--batch={}", ["python", "t.py", "--batch", "2", "-v"], ["--batch=8", "-v"]),
        ("data.batch={}", ["python", "t.py", "data.batch=2"], ["data.batch=8"]),
    ],
)
def test_flag_takes_the_place_of_the_same_flag(place: str, words: list[str], flags: list[str]) -> None:
    preset = script_preset.ScriptPreset(places={"batch_size": place})
    assert preset.applied(words, {"batch_size": 8}) == ["python", "t.py", *flags]


def test_words_by_value() -> None:
    preset = script_preset.ScriptPreset(places={"precision": {"bf16": "--bf16", "fp32": ""}})
    assert preset.applied(["python", "t.py"], {"precision": "bf16"})[2:] == ["--bf16"]
    assert preset.applied(["python", "t.py"], {"precision": "fp32"})[2:] == []
    with pytest.raises(UserError, match="precision=fp16 has no words"):
        preset.applied(["python", "t.py"], {"precision": "fp16"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("schema = 2", "schema must be 1"),
        ("schema = 1\n[script]\ncomand = []", "mine.toml:3: unknown key 'comand'; did you mean command?"),
        ('schema = 1\n[script]\ncommand = "python train.py"', "command must be a list of words"),
        ('schema = 1\n[script]\nframework = "keras"', "mine.toml:3: there is no framework 'keras'"),
        ('schema = 1\n[script.knobs]\nbatch_sise = "--b {}"', "mine.toml:3: there is no knob 'batch_sise'"),
        ('schema = 1\n[script.knobs]\nbatch_size = "--b"', "batch_size needs words with {} for its value"),
        ("schema = 1\n[knobs]\nbatch_size = 0", "mine.toml:3: batch_size"),
    ],
)
def test_mistake_in_the_mapping_names_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        script_preset.load(str(path))
    assert said in refused.value.line()

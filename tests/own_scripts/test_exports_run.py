"""Every form of an export runs as exported in a script that takes it, and says so in its proof line."""

from __future__ import annotations

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cli.command import SMALL, Cli
from own_scripts.conftest import PYTHON, SCRIPTS, TORCHRUN, run_script
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings.spec import resolve

STEPS = 10
FACTOR = 20
"""Two processes of milliseconds a step on a busy machine; `benchmarks/exports.py` measures the ratio."""
PROOF = re.compile(r"ran as exported on \d{4}-\d\d-\d\d: ([\d.e+]+) samples/s; the exported run: ([\d.e+]+)")
SMALL_RUN = [*SMALL, "--set", f"steps={STEPS}", "--set", "model.vocab_size=512"]

NOT_IN_A_FORM = {
    "model and data are those of tiny-llama; --from PRESET takes others",
    "to run the script itself: trainfast-tui presets new NAME -- COMMAND",
}
"""The answer of an import to a form that names no model."""
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder is an empty one: a Trainer makes its output folder there."""
    monkeypatch.chdir(tmp_path)


def trained(cli: Cli, monkeypatch: pytest.MonkeyPatch, *settings: str) -> RunFile:
    """A small run with these settings; scripts that start after it find its model in their environment."""
    words = [word for one in settings for word in ("--set", one)]
    run = read_run_file(cli.home / "runs" / run_script(cli, "tiny-llama", *SMALL_RUN, *words)["run_id"])
    assert run is not None
    model = {name: value for name, value in run.model.items() if name != "family"}
    monkeypatch.setenv("MODEL", json.dumps(model))
    monkeypatch.setenv("SEQ_LEN", str(run.knobs["seq_len"]))
    monkeypatch.setenv("BATCH_SIZE", str(run.knobs["batch_size"]))
    return run


def proved(cli: Cli, run: RunFile, form: str, *words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The export with its proof, and the result of the run that gave it."""
    done = cli("export", run.run_id, "--to", form, "--prove", "--json", *words)
    assert done.code == 0, f"{done.out}\n{done.err}"
    result = cli("runs", "show", "last", "--json").json
    assert result["steps"]["measured"] + result["steps"]["warmup"] == STEPS
    if result["script"] is not None:
        assert result["script"]["overridden"] == []
    return done.json, result


def assert_same_speed(proof: str) -> None:
    """Both speeds are in the line, and within a wide factor."""
    found = PROOF.fullmatch(proof)
    assert found is not None, proof
    assert 1 / FACTOR < float(found[1]) / float(found[2]) < FACTOR


def imported(cli: Cli, text: str, tmp_path: Path) -> dict[str, Any]:
    """The knobs of the preset that an import of the text makes."""
    source, preset = tmp_path / "exported.txt", tmp_path / "imported.toml"
    source.write_text(text)
    done = cli("import", str(source), "-o", str(preset))
    assert done.code == 0, done.err
    assert set(done.err.splitlines()) <= NOT_IN_A_FORM, "every setting is understood"
    return dict(resolve(str(preset)).knobs)


def knobs_of(run: RunFile, *names: str) -> dict[str, Any]:
    return {name: run.knobs[name] for name in names}


TRAINED = ("batch_size", "grad_accum", "precision", "optimizer", "lr", "lr_schedule", "grad_clip", "steps", "workers")


@pytest.mark.ci
@pytest.mark.long
def test_training_arguments_run_in_a_trainer_that_imports_them(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(cli, monkeypatch, "engine=trainer", "grad_accum=2", "precision=bf16")
    shutil.copy(SCRIPTS / "exported_trainer.py", tmp_path)
    assert cli("export", run.run_id, "--to", "training-args", "-o", str(tmp_path)).code == 0
    exported, result = proved(
        cli, run, "training-args", "-o", str(tmp_path), "--", PYTHON, str(tmp_path / "exported_trainer.py")
    )
    assert_same_speed(exported["proof"])
    assert result["script"]["framework"] == "HF Trainer"
    assert (tmp_path / "training_args.py").read_text().startswith(f"# {exported['proof']}\n")
    knobs = imported(cli, exported["text"], tmp_path)
    assert {name: knobs[name] for name in TRAINED} == knobs_of(run, *TRAINED)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_flags_run_in_a_trainer_by_python_and_by_torchrun(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    devices = ["devices=cpu:2"] if strategy == "ddp" else []
    run = trained(cli, monkeypatch, "engine=trainer", f"strategy={strategy}", *devices)
    script = str(SCRIPTS / "exported_trainer.py")
    exported, result = proved(cli, run, "torchrun", "--", PYTHON, script, f"--output_dir={tmp_path / 'out'}")
    assert_same_speed(exported["proof"])
    assert result["actual"]["world_size"] == run.world_size
    knobs = imported(cli, exported["text"], tmp_path)
    assert {name: knobs[name] for name in TRAINED} == knobs_of(run, *TRAINED)


@pytest.mark.long
def test_accelerate_launches_a_loop_with_the_file(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(cli, monkeypatch, "engine=accelerate", "precision=bf16")
    exported, result = proved(cli, run, "accelerate", "--", PYTHON, str(SCRIPTS / "exported_accelerate.py"))
    assert_same_speed(exported["proof"])
    assert result["actual"]["compute_dtype"] == "bfloat16"
    assert imported(cli, exported["text"], tmp_path)["precision"] == "bf16"


@pytest.mark.long
@pytest.mark.parametrize("form", ["command", "preset"])
def test_a_command_and_a_preset_run_by_themselves(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    run = trained(cli, monkeypatch, "grad_accum=2")
    exported, result = proved(cli, run, form)
    assert_same_speed(exported["proof"])
    assert {**result["knobs"], "devices": None} == {**run.knobs, "devices": None}
    assert f"# {exported['proof']}" in cli("export", run.run_id, "--to", form).out


@pytest.mark.long
@needs_deepspeed
def test_deepspeeds_json_runs_in_a_loop_under_torchrun(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    run = trained(cli, monkeypatch, "strategy=zero2", "devices=cpu:2", "grad_accum=2")
    assert cli("export", run.run_id, "--to", "deepspeed", "-o", str(tmp_path)).code == 0
    json_flag = f"--deepspeed={tmp_path / 'deepspeed.json'}"
    typed = (*TORCHRUN, str(SCRIPTS / "exported_deepspeed.py"), json_flag)
    exported, result = proved(cli, run, "deepspeed", "--", *typed)
    assert_same_speed(exported["proof"])
    assert (result["actual"]["zero_stage"], result["actual"]["world_size"]) == (2, 2)
    assert "ran as exported" not in exported["text"], "JSON has no comments"
    assert exported["proof"] in cli("export", run.run_id, "--to", "deepspeed").err
    knobs = imported(cli, exported["text"], tmp_path)
    assert {name: knobs[name] for name in ("strategy", "batch_size", "grad_accum")} == knobs_of(
        run, "strategy", "batch_size", "grad_accum"
    )


@pytest.mark.long
@needs_deepspeed
def test_a_trainer_takes_deepspeed_by_flags_under_torchrun(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    run = trained(cli, monkeypatch, "strategy=zero2", "devices=cpu:2")
    script = str(SCRIPTS / "exported_trainer.py")
    exported, result = proved(cli, run, "torchrun", "--", PYTHON, script, f"--output_dir={tmp_path / 'out'}")
    assert "not compared: HF Trainer took the steps" in exported["proof"]
    assert (result["actual"]["zero_stage"], result["actual"]["world_size"]) == (2, 2)


@pytest.mark.long
def test_proof_is_refused_or_waits_while_another_run_uses_the_device(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(cli, monkeypatch)
    endless = tmp_path / "steps.py"
    endless.write_text("import time, trainfast_door\nwhile True:\n    trainfast_door.step()\n    time.sleep(0.01)\n")
    other = cli("run", "--detach", "--samples-per-step=2", "--", PYTHON, str(endless)).out.strip()
    prove = ("export", run.run_id, "--to", "command", "--prove")
    text = cli(*prove).refused()
    assert f"the CPU is in use by {other}" in text
    assert "or --wait" in text
    waiting = cli.start(*prove, "--wait", "--json")
    waiting.until_printed("waiting for")
    cli("stop", other)
    done = waiting.end()
    assert done.code == 0, done.err
    assert_same_speed(done.json["proof"])


@pytest.mark.long
def test_a_script_that_overrides_the_export_gets_no_proof(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(cli, monkeypatch, "engine=trainer")
    script = str(SCRIPTS / "hard_coded_trainer.py")
    done = cli("export", run.run_id, "--to", "training-args", "--prove", "--", PYTHON, script)
    assert done.code == 4
    assert "did not run as exported: " in done.err
    assert "batch_size=2 ran as 4" in done.err
    assert "ran as exported" not in cli("export", run.run_id, "--to", "training-args").out


@pytest.mark.long
def test_a_scripts_own_run_runs_again_by_its_command_and_by_its_preset(cli: Cli, tmp_path: Path) -> None:
    mapping = tmp_path / "mine.toml"
    mapping.write_text('schema = 1\n[script.knobs]\nbatch_size = "--batch-size {}"\n')
    asked = ("--preset", str(mapping), "--set", "batch_size=8", f"--steps={STEPS}")
    first = run_script(cli, *asked, "--", PYTHON, str(SCRIPTS / "plain_torch.py"), "--batch-size=2")
    run = read_run_file(cli.home / "runs" / first["run_id"])
    assert run is not None
    for form in ("command", "preset"):
        exported, result = proved(cli, run, form)
        assert_same_speed(exported["proof"])
        assert result["script"]["command"] == first["script"]["command"]
        assert "--batch-size=8" in result["script"]["command"]

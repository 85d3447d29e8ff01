"""Every form of an export runs in a script that takes it, with the settings of the exported run."""

import json
import shlex
import shutil
from importlib.util import find_spec

import pytest

from cli.command import SMALL
from own_scripts.conftest import PYTHON, SCRIPTS, TORCHRUN, run_script
from trainfast_runner.records.run_directory import read_run_file, read_worker_lines
from trainfast_runner.records.worker_lines import ScriptLine, newest_of_first_rank

STEPS = 10
SMALL_RUN = [*SMALL, "--set", f"steps={STEPS}", "--set", "model.vocab_size=512"]
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    """The current folder is an empty one: a Trainer makes its output folder there."""
    monkeypatch.chdir(tmp_path)


def trained(cli, monkeypatch, *settings):
    """A small run with these settings; scripts that start after it find its model in their environment."""
    words = [word for one in settings for word in ("--set", one)]
    run = read_run_file(cli.home / "runs" / run_script(cli, "tiny-llama", *SMALL_RUN, *words)["run_id"])
    model = {name: value for name, value in run.model.items() if name != "family"}
    monkeypatch.setenv("MODEL", json.dumps(model))
    monkeypatch.setenv("SEQ_LEN", str(run.knobs["seq_len"]))
    monkeypatch.setenv("BATCH_SIZE", str(run.knobs["batch_size"]))
    return run


def exported(cli, run, form, folder):
    """The text of the export, whose files lie in the folder."""
    assert cli("export", run.run_id, "--to", form, "-o", str(folder)).code == 0
    return str(cli("export", run.run_id, "--to", form, "--json").json["text"])


def started(cli, *command):
    """The result of the script's run on the CPU, and the settings that its live objects had."""
    result = run_script(cli, f"--steps={STEPS}", "--set", "devices=cpu", "--", *command)
    assert result["script"]["overridden"] == []
    line = newest_of_first_rank(read_worker_lines(cli.home / "runs" / result["run_id"]), ScriptLine)
    return result, line.ran or {}


def words_of(text, script):
    """The words of an exported command, with the script in its placeholder's place."""
    words = shlex.split(text, comments=True)
    if words[0] == "env":
        words = words[next(index for index, word in enumerate(words) if index and "=" not in word) :]
    launcher = {"python": (PYTHON,), "torchrun": TORCHRUN}[words[0]]
    return [*launcher, script, *words[words.index("train.py") + 1 :]]


TRAINED = ("batch_size", "grad_accum", "precision", "lr", "workers")


def assert_same(ran, run):
    assert {name: ran[name] for name in TRAINED} == {name: run.knobs[name] for name in TRAINED}


@pytest.mark.ci
@pytest.mark.long
def test_training_arguments_run_in_a_trainer_that_imports_them(cli, tmp_path, monkeypatch):
    run = trained(cli, monkeypatch, "engine=trainer", "grad_accum=2", "precision=bf16")
    shutil.copy(SCRIPTS / "exported_trainer.py", tmp_path)
    exported(cli, run, "training-args", tmp_path)
    result, ran = started(cli, PYTHON, str(tmp_path / "exported_trainer.py"))
    assert result["script"]["framework"] == "HF Trainer"
    assert_same(ran, run)


@pytest.mark.long
@pytest.mark.parametrize(
    "lever",
    ["checkpointing=full", "checkpointing=every-2", "compile=default", "optimizer=adamw-8bit-ao", "method=lora"],
)
def test_a_lever_runs_in_a_trainer_as_it_was_exported(cli, tmp_path, monkeypatch, lever):
    run = trained(cli, monkeypatch, lever, "model.num_hidden_layers=3")
    shutil.copy(SCRIPTS / "exported_trainer.py", tmp_path)
    exported(cli, run, "training-args", tmp_path)
    result, ran = started(cli, PYTHON, str(tmp_path / "exported_trainer.py"))
    knob, _, value = lever.partition("=")
    assert (result["actual"] if knob == "method" else ran)[knob] == value
    assert_same(ran, run)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_flags_run_in_a_trainer_by_python_and_by_torchrun(cli, tmp_path, monkeypatch, strategy):
    devices = ["devices=cpu:2"] if strategy == "ddp" else []
    run = trained(cli, monkeypatch, "engine=trainer", f"strategy={strategy}", *devices)
    text = exported(cli, run, "torchrun", tmp_path)
    result, ran = started(cli, *words_of(text, str(SCRIPTS / "exported_trainer.py")))
    assert result["actual"]["world_size"] == run.world_size
    assert_same(ran, run)


@pytest.mark.long
def test_accelerate_launches_a_loop_with_the_file(cli, tmp_path, monkeypatch):
    run = trained(cli, monkeypatch, "engine=accelerate", "precision=bf16")
    exported(cli, run, "accelerate", tmp_path)
    launcher = (PYTHON, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "accelerate.yaml"))
    result, _ = started(cli, *launcher, str(SCRIPTS / "exported_accelerate.py"))
    assert result["actual"]["compute_dtype"] == "bfloat16"


@pytest.mark.long
@needs_deepspeed
def test_deepspeeds_json_runs_in_a_loop_and_in_a_trainer_under_torchrun(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    run = trained(cli, monkeypatch, "strategy=zero2", "devices=cpu:2", "grad_accum=2")
    exported(cli, run, "deepspeed", tmp_path)
    json_flag = f"--deepspeed={tmp_path / 'deepspeed.json'}"
    result, _ = started(cli, *TORCHRUN, str(SCRIPTS / "exported_deepspeed.py"), json_flag)
    assert (result["actual"]["zero_stage"], result["actual"]["world_size"]) == (2, 2)
    (tmp_path / "deepspeed.json").unlink()
    text = exported(cli, run, "torchrun", tmp_path)
    result, _ = started(cli, *words_of(text, str(SCRIPTS / "exported_trainer.py")))
    assert (result["actual"]["zero_stage"], result["actual"]["world_size"]) == (2, 2)


@pytest.mark.long
def test_a_scripts_own_run_runs_again_by_its_command_and_by_its_preset(cli, tmp_path):
    mapping = tmp_path / "mine.toml"
    mapping.write_text('schema = 1\n[script.knobs]\nbatch_size = "--batch-size {}"\n')
    asked = ("--preset", str(mapping), "--set", "batch_size=8", f"--steps={STEPS}")
    first = run_script(cli, *asked, "--", PYTHON, str(SCRIPTS / "plain_torch.py"), "--batch-size=2")
    run = read_run_file(cli.home / "runs" / first["run_id"])
    words = shlex.split(exported(cli, run, "command", tmp_path), comments=True)
    exported(cli, run, "preset", tmp_path / "preset")
    preset = str(next((tmp_path / "preset").glob("*.toml")))
    for again in (("--", *words), (preset,)):
        result = run_script(cli, f"--steps={STEPS}", *again)
        assert result["script"]["command"] == first["script"]["command"]
        assert "--batch-size=8" in result["script"]["command"]

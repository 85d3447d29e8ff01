"""`export`: settings that another program takes, and that come back to the same run."""

import os
import runpy
import shlex
from unittest.mock import patch

import pytest

from cli.command import Cli, Done
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings.spec import RunSpec, resolve

# The run that is exported is the one those tests look at too.
pytestmark = pytest.mark.xdist_group("trainings-of-the-command-line")


def exported(trained: tuple[Cli, Done], form: str) -> str:
    cli, _ = trained
    done = cli("export", "last", "--to", form, "--json")
    assert done.code == 0, done.err
    assert done.json["to"] == form
    return str(done.json["text"])


def recorded(trained: tuple[Cli, Done]) -> RunFile:
    cli, done = trained
    run = read_run_file(Home(cli.home).directory(done.json["run_id"]))
    assert run is not None
    return run


def assert_same(spec: RunSpec, run: RunFile) -> None:
    assert spec.model == run.model
    assert {**spec.knobs, "devices": None} == {**run.knobs, "devices": None}


def test_the_command_starts_the_same_run(trained):
    words = shlex.split(exported(trained, "command"), comments=True)
    assert words[:3] == ["trainfast-tui", "run", "tiny-llama"]
    assert_same(resolve(words[2], words[4::2]), recorded(trained))
    assert words[3::2] == ["--set"] * len(words[4::2])


def test_the_preset_is_the_same_run(trained, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(exported(trained, "preset"))
    assert_same(resolve(str(file)), recorded(trained))


@pytest.mark.ci
@pytest.mark.long
def test_training_arguments_are_taken_by_the_trainer(trained, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    script = tmp_path / "script.py"
    script.write_text(exported(trained, "training-args"))
    monkeypatch.chdir(tmp_path)
    # In this process, which may have imported transformers before; it leaves variables for its launches.
    with patch.dict(os.environ):
        args = runpy.run_path(str(script))["args"]
    assert (args.per_device_train_batch_size, args.max_steps, args.learning_rate) == (4, 12, 3e-2)
    assert args.max_grad_norm == 0.0
    assert "# seq_len=16: max_seq_length (of the data)" in script.read_text()


def test_accelerate_takes_its_own(trained, tmp_path):
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    file = tmp_path / "accelerate.yaml"
    file.write_text(exported(trained, "accelerate"))
    config = config_args.load_config_from_file(str(file))
    assert (config.distributed_type, config.mixed_precision, config.num_processes) == ("NO", "no", 1)


def test_the_files_are_written_once(trained, tmp_path):
    cli, _ = trained
    words = ("export", "last", "--to", "torchrun", "-o", str(tmp_path / "mine"))
    done = cli(*words)
    assert done.out.splitlines() == [str(tmp_path / "mine" / "train.sh")]
    command = (tmp_path / "mine" / "train.sh").read_text().splitlines()[-1]
    assert command.startswith("env MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=268435456 python train.py ")
    assert "train.sh exists already" in cli(*words).refused()


def test_a_file_that_cannot_be_written_is_a_failure(trained, tmp_path):
    cli, _ = trained
    (tmp_path / "train.sh").symlink_to("missing/train.sh")
    done = cli("export", "last", "--to", "torchrun", "-o", str(tmp_path))
    assert done.code == 4
    assert done.err == f"trainfast-tui: cannot write into {tmp_path}: No such file or directory\n"

"""Input that cannot be used: one line that names the file, the key and the nearest name, and no run left behind."""

import errno
import os
import pty
import stat
import subprocess
import venv
from pathlib import Path

import pytest
from cuda_python import cuda_python

from cli.command import COMMAND
from trainfast_runner.errors import UserError
from trainfast_runner.records.home import home_error


@pytest.mark.parametrize(
    ("setting", "expected", "key", "nearest"),
    [
        ("batchsize=8", "there is no knob 'batchsize'", "batchsize", "batch_size"),
        ("batch_size=many", "batch_size: must be a whole number, not 'many'", "batch_size", None),
        ("batch_size=0", "batch_size: 0 is out of range", "batch_size", None),
        ("precision=bf17", "precision: 'bf17' is not one of its values", "precision", "bf16"),
        ("memory_limit=2", "memory_limit: '2' is not a number of bytes with a unit", "memory_limit", None),
        ("steps", "--set takes knob=value", "steps", None),
        ("dta.kind=text", "there is no section 'dta'", "dta.kind", "data"),
        ("data.knd=text", "there is no data field 'knd'", "data.knd", "kind"),
        ("timing_warmup=50", "leaves no step of steps=50 to measure", "timing_warmup", "timing_warmup=3"),
        ("devices=4", "strategy=single trains on one device and devices=4 asks for 4", "strategy", None),
        ("devices=cpux", "devices: 'cpux' is not cpu or cpu:N", "devices", "cpu"),
        ("devices=cpu:", "devices: 'cpu:' is not cpu or cpu:N", "devices", "cpu"),
        ("devices=CPU", "devices: 'CPU' is not cpu or cpu:N; did you mean cpu?", "devices", "cpu"),
        ("devices=cpu:0", "devices: cpu:0 asks for 0 processes on the CPU", "devices", "cpu:1"),
        ("devices=cpu:99", "devices: cpu:99 asks for 99 processes on the CPU", "devices", "cpu:8"),
        ("memory_limit=1 gx", "1536m, 1536MiB, 2g, 2GiB (binary), 1.5GB (decimal)", "memory_limit", None),
        ("watch=7", "watch=7: there is no GPU 7", "watch", None),
        ("seq_len=100000", "seq_len=100000 is longer than the model's", "seq_len", None),
        ("model.vocab_size=5", "needs at least 300", "model.vocab_size", None),
        ("model.hidden_sise=64", "hidden_sise", "model.hidden_sise", "hidden_size"),
        ("model.num_layers=3", "did you mean num_hidden_layers?", "model.num_layers", "num_hidden_layers"),
    ],
)
def test_a_setting_that_cannot_be(cli, setting, expected, key, nearest):
    done = cli("run", "tiny-llama", "--set", setting, "--json")
    assert expected in done.refused()
    assert done.json["error"]["key"] == key
    if nearest is not None:
        assert done.json["error"]["nearest"] == nearest
    assert cli("runs", "list", "--json").json["runs"] == []


def test_four_devices_where_there_are_two(cli, nvml_library, tmp_path):
    python = cuda_python(tmp_path / "bin")
    machine = {"LD_LIBRARY_PATH": str(nvml_library), "NVML_STAND_IN_GPUS": "2", "CUDA_VISIBLE_DEVICES": "0,1"}
    settings = ["--set", "strategy=ddp", "--set", "devices=4", "--python", python]
    done = cli("run", "tiny-llama", *settings, "--json", **machine)
    assert "devices=4, but there are 2" in done.refused()
    assert done.json["error"]["nearest"] == "devices=2"


def test_a_python_without_torch_gets_the_install_command(cli, tmp_path):
    venv.create(tmp_path / "empty", with_pip=False, symlinks=True)
    line = cli("run", "tiny-llama", "--python", str(tmp_path / "empty")).refused()
    assert f"install with: {tmp_path}/empty/bin/python -m pip install torch transformers tokenizers" in line


def test_a_slow_training_python_is_waited_for_in_words(cli, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 2\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [*COMMAND, "run", "tiny-llama", "--python", str(python)],
        env={**cli.environment, "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    text = os.read(ours, 65536).decode()
    os.close(ours)
    assert done.returncode == 2
    assert text.index("checking…") < text.index("\x1b[K") < text.index("it exited without reporting an error")


OTHER_COMMANDS = ("search max-batch", "search best", "presets show")


@pytest.mark.parametrize(
    "command",
    ["predict", "run", *(pytest.param(one, marks=[pytest.mark.ci, pytest.mark.long]) for one in OTHER_COMMANDS)],
)
def test_case_21_a_speech_model_is_refused_before_launch(cli, tmp_path, command):
    preset = tmp_path / "speech.toml"
    sizes = "d_model = 32\nencoder_layers = 1\ndecoder_layers = 1\nvocab_size = 4000"
    data = '[data]\nkind = "text"\nobjective = "seq2seq"\n'
    preset.write_text(f'schema = 1\ntitle = "speech"\n[model]\nfamily = "whisper"\n{sizes}\n{data}')
    done = cli(*command.split(), str(preset))
    text = done.out if command == "presets show" else done.refused()
    assert "whisper is not supported" in text
    assert "did you mean" not in text
    assert not list(cli.home.glob("runs/*"))


def test_an_error_names_at_most_twenty_values():
    line = UserError("no such thing", allowed=[f"value{number}" for number in range(300)]).line()
    assert line.count("value") == 20
    assert line.endswith("… and 280 more)")


def test_a_home_on_a_full_disk_has_two_cures():
    line = home_error(Path("/x"), OSError(errno.ENOSPC, "")).line()
    assert line == "cannot use /x: the disk is full: free some space, or set TRAINFAST_HOME to another directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_home_without_permission(cli, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    assert "no permission" in cli("run", "tiny-llama", TRAINFAST_HOME=str(locked / "home")).refused()


@pytest.mark.ci
@pytest.mark.long
def test_a_limit_below_the_parameters_is_an_answer_without_a_run(cli):
    done = cli("run", "tiny-llama", "--set", "memory_limit=1MiB", "--json")
    assert done.code == 3
    assert "is below what the 3,344,064 parameters alone need" in done.json["error"]["message"]
    assert cli("runs", "list", "--json").json["runs"] == []

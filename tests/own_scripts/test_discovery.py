"""`presets new NAME -- COMMAND`: the flags of real scripts, the mapping that is proposed, and what is refused."""

import tomllib
import venv
from importlib.util import find_spec

import pytest

from own_scripts.conftest import ARGPARSE, PYTHON, SCRIPTS, run_script, samples_of_steps, script, written
from trainfast_runner.machine.processes import identify
from trainfast_runner.records.run_file import Flag
from trainfast_runner.settings.script_preset import propose


def discovered(cli, *words):
    """Return the JSON of `presets new mine --json` with these words."""
    done = cli("presets", "new", "mine", "--json", *words)
    assert done.code == 0, done.err
    return done.json


def mapping(found):
    """The flags of the knobs."""
    return {one["knob"]: one["flag"] for one in found["mapping"]}


def test_argparse_flags_are_listed_and_mapped(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = discovered(cli, *written(tmp_path, ARGPARSE), "--bs=8")
    assert (found["stopped_at"], found["parser"], len(found["flags"])) == ("the parser", "argparse", 7)
    assert mapping(found) == {
        "batch_size": "--bs {}",
        "grad_accum": "--accum {}",
        "workers": "--workers {}",
        "checkpointing": {"full": "--grad-checkpointing", "off": ""},
        "precision": {"fp32": "--dtype float32", "bf16": "--dtype bfloat16"},
    }
    assert found["mapping"][0]["reason"] == "--bs is a usual name for batch_size; default 16, this command gives 8"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["train.py"], "nothing has trained"
    preset = tomllib.loads((cli.presets / "mine.toml").read_text())
    assert (preset["script"]["cwd"], preset["script"]["command"][-1]) == (str(tmp_path), "--bs=8")
    known = {"batch_size": 8, "grad_accum": 1, "precision": "fp32", "workers": 2, "checkpointing": "off"}
    assert preset["knobs"] == known


def test_f16_a_child_in_its_own_session_without_our_environment_is_ended_and_the_command_is_told_before(cli, tmp_path):
    pid = tmp_path / "pid"
    daemon = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    lines = (
        "import os, subprocess, sys, time\n"
        f"command = [sys.executable, '-c', {daemon!r}]\n"
        "if os.fork() == 0:\n"
        "    subprocess.Popen(command, start_new_session=True, env={}), os._exit(0)\n"
        f"while not os.path.exists({str(pid)!r}) or not os.path.getsize({str(pid)!r}):\n    time.sleep(0.01)\n"
    )
    command = written(tmp_path, lines + ARGPARSE)
    done = cli("presets", "new", "mine", *command)
    assert done.code == 0, done.err
    told = done.err.splitlines()[0]
    assert told.startswith(f"running {' '.join(command[1:])} up to its argument parser")
    assert "such as deleting or writing files" in told
    assert identify(int(pid.read_text())) is None


@pytest.mark.ci
@pytest.mark.long
def test_preset_of_a_script_runs_by_name_from_anywhere(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(SCRIPTS)
    discovered(cli, "--", PYTHON, "plain_torch.py", "--steps=8")
    monkeypatch.chdir(tmp_path)
    result = run_script(cli, "mine", "--set", "batch_size=16")
    assert (result["preset"], result["knobs"]["batch_size"]) == ("mine", 16)
    assert samples_of_steps(cli, result) == {16}
    assert result["script"]["overridden"] == []
    assert cli("runs", "compare", "last", result["run_id"]).code == 0


def test_parser_for_a_configuration_file_is_not_the_last(cli, tmp_path):
    lines = (
        "import argparse\nfirst = argparse.ArgumentParser(add_help=False)\nfirst.add_argument('--config')\n"
        "known, rest = first.parse_known_args()\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--batch-size', type=int, default=4)\nparser.parse_args(rest)\n1 / 0\n"
    )
    found = discovered(cli, *written(tmp_path, lines), "--batch-size=2")
    assert [flag["names"] for flag in found["flags"]] == [["--batch-size"], ["--config"]]
    assert found["mapping"][0]["value"] == 2


def test_a_first_parser_stays_named_where_the_script_trains_next(cli, tmp_path):
    lines = (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--bs', type=int, default=4)\n"
        "parser.parse_known_args(['--other'])\nimport torch\ntorch.optim.SGD([torch.ones(1)], lr=0.1)\n"
    )
    found = discovered(cli, *written(tmp_path, lines))
    assert (found["stopped_at"], found["parser"]) == ("the first optimizer", "argparse")
    assert (mapping(found), found["framework"]) == ({"batch_size": "--bs {}"}, "torch")


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)\n"])
def test_a_script_that_ends_by_itself_shows_its_framework(cli, tmp_path, end):
    (tmp_path / "accelerate.py").write_text("class Accelerator:\n    pass\n")
    found = discovered(cli, *written(tmp_path, f"from accelerate import Accelerator\n{end}"))
    assert (found["stopped_at"], found["framework"]) == ("its end", "accelerate")


def test_subcommand_has_its_own_flags(cli, tmp_path):
    lines = (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--seed', type=int, default=1)\n"
        "commands = parser.add_subparsers()\ntrain = commands.add_parser('train')\n"
        "train.add_argument('--lr', type=float, default=0.1)\nparser.parse_args()\n"
    )
    found = discovered(cli, *written(tmp_path, lines), "train")
    assert mapping(found) == {"lr": "--lr {}", "seed": "--seed {}"}


@pytest.mark.skipif(find_spec("hydra") is None, reason="Hydra is not installed")
def test_hydra(cli, tmp_path):
    (tmp_path / "config.yaml").write_text("data:\n  batch_size: 8\n  workers: 2\noptimizer:\n  lr: 0.1\n")
    lines = (
        "import hydra\n@hydra.main(version_base=None, config_path='.', config_name='config')\n"
        "def train(config):\n    raise RuntimeError('trained')\ntrain()\n"
    )
    found = discovered(cli, *written(tmp_path, lines), "data.batch_size=4")
    assert found["parser"] == "Hydra"
    assert mapping(found) == {"batch_size": "data.batch_size={}", "workers": "data.workers={}", "lr": "optimizer.lr={}"}
    assert not (tmp_path / "outputs").exists()


@pytest.mark.long
def test_hf_argument_parser(cli, tmp_path):
    output = tmp_path / "out"
    found = discovered(
        cli, *script("hf_argument_parser.py", f"--output_dir={output}", "--per_device_train_batch_size=2", "--bf16")
    )
    assert found["parser"] == "HfArgumentParser"
    flags = mapping(found)
    assert flags["batch_size"] == "--per_device_train_batch_size {}"
    assert flags["grad_accum"] == "--gradient_accumulation_steps {}"
    assert flags["workers"] == "--dataloader_num_workers {}"
    assert flags["precision"] == {"bf16": "--bf16 true", "fp16": "--fp16 true", "fp32": "--bf16 false --fp16 false"}
    assert flags["checkpointing"] == {"full": "--gradient_checkpointing true", "off": "--gradient_checkpointing false"}
    values = {one["knob"]: one["value"] for one in found["mapping"]}
    assert (values["batch_size"], values["precision"]) == (2, "bf16")
    assert not output.exists()


@pytest.mark.long
def test_hard_coded_arguments_go_through_the_trainer(cli):
    found = discovered(cli, *script("hard_coded_trainer.py"))
    assert (found["stopped_at"], found["flags"], found["mapping"]) == ("TrainingArguments", [], [])
    ways = found["without_flag"]["the fields of TrainingArguments"]
    assert {"batch_size", "grad_accum", "precision", "workers"} <= set(ways)
    knobs = tomllib.loads((cli.presets / "mine.toml").read_text())["knobs"]
    assert knobs == {"batch_size": 4, "grad_accum": 2, "precision": "fp32", "workers": 0, "checkpointing": "off"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "stopped_at", "way"),
    [
        ("with_accelerate.py", "the first optimizer", "accelerate's environment"),
        pytest.param(
            *("with_lightning.py", "a Lightning Trainer", "Lightning's environment"),
            marks=pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed"),
        ),
    ],
)
def test_script_without_a_parser_tells_the_ways_of_its_framework(cli, name, stopped_at, way):
    found = discovered(cli, *script(name))
    assert (found["stopped_at"], found["flags"]) == (stopped_at, [])
    assert {"precision", "grad_accum"} <= set(found["without_flag"][way])
    assert found["framework"] in way


def test_script_behind_a_launcher_runs_as_the_only_rank(cli):
    launcher = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    found = discovered(cli, "--", *launcher, str(SCRIPTS / "nanogpt_ddp.py"))
    assert (found["stopped_at"], found["flags"], found["framework"]) == ("the first optimizer", [], "torch")
    assert tomllib.loads((cli.presets / "mine.toml").read_text())["script"]["framework"] == "torch"
    allocator = {"PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF": ["allocator"]}
    assert found["without_flag"] == {"DataLoader's defaults": ["workers", "pin_memory"], **allocator}


def test_globals_of_nanogpt_are_flags(cli, tmp_path):
    configurator = (
        "import sys\nfor word in sys.argv[1:]:\n    globals()[word[2:].split('=')[0]] = int(word.split('=')[1])\n"
    )
    (tmp_path / "configurator.py").write_text(configurator)
    lines = (
        "import os, torch\nbatch_size = 12\ngradient_accumulation_steps = 5\ndtype = 'bfloat16'\n"
        "config_keys = [k for k, v in globals().items() if k[0] != '_' and isinstance(v, (int, float, str))]\n"
        "exec(open(os.path.join(os.path.dirname(__file__), 'configurator.py')).read())\n"
        "torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)\nraise RuntimeError('trained')\n"
    )
    found = discovered(cli, *written(tmp_path, lines), "--batch_size=6")
    assert (found["stopped_at"], found["parser"]) == ("the first optimizer", "configurator.py")
    flags = mapping(found)
    assert (flags["batch_size"], flags["grad_accum"]) == ("--batch_size={}", "--gradient_accumulation_steps={}")
    assert flags["precision"]["fp16"] == "--dtype=float16"
    assert found["mapping"][0]["value"] == 6


def test_mapping_may_be_corrected(cli, tmp_path):
    corrections = ("batch_size=--eval-batch-size", "workers=", "compile=--grad-checkpointing")
    words = [word for one in corrections for word in ("--map", one)]
    flags = mapping(discovered(cli, *words, *written(tmp_path, ARGPARSE)))
    assert flags["batch_size"] == "--eval-batch-size {}"
    assert flags["compile"] == {"default": "--grad-checkpointing", "off": ""}
    assert "workers" not in flags


def test_a_python_without_torch_is_named_with_the_way_to_name_another(cli, tmp_path):
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = str(tmp_path / "env" / "bin" / "python")
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    remedy = f"{python} has no torch: give the script's own Python by --python, or in the command"
    refused = cli("presets", "new", "mine", "--", python, str(script)).refused()
    assert refused.endswith(f"train.py needs torch, and {remedy}")
    done = cli("run", "--", python, str(script))
    assert done.code == 4
    assert f"its steps are not seen: {remedy}" in done.err


@pytest.mark.parametrize(
    ("help", "precision"),
    [("bf16 autocast", "bf16"), ("train in bfloat16", "bf16"), ("", "fp16"), ("fp16 or bf16 by the GPU", "fp16")],
)
def test_a_flag_for_half_precision_is_what_its_help_says(help, precision):
    (found,) = propose([Flag(names=["--half"], type="switch", value=False, help=help)])
    assert (found.flag_words, found.value) == ({precision: "--half", "fp32": ""}, "fp32")


def test_nw_is_the_number_of_workers_and_of_two_flags_of_a_precision_the_surest_is_taken():
    (found,) = propose([Flag(names=["--nw"], type="int", default=2, value=2)])
    assert (found.knob, found.flag_words, found.value) == ("workers", "--nw {}", 2)
    flags = [Flag(names=[name], type="switch", value=False) for name in ("--use_bf16", "--bf16")]
    (found,) = propose(flags)
    assert found.flag_words == {"bf16": "--bf16", "fp32": ""}

"""The way of a knob into a script before the run, and the short title of a script's command."""

import os
import sys

import pytest

from own_scripts.conftest import SCRIPTS
from trainfast_runner.errors import UserError
from trainfast_runner.records.run_file import ScriptFigures
from trainfast_runner.running.command import read_command
from trainfast_runner.running.planning import plan_script
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.script_reach import Way, check_reach, reach_of, unreachable_reason

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
        ("accelerate", "lr", Way.NONE, "without a flag accelerate takes only precision, grad_accum, compile"),
        ("", "lr", Way.FRAMEWORK, "only if a Trainer, accelerate or Lightning takes it"),
        ("HF Trainer", "strategy", Way.NONE, "no flag is mapped to it"),
    ],
)
def test_each_knob_has_its_way_into_the_script(framework, knob, way, words):
    reach = reach_of(knob, ScriptPreset(flag_words=dict(MAPPED), framework=framework))
    assert reach.way is way
    assert words in reach.text


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("torchrun", "there is no command 'torchrun'; try --python PATH of the Python that has it"),
        ("accelerate", "there is no command 'accelerate'; try --python PATH of the Python that has it"),
        ("./notes", "there is no command './notes'"),
        ("notes", "there is no command 'notes'"),
        ("./note", "there is no command './note'; did you mean ./notes?"),
    ],
)
def test_a_missing_command_is_not_its_own_nearest_name(tmp_path, monkeypatch, word, line):
    (tmp_path / "notes").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError) as refused:
        read_command((word, "train.py"), cwd=str(tmp_path))
    assert refused.value.line() == line


def test_without_hooks_a_framework_takes_only_its_own_variables():
    blocked = "the hooks cannot load"
    assert unreachable_reason("precision", "accelerate", blocked) is None
    assert unreachable_reason("grad_clip", "Lightning", blocked) is None
    assert unreachable_reason("grad_clip", "HF Trainer", blocked) == blocked
    assert unreachable_reason("grad_clip", "", blocked) is None, "it may be Lightning"


@pytest.mark.parametrize(
    ("framework", "knob", "value"),
    [
        *(("accelerate", "precision", "tf32"), ("Lightning", "precision", "tf32"), ("HF Trainer", "samples", "packed")),
        *(("HF Trainer", "precision", "bf16-pure"), ("HF Trainer", "optimizer", "adamw-foreach")),
        ("HF Trainer", "checkpointing", "selective"),
    ],
)
def test_a_value_that_the_framework_lacks_is_refused(framework, knob, value):
    with pytest.raises(UserError, match=f"{framework} takes only {knob} .*, not {value}") as refused:
        check_reach({knob: value}, framework, None)
    assert refused.value.key == knob
    check_reach({"precision": "bf16"}, framework, None)
    check_reach({"precision": "tf32"}, "HF Trainer", None)


def test_a_value_without_words_reaches_the_trainer_by_its_fields():
    words = {"checkpointing": {"full": "--gradient_checkpointing", "off": ""}}
    command = (sys.executable, TRAIN)
    preset = ScriptPreset(command, words, framework="HF Trainer")
    script = plan_script((), ["checkpointing=every-2"], preset=preset).script
    assert (script.command, script.flagged) == ([*command], [])
    assert script.trainer_fields["gradient_checkpointing_kwargs"]["every_n_layers"] == 2
    assert plan_script((), ["checkpointing=full"], preset=preset).script.flagged == ["checkpointing"]
    with pytest.raises(UserError, match="every-2 has no flag in the preset"):
        plan_script((), ["checkpointing=every-2"], preset=ScriptPreset(command, words))


@pytest.mark.parametrize(
    ("words", "title"),
    [
        ((sys.executable, TRAIN, "--lr", "3e-4"), "plain_torch.py --lr 3e-4"),
        ((sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", TRAIN), "plain_torch.py"),
        ((sys.executable, "-m", "torch.distributed.run", "-m", "json.tool", "a.py"), "json.tool a.py"),
        ((sys.executable, "-u", "-m", "json.tool", "a b"), "json.tool 'a b'"),
        ((sys.executable, "-um", "json.tool", "a b"), "json.tool 'a b'"),
        ((sys.executable, "-mjson.tool", "a b"), "json.tool 'a b'"),
        ((sys.executable, "-c", "pass"), f"{sys.executable} -c pass"),
    ],
)
def test_a_title_is_the_script_and_its_own_arguments(words, title):
    assert read_command(words).title == title


@pytest.mark.parametrize(
    ("command", "other", "same"),
    [
        ("python -mpackage.a", "python -mpackage.b", False),
        ("python -mpackage.a", "python -um package.a --lr 1", True),
        ("python -X dev -mpackage.a", "python -W ignore -mpackage.b", False),
        ("python -uX dev -mpackage.a", "python -uX dev -mpackage.b", False),
        ("python - -mode fast", "python - -mode slow", True),
        ("python -c code a.py", "python -c code b.py", False),
        ("python - -m fast", "python - -m slow", True),
        ("python -c pass -m fast", "python -c pass -m slow", True),
        ("python -mtorch.distributed.run a.py", "torchrun a.py", True),
        ("train -dimension 2", "train -dimension 4", True),
    ],
)
def test_two_commands_are_of_one_script_by_its_file_or_module(command, other, same):
    figures, other_figures = (ScriptFigures(command=words.split(), cwd="/work") for words in (command, other))
    assert figures.is_of_one_script(other_figures) == same


CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("asked", "ranks"), [("3", 3), ("auto", CORES)])
def test_a_launcher_is_asked_for_a_number_of_ranks_or_for_one_on_each_device(asked, ranks):
    words = (sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={asked}", TRAIN)
    assert plan_script(words, ["devices=cpu"]).world_size == ranks


def test_a_rank_on_each_core_does_not_count_gpus():
    words = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "cpu", TRAIN)
    assert read_command(words).ranks(4) == CORES


@pytest.mark.parametrize(("options", "gpus", "ranks"), [((), 4, 4), ((), 0, 1), (("--num_gpus", "2"), 4, 2)])
def test_deepspeed_starts_a_rank_on_each_gpu_unless_it_is_given_a_number(options, gpus, ranks, tmp_path):
    launcher = tmp_path / "deepspeed"
    launcher.write_text(f"#!{sys.executable}\n")
    launcher.chmod(0o755)
    command = read_command((str(launcher), *options, TRAIN))
    assert (command.ranks(gpus), command.argv_on(gpus)[-2:]) == (ranks, [f"--nproc-per-node={ranks}", TRAIN])


@pytest.mark.parametrize(
    ("words", "name", "ranks"),
    [
        (("-m", "resnet50", "--num_processes", "4"), "my-train", 4),
        (("-m", "cyclic", "python", "train.py"), "train.py", 1),
        (("-m", "cyclic", "python", "-m", "package.train"), "package.train", 1),
        (("-m", "cyclic", "python", "-u", "-mpackage.train"), "package.train", 1),
    ],
)
def test_a_programs_own_m_is_no_module(words, name, ranks, tmp_path):
    program = tmp_path / "my-train"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    command = read_command((str(program), *words))
    assert (command.name, command.ranks(0)) == (name, ranks)


CONFIG = "compute_environment: LOCAL_MACHINE\ndistributed_type: {}\nnum_processes: {}\n"


LAUNCHES = [
    ((), None, 4, 4), ((), None, 1, 1), ((), None, 0, 1), (("--num_processes", "2"), None, 4, 2),
    (("--num-processes=2",), None, 1, 1), (("--multi_gpu",), None, 4, 4),
    (("--use_fsdp", "--num_processes=2"), None, 1, 2), (("--cpu",), None, 4, 1),
    ((), CONFIG.format("MULTI_GPU", 3), 4, 3), ((), CONFIG.format("DEEPSPEED", 2), 4, 2),
    ((), CONFIG.format("'NO'", 1), 4, 1), ((), CONFIG.format("NO", 4), 4, 1),
    (("--cpu",), CONFIG.format("MULTI_GPU", 3), 4, 1),
    (("--num_processes", "2"), CONFIG.format("MULTI_GPU", 3), 4, 2),
]  # fmt: skip


@pytest.mark.parametrize(("options", "config", "gpus", "ranks"), LAUNCHES)
def test_accelerate_starts_the_ranks_that_options_file_or_gpus_say(options, config, gpus, ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    if config is not None:
        (tmp_path / "accelerate").mkdir()
        (tmp_path / "accelerate" / "default_config.yaml").write_text(config)
    launch = (sys.executable, "-m", "accelerate.commands.launch")
    assert read_command((*launch, *options, TRAIN)).ranks(gpus) == ranks

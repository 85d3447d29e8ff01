"""Exports of a run of the user's own script, from records written by hand."""

import ast
import shlex

import pytest

from on_disk import put, run_file
from trainfast_runner.errors import UserError
from trainfast_runner.export.formats import export_run
from trainfast_runner.records.run_file import ScriptAsked
from trainfast_runner.settings import script_preset

COMMAND = ["python", "train.py", "--bs", "16"]
FLAG_WORDS = {"batch_size": "--bs {}", "precision": {"bf16": "--bf16", "fp32": ""}}


def exported(folder, to, framework="torch", command=COMMAND, env=None, ran=None, steps_from_log=None, **knobs):
    """The text of an export of a run with these knobs, of which `batch_size` has a flag."""
    asked = {"command": command, "argv": [], "steps": knobs.get("steps"), "steps_from_log": steps_from_log}
    flags = {"flagged": [name for name in ("batch_size",) if name in knobs], "flag_words": FLAG_WORDS}
    run = run_file(
        preset="train.py", knobs={"timing_warmup": 3, **knobs}, overrides=list(knobs), env=env or {},
        cwd="/home/me/project", script=ScriptAsked(**asked, **flags),
    )  # fmt: skip
    put(folder / "worker.jsonl", {"t_ns": 1, "kind": "script", "framework": framework, "ran": ran or {}})
    return export_run(run, folder, to).text


def test_the_command_is_the_scripts_with_the_flags_that_ran(tmp_path):
    *comments, command = exported(tmp_path, "command", batch_size=16, lr=0.1, steps=50).splitlines()
    assert command == "python train.py --bs 16"
    assert "# Cannot be expressed in this format: lr." in comments
    again = "trainfast-tui run --set lr=0.1 --set steps=50 -- python train.py --bs 16"
    assert f"# Started in /home/me/project. The same run here: {again}" in comments
    text = exported(tmp_path, "command", steps_from_log="--- step", lr=0.1)
    assert "trainfast-tui run --set lr=0.1 --steps-from-log '--- step' -- python train.py --bs 16" in text


def test_a_framework_takes_its_knobs_from_the_environment_and_a_trainer_from_flags(tmp_path):
    env = {"PYTHONPATH": "/door", "ACCELERATE_MIXED_PRECISION": "bf16", "PL_TRAINER_PRECISION": "bf16-mixed"}
    text = exported(tmp_path, "command", "accelerate", env=env, precision="bf16")
    assert text.splitlines()[-1] == "env ACCELERATE_MIXED_PRECISION=bf16 python train.py --bs 16"
    assert "Cannot be expressed" not in text
    words = ["torchrun", "--nproc-per-node", "2", "t.py", "--output_dir", "out", "--learning_rate=1"]
    text = exported(tmp_path, "command", "HF Trainer", command=words, lr=0.5, precision="bf16")
    assert shlex.split(text.splitlines()[-1]) == [*words[:4], "--bf16", "True", "--learning_rate", "0.5", *words[4:6]]
    hard_coded = exported(tmp_path, "command", "HF Trainer", lr=0.5)
    assert "# Cannot be expressed in this format: lr." in hard_coded
    text = exported(tmp_path, "command", command=["python", "-c", "import torch\nrm()"])
    assert shlex.split(text, comments=True) == ["python", "-c", "import torch\nrm()"]
    assert 'framework = "accelerate"' in exported(tmp_path, "preset", "accelerate", grad_accum=2)
    assert "framework" not in exported(tmp_path, "preset", "accelerate", lr=0.1), "accelerate does not take a rate"


def test_the_preset_has_the_command_the_flags_and_the_knobs(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(exported(tmp_path, "preset", batch_size=16, lr=0.1, steps=50))
    preset = script_preset.load(file)
    assert (list(preset.command), preset.flag_words, preset.cwd) == (COMMAND, FLAG_WORDS, "/home/me/project")
    assert preset.knobs == {"batch_size": 16, "lr": 0.1, "steps": 50}
    text = exported(tmp_path, "preset", steps_from_log="--- step")
    assert text.startswith("# Cannot be expressed in this format: --steps-from-log.\n")


@pytest.mark.parametrize(("preset", "file"), [("train.py", "train.toml"), ("llama-3.2", "llama-3.2.toml")])
def test_the_presets_file_has_the_name_of_the_script_or_of_its_preset(tmp_path, preset, file):
    exported(tmp_path, "command")
    run = run_file(preset=preset, script=ScriptAsked(command=COMMAND, argv=[]))
    assert list(export_run(run, tmp_path, "preset").files) == [file]


def test_training_arguments_are_those_of_the_live_trainer(tmp_path):
    ran = {"batch_size": 4, "grad_accum": 2, "precision": "bf16", "lr": 0.5, "optimizer": "lion", "prefetch": None}
    text = exported(tmp_path, "training-args", "HF Trainer", ran=ran, lr=0.5, steps=50)
    assert "# Not understood: optimizer=lion: " in text
    (call,) = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    fields = {field.arg: ast.literal_eval(field.value) for field in call.keywords}
    expected = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "bf16": True, "learning_rate": 0.5}
    assert {**expected, "max_steps": 50, "use_cpu": True}.items() <= fields.items()
    assert "optim" not in fields


@pytest.mark.parametrize(
    ("to", "reason"),
    [
        ("accelerate", "its launcher is in its command"),
        ("torchrun", "its launcher is in its command"),
        ("deepspeed", "its configuration of DeepSpeed is its own"),
        ("training-args", "whose steps no Trainer took"),
    ],
)
def test_a_form_of_something_else_is_refused(tmp_path, to, reason):
    with pytest.raises(UserError, match=reason):
        exported(tmp_path, to)

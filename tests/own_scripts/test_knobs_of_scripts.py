"""`--set` with a script of one's own: its flags by a preset's mapping, the Trainer's fields, DataLoader's defaults."""

import pytest

from own_scripts.conftest import run_script, samples_of_steps, script, written
from trainfast_runner.errors import UserError
from trainfast_runner.running.planning import plan_script
from trainfast_runner.settings import script_preset

MAPPING = """
schema = 1
[script.knobs]
batch_size = "--batch-size {}"
[knobs]
batch_size = 8
"""


@pytest.fixture
def mapping(tmp_path):
    """A preset with the flag of one knob."""
    path = tmp_path / "mine.toml"
    path.write_text(MAPPING)
    return path


def test_flags_defaults_an_overridden_rate_and_the_steps_asked_for(cli, mapping):
    asked = ("--preset", str(mapping), "--set", "batch_size=16", "--set", "pin_memory=off", "--set", "lr=0.5")
    endless = script("plain_torch.py", "--steps=100000", "--batch-size=2")
    result = run_script(cli, "--steps=8", *asked, *endless)
    assert (result["steps"], result["script"]["exit_code"]) == ({"measured": 5, "warmup": 3}, 0)
    assert "took" not in (cli.home / "runs" / result["run_id"] / "output.log").read_text(), "it ended at the step"
    assert result["knobs"]["batch_size"] == 16
    assert samples_of_steps(cli, result) == {16}
    assert result["script"]["overridden"] == [{"knob": "lr", "asked": 0.5, "ran": 0.001, "by": "torch"}]
    assert "lr: asked for 0.5, ran 0.001" in cli("runs", "show", "last").out


def test_only_values_beyond_those_of_the_preset_are_overrides(mapping):
    preset = script_preset.load(mapping)

    def overrides(*settings):
        return plan_script(script("plain_torch.py")[1:], settings, preset=preset).spec.overrides

    assert overrides() == overrides("batch_size=8", "timing_warmup=3") == ()
    assert overrides("batch_size=16", "steps=9") == ("batch_size", "steps")


def test_knobs_that_the_script_may_not_take_are_named_before_the_start(cli, tmp_path):
    asked = ("--set", "lr=0.5", "--set", "precision=bf16")
    done = cli("run", "--json", *asked, *written(tmp_path, "print('trained')\n"))
    assert done.code == 0, done.err
    assert done.err.startswith("lr, precision: set without a flag, so the script may keep its own;"), done.err
    assert [one["knob"] for one in done.json["script"]["overridden"]] == ["lr", "precision"]


def test_knob_that_cannot_reach_the_script_is_refused_before_the_start(cli, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('schema = 1\n[script]\nframework = "torch"\n')
    refused = cli("run", "--preset", str(path), "--set", "lr=0.1", *script("plain_torch.py")).refused()
    assert "lr cannot reach the script: without a flag torch takes only workers, pin_memory" in refused
    assert "try presets new NAME --map lr=--FLAG -- COMMAND" in refused


SCHEDULED = """
import argparse, torch
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int)
parser.add_argument("--lr", type=float)
parser.add_argument("--by-hand", action="store_true")
args = parser.parse_args()


class Batch:
    def __init__(self, rows):
        self.rows = torch.stack(rows)


model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
schedule = None if args.by_hand else torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
for step, batch in enumerate(DataLoader(torch.ones(64, 4), args.batch_size, collate_fn=Batch)):
    if args.by_hand:
        optimizer.param_groups[0]["lr"] = args.lr * (step + 1) / 10
    model(batch.rows).sum().backward()
    optimizer.step()
    if schedule is not None:
        schedule.step()
"""
"""A warm-up of the rate, and batches of the script's own class."""


@pytest.mark.parametrize("by_hand", [(), pytest.param(("--by-hand",), marks=[pytest.mark.ci, pytest.mark.long])])
def test_scheduled_rate_and_a_batch_that_nothing_counts_are_not_overridden(cli, tmp_path, by_hand):
    mapping = tmp_path / "mine.toml"
    mapping.write_text('schema = 1\n[script.knobs]\nbatch_size = "--batch-size {}"\nlr = "--lr {}"\n')
    asked = ("--preset", str(mapping), "--set", "batch_size=8", "--set", "lr=0.5")
    result = run_script(cli, *asked, *written(tmp_path, SCHEDULED), *by_hand)
    assert (result["script"]["overridden"], result["script"]["samples_from"]) == ([], "forward input")


TRAINER_ALONE = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

arguments = TrainingArguments("out", tf32=True, use_cpu=True, max_steps=6, report_to=[], save_strategy="no")
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
)
rows = [{"input_ids": [1] * 16, "labels": [1] * 16} for _ in range(64)]
Trainer(model, arguments, train_dataset=rows).train()
"""
"""A script whose import of the Trainer imports torch; on a CPU the Trainer refuses `tf32=True`."""


def test_trainer_that_imports_torch_itself_takes_fp32_in_place_of_tf32(cli, tmp_path):
    result = run_script(cli, "--set", "precision=fp32", "--set", "batch_size=4", *written(tmp_path, TRAINER_ALONE))
    assert (result["script"]["framework"], result["script"]["overridden"]) == ("HF Trainer", [])
    assert samples_of_steps(cli, result) == {4}


@pytest.mark.long
def test_hard_coded_trainer_takes_the_knobs(cli):
    settings = {"batch_size": 2, "grad_accum": 3, "lr": 0.01, "checkpointing": "full", "precision": "bf16"}
    asked = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    result = run_script(cli, *asked, *script("hard_coded_trainer.py"))
    assert (result["script"]["overridden"], result["actual"]["compute_dtype"]) == ([], "bfloat16")
    assert samples_of_steps(cli, result) == {6}


@pytest.mark.parametrize(
    ("settings", "overridden"),
    [
        ({"checkpointing": "every-2", "optimizer": "adafactor", "samples": "grouped"}, {}),
        pytest.param(
            {"checkpointing": "off", "samples": "padded", "optimizer": "adamw-loop"},
            # The Trainer has no name for one loop over parameters: it takes its own AdamW.
            {"optimizer": "adamw"},
            marks=pytest.mark.long,
        ),
    ],
)
def test_levers_of_the_trainer_reach_a_script_by_its_fields(cli, settings, overridden):
    asked = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    result = run_script(cli, *asked, *script("hard_coded_trainer.py"))
    assert {one["knob"]: one["ran"] for one in result["script"]["overridden"]} == overridden
    exported = cli("export", "last", "--to", "training-args").out
    assert (
        f"train_sampling_strategy='{'group_by_length' if settings['samples'] == 'grouped' else 'random'}'" in exported
    )
    assert ("'every_n_layers': 2" in exported) == (settings["checkpointing"] == "every-2")


UNSIZED_TRAINER = """
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield {"input_ids": [1] * 16, "labels": [1] * 16}

arguments = TrainingArguments("out", use_cpu=True, max_steps=6, report_to=[], save_strategy="no")
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
)
model.gradient_checkpointing_enable()
own = __import__("torch").optim.SGD(model.parameters(), lr=0.1)
Trainer(model, arguments, train_dataset=Endless(), optimizers=(own, None)).train()
"""
"""A data set without a length, which the Trainer does not group; checkpointing and an optimizer of the script's own."""


@pytest.mark.long
def test_a_field_that_the_trainer_does_not_follow_is_overridden(cli, tmp_path):
    settings = ("samples=grouped", "optimizer=adamw", "checkpointing=off")
    asked = [word for setting in settings for word in ("--set", setting)]
    result = run_script(cli, *asked, *written(tmp_path, UNSIZED_TRAINER))
    ran = {one["knob"]: one["ran"] for one in result["script"]["overridden"]}
    assert ran == {"samples": "padded", "optimizer": "SGD", "checkpointing": "full"}


LIGER = """
from types import MethodType

def norm(self, states):
    return type(self).forward(self, states)

def _apply_liger_kernel_to_instance(model, **config):
    print(sorted(name for name, is_on in config.items() if is_on), flush=True)
    if config["rms_norm"]:
        model.model.norm.forward = MethodType(norm, model.model.norm)
"""
"""A stand-in for the package, which knows the norms of Llama and no loss."""


@pytest.mark.long
@pytest.mark.parametrize(("knob", "part", "ran"), [("kernels", "'rms_norm'", {}), ("loss", "fused_", {"loss": "full"})])
def test_kernels_of_liger_reach_a_script_and_are_read_from_its_model(cli, tmp_path, knob, part, ran):
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel" / "__init__.py").touch()
    (tmp_path / "liger_kernel" / "transformers.py").write_text(LIGER)
    (tmp_path / "liger_kernel-0.8.0.dist-info").mkdir()
    (tmp_path / "liger_kernel-0.8.0.dist-info" / "METADATA").write_text("Name: liger_kernel\nVersion: 0.8.0\n")
    asked = ("--set", f"{knob}=liger", "--set", "precision=fp32")
    result = run_script(cli, *asked, *written(tmp_path, TRAINER_ALONE))
    assert {one["knob"]: one["ran"] for one in result["script"]["overridden"]} == ran
    assert part in (cli.home / "runs" / result["run_id"] / "output.log").read_text()


@pytest.mark.long
def test_accelerate_compiles_by_its_environment(cli):
    result = run_script(cli, "--set", "compile=default", "--set", "grad_accum=2", *script("with_accelerate.py"))
    assert result["script"]["overridden"] == []


@pytest.mark.long
def test_accelerate_takes_its_environment(cli):
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
        ("--batch {}", ["python", "t.py", "--batch", "2", "--batch", "4"], ["--batch", "2", "--batch", "8"]),
    ],
)
def test_flag_takes_the_place_of_the_same_flag(place, words, flags):
    preset = script_preset.ScriptPreset(flag_words={"batch_size": place})
    assert preset.applied(words, {"batch_size": 8}) == ["python", "t.py", *flags]


@pytest.mark.parametrize("launcher", ["accelerate launch", "python -m accelerate.commands.launch", "numactl -m 0"])
@pytest.mark.parametrize("started", [["t.py"], ["-m", "a.train"]])
def test_flag_of_the_launcher_is_left_alone(launcher, started):
    preset = script_preset.ScriptPreset(flag_words={"precision": "--mixed_precision {}", "batch_size": "--bs {}"})
    launch = [*launcher.split(), "--mixed_precision", "no", *started]
    words = preset.applied([*launch, "--bs", "2"], {"precision": "bf16", "batch_size": 8})
    assert words == [*launch, "--bs", "8", "--mixed_precision", "bf16"]


def test_words_by_value_and_each_assignment_among_them_replaces_its_own():
    preset = script_preset.ScriptPreset(flag_words={"precision": {"bf16": "--bf16", "fp32": ""}})
    assert preset.applied(["python", "t.py"], {"precision": "bf16"})[2:] == ["--bf16"]
    assert preset.applied(["python", "t.py"], {"precision": "fp32"})[2:] == []
    with pytest.raises(UserError, match="precision=fp16 has no flag in the preset"):
        preset.applied(["python", "t.py"], {"precision": "fp16"})
    words = {"bf16": "model.dtype=bf16 trainer.amp=true", "fp32": "model.dtype=fp32 trainer.amp=false"}
    preset = script_preset.ScriptPreset(flag_words={"precision": words})
    command = ["python", "t.py", "model.dtype=fp32", "trainer.amp=false"]
    assert preset.applied(command, {"precision": "bf16"})[2:] == ["model.dtype=bf16", "trainer.amp=true"]

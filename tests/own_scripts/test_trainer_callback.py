"""The knobs that the hooks read from the Hugging Face Trainer."""

import importlib
import json
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback, TrainingArguments

from trainfast_runner.door.trainfast_door import frameworks
from trainfast_runner.door.trainfast_door.notes import hook_modules
from trainfast_runner.door.trainfast_door.script_run import ScriptRun


@pytest.mark.parametrize(("gpus", "samples"), [(0, 8), (1, 8), (2, 16)])
def test_the_batch_under_data_parallel_is_that_of_one_gpu(tmp_path, gpus, samples):
    arguments = TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=8, use_cpu=True)
    arguments._n_gpu = gpus
    (tmp_path / "run.json").write_text(json.dumps({"script": None, "device": "cpu"}))
    run = ScriptRun(str(tmp_path))
    module = SimpleNamespace(TrainerCallback=TrainerCallback, DEFAULT_CALLBACKS=[])
    frameworks.install_trainer(module, run)
    callback = module.DEFAULT_CALLBACKS[0]()
    callback.on_train_begin(arguments, SimpleNamespace(max_steps=1000), None)
    callback.on_step_end(arguments, None, None)
    assert (run.ran["batch_size"], run.samples_beside(callback.asked_samples)) == (8, samples)
    run.turns.batch_size = samples
    run.write_facts()
    facts = [json.loads(line) for line in next(tmp_path.glob("worker*.jsonl")).read_text().splitlines()]
    assert facts[-1]["planned_steps"] == 1000, "the screen shows how far the training has come"
    assert run.ran["batch_size"] == 8


def test_each_hook_of_a_module_under_way_gets_the_whole_module(tmp_path, monkeypatch):
    (tmp_path / "under_way.py").write_text("import installs_hooks\nwhole = True\n")
    (tmp_path / "installs_hooks.py").write_text("import builtins\nbuiltins.install_hooks()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []

    def install_hooks():
        for name in ("first", "second"):
            hook_modules({"under_way": lambda module, name=name: seen.append((name, hasattr(module, "whole")))})

    monkeypatch.setattr("builtins.install_hooks", install_hooks, raising=False)
    importlib.import_module("under_way")
    assert seen == [("first", True), ("second", True)]

"""The knobs that the hooks read from the Hugging Face Trainer."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from transformers import TrainerCallback, TrainingArguments

from trainfast_runner.door.trainfast_door import frameworks
from trainfast_runner.door.trainfast_door.import_hooks import hook_modules

if TYPE_CHECKING:
    from trainfast_runner.door.trainfast_door.script_run import ScriptRun


@pytest.mark.parametrize(("gpus", "samples"), [(0, 8), (1, 8), (2, 16)])
def test_the_batch_under_data_parallel_is_that_of_one_gpu(tmp_path: Path, gpus: int, samples: int) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=8, use_cpu=True)
    arguments._n_gpu = gpus
    recorded: list[int] = []

    def record_step(samples: int) -> bool:
        recorded.append(samples)
        return False

    turns = SimpleNamespace(restart=lambda: None, batch_size=samples)
    steps = SimpleNamespace(
        count_steps_of=lambda source: None, turns=turns, samples_beside=lambda asked: asked, record_step=record_step
    )
    run = SimpleNamespace(steps=steps, ran={}, actual={})
    module: Any = SimpleNamespace(TrainerCallback=TrainerCallback, DEFAULT_CALLBACKS=[])
    frameworks.install_trainer(module, cast("ScriptRun", run))
    callback = module.DEFAULT_CALLBACKS[0]()
    callback.on_train_begin(arguments, None, None)
    callback.on_step_end(arguments, None, None)
    assert run.ran["batch_size"] == 8
    assert recorded == [samples]


def test_each_hook_of_a_module_under_way_gets_the_whole_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "under_way.py").write_text("import installs_hooks\nwhole = True\n")
    (tmp_path / "installs_hooks.py").write_text("import builtins\nbuiltins.install_hooks()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[tuple[str, bool]] = []

    def install_hooks() -> None:
        for name in ("first", "second"):
            hook_modules({"under_way": lambda module, name=name: seen.append((name, hasattr(module, "whole")))})

    monkeypatch.setattr("builtins.install_hooks", install_hooks, raising=False)
    importlib.import_module("under_way")
    assert seen == [("first", True), ("second", True)]

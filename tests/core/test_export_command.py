"""The command that is exported starts the same run, whatever file its preset was."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import msgspec
import pytest

from trainfast_runner.errors import UserError
from trainfast_runner.export.formats import export_run
from trainfast_runner.machine.processes import boot_id
from trainfast_runner.records.run_file import ClockAnchor, RunFile
from trainfast_runner.settings.spec import expand_paths, resolve

MINE = """
schema = 1
title = "Mine"
[model]
family = "gpt2"
n_layer = 2
initializer_range = 0.01
[data]
kind = "files"
samples = "lines"
paths = ["*.txt"]
[knobs]
batch_size = 3
lr = 0.01
"""


def recorded(reference: str, *settings: str) -> RunFile:
    spec = resolve(reference, settings)
    return RunFile(
        run_id="20261121-000000-mine-aaaa",
        preset=spec.preset,
        variant=spec.variant,
        title=spec.title,
        model=spec.model,
        data=expand_paths(spec.data),
        knobs=dict(spec.knobs),
        overrides=list(spec.overrides),
        argv=[],
        env={},
        python="python",
        cwd=os.getcwd(),
        boot_id=boot_id(),
        clock=ClockAnchor(monotonic_ns=0, wall_ns=0),
    )


@pytest.mark.parametrize("name", ["mine", "bert-large"], ids=["a name of its own", "the name of a shipped preset"])
def test_a_preset_by_its_path_is_spelled_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "one two.txt").write_text("text")
    file = tmp_path / f"{name}.toml"
    file.write_text(MINE)
    run = recorded(str(file), "model.layer_norm_epsilon=1e-6")
    words = shlex.split(export_run(run, tmp_path, "command").text, comments=True)
    again = resolve(words[2], words[4::2])
    assert words[3::2] == ["--set"] * len(words[4::2])
    assert (again.model, again.data, again.knobs) == (run.model, run.data, run.knobs)


def test_a_preset_by_its_name_is_named_with_what_was_turned(tmp_path: Path) -> None:
    run = recorded("guide-single-gpu/fp16", "batch_size=2", "model.hidden_size=64")
    command = export_run(run, tmp_path, "command").text.splitlines()[0]
    assert command == "trainfast-tui run guide-single-gpu/fp16 --set model.hidden_size=64 --set batch_size=2"


def test_paths_that_no_command_can_hold_are_left_to_a_preset(tmp_path: Path) -> None:
    plain = recorded("tiny-llama", "data.kind=random")
    for paths, reason in (
        (["/a+b.txt"], r"contains \+"),
        ([f"/{'d' * 200}/{n}.jpg" for n in range(1000)], "1,000 files"),
    ):
        run = msgspec.structs.replace(plain, data={**plain.data, "paths": paths}, overrides=["data.paths"])
        with pytest.raises(UserError, match=reason) as refused:
            export_run(run, tmp_path, "command")
        assert refused.value.as_json()["nearest"] == "--to preset"
        assert all(path in export_run(run, tmp_path, "preset").text for path in paths)


def test_a_list_comes_back_as_a_list(tmp_path: Path) -> None:
    run = recorded("tiny-llama", 'model.layer_types=["full_attention", "full_attention"]')
    words = shlex.split(export_run(run, tmp_path, "command").text, comments=True)
    assert resolve(words[2], words[4::2]).model == run.model


@pytest.mark.parametrize(
    "setting",
    [
        'rope_scaling={rope_type="linear",factor=2.0}',
        'note="16"',
        'note="true"',
        'layers=[{a=[1,"b"]}]',
        "note=plain words",
    ],
)
def test_a_field_of_the_model_comes_back_as_what_it_was(tmp_path: Path, setting: str) -> None:
    run = recorded("tiny-llama", f"model.{setting}")
    words = shlex.split(export_run(run, tmp_path, "command").text, comments=True)
    assert resolve(words[2], words[4::2]).model == run.model

"""Settings of other tools come in as knobs, and what a run exports comes back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfast_runner.errors import UserError
from trainfast_runner.export.formats import export
from trainfast_runner.export.imported import import_settings
from trainfast_runner.export.trainer_arguments import settings_to_express
from trainfast_runner.records.run_file import ClockAnchor, RunFile
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.worker.catalog import OPTIMIZERS
from trainfast_runner.worker.spec import Knobs
from trainfast_runner.worker.strategies.zero_config import Sizes, deepspeed_config

KNOBS = st.fixed_dictionaries(
    {},
    optional={
        "precision": st.sampled_from(["fp32", "fp16", "bf16"]),
        "batch_size": st.integers(1, 4096),
        "grad_accum": st.integers(1, 64),
        "checkpointing": st.sampled_from(["off", "full"]),
        "optimizer": st.sampled_from([name for name, entry in OPTIMIZERS.items() if entry.trainer_name]),
        "compile": st.sampled_from(["off", "default", "max-autotune"]),
        "workers": st.integers(0, 64),
        "pin_memory": st.sampled_from(["on", "off"]),
        "lr": st.floats(0, 10),
        "lr_schedule": st.sampled_from(["constant", "linear"]),
        "weight_decay": st.floats(0, 1),
        "grad_clip": st.floats(0, 1e6),
        "seed": st.integers(0, 2**31 - 1),
        "steps": st.integers(4, 10_000),
        "seq_len": st.integers(8, 4096),
        "p2p": st.sampled_from(["on", "off"]),
        "strategy": st.sampled_from(["single", "ddp", "fsdp"]),
    },
)


def a_run(knobs: dict[str, Any]) -> RunFile:
    ranks = 1 if knobs.get("strategy", "single") == "single" else 2
    return RunFile(
        run_id="r1",
        preset="tiny-llama",
        model={"family": "llama"},
        data={"kind": "text", "objective": "causal-lm"},
        knobs={**defaults(), "devices": ranks, **knobs},
        device="cuda",
        world_size=ranks,
        clock=ClockAnchor(monotonic_ns=0, wall_ns=0),
    )


@pytest.mark.parametrize("form", ["training-args", "torchrun", "accelerate"])
@given(knobs=KNOBS)
def test_an_export_comes_back(form: str, knobs: dict[str, Any]) -> None:
    run = a_run(knobs)
    try:
        exported = export(run, Path("none"), form)
    except UserError:
        return  # refused: it would start another run
    imported = import_settings(exported.text, "it", "tiny-llama")
    assert imported.not_understood == ()
    for name, value in imported.knobs.items():
        assert value == run.knobs[name], name
    for name in settings_to_express(run.knobs):
        is_named = name in exported.left_out or f"# {name}=" in exported.text
        assert name in imported.knobs or is_named or name == "devices", name


def test_deepspeeds_json_comes_back(tmp_path: Path) -> None:
    config = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "steps_per_print": 100,
    }
    run = a_run({"strategy": "zero2-offload", "batch_size": 8, "grad_accum": 2, "grad_clip": 0.5, "precision": "bf16"})
    (tmp_path / "deepspeed.json").write_text(json.dumps(config))
    for form in ("deepspeed", "training-args"):
        imported = import_settings(export(run, tmp_path, form).text, "ds", "tiny-llama")
        wanted = ("strategy", "batch_size", "grad_accum", "grad_clip", "precision")
        assert {name: imported.knobs.get(name) for name in wanted} == {name: run.knobs[name] for name in wanted}


def test_an_offload_to_nowhere_offloads_nothing() -> None:
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}
    assert import_settings(json.dumps(config), "ds", "tiny-llama").knobs["strategy"] == "zero2"


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        ("{'zero_optimization': {'stage': 2}}", "bf16"),
        ("{'bf16': {'enabled': 'auto'}}", "bf16"),
        ("{'fp16': {}}", "fp32"),
    ],
)
def test_the_trainers_precision_holds_where_deepspeeds_configuration_names_none(config: str, precision: str) -> None:
    imported = import_settings(f"TrainingArguments(bf16=True, deepspeed={config})", "it", "tiny-llama")
    assert imported.knobs["precision"] == precision


def test_settings_of_deepspeeds_tables_without_a_knob_are_not_understood() -> None:
    disk = {"device": "nvme", "nvme_path": "/x", "pin_memory": True, "buffer_size": 1e8, "buffer_count": 5}
    zero = {"stage": 3, "offload_param": disk, "zero_hpz_partition_size": 8, "reduce_bucket_size": "auto"}
    halves = {"fp16": {"enabled": True, "loss_scale": 128}, "bf16": {"enabled": False, "immediate_grad_update": True}}
    imported = import_settings(json.dumps({"zero_optimization": zero, **halves}), "ds", "tiny-llama")
    assert imported.knobs == {"strategy": "zero3-offload", "offload_path": "/x", "precision": "fp16"}
    assert imported.not_understood == (
        "zero_optimization.zero_hpz_partition_size: 8",
        "zero_optimization.offload_param.buffer_count: 5",
        "fp16.loss_scale: 128",
    )


def test_offloads_to_two_disks_keep_the_optimizers() -> None:
    tables = {f"offload_{name}": {"device": "nvme", "nvme_path": f"/{name}"} for name in ("param", "optimizer")}
    imported = import_settings(json.dumps({"zero_optimization": {"stage": 3, **tables}}), "ds", "tiny-llama")
    assert imported.knobs["offload_path"] == "/optimizer"
    assert imported.not_understood == ("zero_optimization.offload_param.nvme_path: /param",)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "bf16-pure"])
@pytest.mark.parametrize("disk", [None, "/x"])
def test_the_json_of_a_run_of_ours_is_understood(precision: str, disk: str | None) -> None:
    fields = {one.name for one in dataclasses.fields(Knobs)} - {"others"}
    asked = {name: value for name, value in defaults().items() if name in fields}
    knobs = Knobs(**{**asked, "strategy": "zero3-offload", "precision": precision}, others={})
    config = deepspeed_config(knobs, 2, Sizes(1000, 100, 200), "cuda", disk)
    imported = import_settings(json.dumps(config), "ds", "tiny-llama")
    assert imported.not_understood == ()
    assert (imported.knobs["precision"], imported.knobs.get("offload_path")) == (precision, disk)


@pytest.mark.parametrize(
    ("arguments", "compiled"),
    [
        ("torch_compile_mode='max-autotune'", "max-autotune"),
        ("torch_compile=False, torch_compile_mode='max-autotune'", "max-autotune"),
        ("torch_compile=True", "default"),
        ("torch_compile=False", "off"),
    ],
)
def test_a_mode_of_torch_compile_compiles_as_in_transformers(arguments: str, compiled: str) -> None:
    imported = import_settings(f"args = TrainingArguments('o', {arguments})", "it", "tiny-llama")
    assert imported.knobs == {"compile": compiled}


def test_our_own_command_takes_its_settings_with_an_equals_sign_too() -> None:
    imported = import_settings("trainfast-tui run tiny-llama --set=batch_size=4 --set lr=0.5", "it", "tiny-llama")
    assert (imported.knobs["batch_size"], imported.knobs["lr"]) == (4, 0.5)


def test_our_own_command_is_read_on_several_lines() -> None:
    imported = import_settings("#!/bin/sh\ntrainfast-tui run tiny-llama \\\n  --set lr=0.5\n", "it", "tiny-llama")
    assert imported.knobs == {"lr": 0.5}


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("torchrun --nproc_per_node gpu t.py --bf16", "--nproc_per_node gpu"),
        ("accelerate launch --num_processes auto t.py --bf16", "--num_processes auto"),
    ],
)
def test_a_number_of_processes_that_is_a_word_is_not_understood(command: str, option: str) -> None:
    imported = import_settings(command, "it", "tiny-llama")
    assert imported.knobs == {"precision": "bf16"}
    assert imported.not_understood == (option,)


@pytest.mark.parametrize(
    ("command", "precision"),
    [
        ("accelerate launch t.py --train_batch_size 64 --lr 0.5 --mixed_precision bf16", "bf16"),
        ("accelerate launch --mixed_precision fp16 t.py --batch-size 64 --lr 0.5", "fp16"),
        ("accelerate launch --mixed_precision fp16 t.py --batch_size 64 --lr 0.5 --mixed_precision no", "fp32"),
    ],
)
def test_a_command_of_accelerate_by_the_names_that_its_scripts_use(command: str, precision: str) -> None:
    imported = import_settings(command, "it", "tiny-llama")
    assert imported.knobs == {"batch_size": 64, "lr": 0.5, "precision": precision}
    assert imported.not_understood == ()


def test_a_flag_in_quotes_is_read() -> None:
    command = "python t.py '--per_device_train_batch_size=8' \"--seed\" 3 \"--bf16\" '--colour=red'"
    imported = import_settings(command, "it", "tiny-llama")
    assert imported.knobs == {"batch_size": 8, "seed": 3, "precision": "bf16"}
    assert imported.not_understood == ("colour='red'",)


@pytest.mark.parametrize(
    "flag", ['"--learning_rate"=3e-4', '--"learning_rate=3e-4"', "'--learning_rate'=\"3e-4\"", "--learning'_rate=3e-4'"]
)
def test_a_flag_is_read_wherever_its_quotes_stand(flag: str) -> None:
    imported = import_settings(f"python t.py {flag}", "it", "tiny-llama")
    assert (imported.knobs, imported.not_understood) == ({"lr": 3e-4}, ())


def test_what_is_not_understood_is_listed_and_nothing_is_executed() -> None:
    text = "import os; os.remove('/nothing')\nargs = TrainingArguments('o', optim='lion', lr=x, fsdp='full_shard')\n"
    imported = import_settings(text, "train.py", "tiny-llama")
    assert set(imported.not_understood) == {"optim='lion'", "fsdp='full_shard'", "lr=x (line 2)"}
    command = import_settings("torchrun --nproc-per-node 2 --nnodes 1 t.py --bf16 --model m", "it", "tiny-llama")
    assert command.knobs == {"precision": "bf16", "devices": 2, "strategy": "ddp"}
    assert set(command.not_understood) == {"model='m'", "--nnodes"}
    own = import_settings("trainfast-tui run tiny-llama --set batch_size=3", "it", "tiny-llama")
    assert own.knobs == {"batch_size": 3}
    assert "batch_size = 3" in own.preset


@pytest.mark.parametrize(
    "text",
    [
        *("", "hello", "{", "(" * 9999, "a: b\n", "args = TrainingArguments()\nb = TrainingArguments()"),
        pytest.param('{"a":' * 99999 + "1" + "}" * 99999, id="a deep JSON"),
        pytest.param("a: " + "[" * 9999 + "]" * 9999, id="a deep YAML"),
        pytest.param("num_processes: 2\nsince: 2026-02-30\n", id="a YAML with a date that there is not"),
    ],
)
def test_a_text_of_no_kind_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        import_settings(text, "it", "tiny-llama")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("args = TrainingArguments('o', optim=['adamw_torch'])", "optim=['adamw_torch']"),
        ("args = TrainingArguments('o', torch_compile=True, torch_compile_mode=3)", "torch_compile_mode=3"),
        ('{"zero_optimization": [2]}', "zero_optimization: [2]"),
        ('{"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}', "offload_optimizer: cpu"),
        ("num_processes: 2\ndistributed_type: [FSDP]\n", "distributed_type: ['FSDP']"),
        ("num_processes: 2\nfsdp_config: full\n", "fsdp_config: full"),
        ("distributed_type: MULTI_GPU\nnum_processes: two\n", "num_processes: two"),
        (
            "num_processes: 2\nfsdp_config:\n  fsdp_reshard_after_forward: FULL_SHARD\n",
            "fsdp_reshard_after_forward: FULL_SHARD",
        ),
        (
            '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": 5}}}',
            "nvme_path: 5",
        ),
    ],
)
def test_a_value_of_another_kind_is_not_understood(text: str, named: str) -> None:
    imported = import_settings(text, "it", "tiny-llama")
    assert any(one.startswith(named) for one in imported.not_understood), imported.not_understood


@pytest.mark.parametrize(
    "text",
    ["args = TrainingArguments('o', report_to={[]: 1})", "python t.py --bf16 --report_to '{[]: 1}'"],
    ids=["in a script", "in a command"],
)
def test_a_literal_that_makes_no_value_is_not_understood(text: str) -> None:
    imported = import_settings(text, "it", "tiny-llama")
    assert [one.partition("=")[0] for one in imported.not_understood] == ["report_to"]


@pytest.mark.parametrize(
    "text",
    ['schema = 1\n[model]\nfamily = "llama"\n', 'schema = 1\n[script]\ncommand = ["python", "t.py"]\n'],
    ids=["of a model", "of a script"],
)
def test_a_preset_needs_no_import(text: str) -> None:
    with pytest.raises(UserError, match=r"mine\.toml is a preset already; try trainfast-tui run mine\.toml"):
        import_settings(text, "mine.toml", "tiny-llama")


def test_model_and_data_are_not_imported_from_a_script(tmp_path: Path) -> None:
    preset = tmp_path / "mine.toml"
    preset.write_text('schema = 1\n[script]\ncommand = ["python", "t.py"]\n')
    with pytest.raises(UserError) as refused:
        import_settings("accelerate launch t.py --train_batch_size 64", "it", str(preset))
    assert refused.value.line().startswith(f"--from: {preset} is the preset of a script")
    assert "try --from tiny-llama" in refused.value.line()

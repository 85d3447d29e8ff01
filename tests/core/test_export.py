"""Exports of runs that no test can start, of records with any text, and the command, which starts the same run."""

import ast
import json
import os
import runpy
import shlex
import tempfile
import tomllib
import unicodedata
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from on_disk import run_file
from texts import any_text
from trainfast_runner.errors import UserError
from trainfast_runner.export.formats import export_run
from trainfast_runner.machine.processes import boot_id
from trainfast_runner.records.run_file import RunNode, ScriptAsked
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.settings.spec import expand_paths, resolve

RECORDED = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}


FORMS = ("command", "preset", "torchrun", "training-args", "accelerate")


def exported(to, folder, device="cuda", ranks=2, uuids=(), preset="tiny-llama", nodes=(), by_slurm=False, **knobs):
    of_run = {"model": {"family": "llama"}, "data": {"kind": "text", "objective": "causal-lm"}, "preset": preset}
    placed = {"device": device, "world_size": ranks, "device_uuids": list(uuids)}
    placed |= {"nodes": list(nodes), "by_slurm": by_slurm}
    run = run_file(**of_run, **placed, knobs={**defaults(), "devices": ranks, **knobs})
    return export_run(run, folder, to)


def test_the_trainer_export_names_the_processes_it_needs(tmp_path):
    ddp = exported("training-args", tmp_path, strategy="ddp").text
    assert "# strategy=ddp: torchrun --standalone --nproc-per-node 2 SCRIPT" in ddp
    (tmp_path / "deepspeed.json").write_text(json.dumps(RECORDED))
    zero = exported("training-args", tmp_path, strategy="zero2").text
    assert "'train_micro_batch_size_per_gpu': 'auto'" in zero, "TrainingArguments say the number"
    assert "'zero_optimization': {'stage': 2}" in zero
    assert "torchrun" not in exported("training-args", tmp_path, ranks=1).text
    assert "# strategy=dp: one process that sees 2 GPUs" in exported("training-args", tmp_path, strategy="dp").text


def test_a_run_on_several_nodes_is_exported_with_them(tmp_path):
    nodes = [RunNode(host=host, world_size=2) for host in ("box1", "local")]
    text = {form: exported(form, tmp_path, ranks=4, strategy="ddp", devices=2, nodes=nodes).text for form in FORMS}
    assert " run tiny-llama --hosts box1,local " in text["command"]
    assert " --set devices=2" in text["command"]
    assert "# For as many nodes: trainfast-tui run FILE --hosts box1,local" in text["preset"]
    assert "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint box1:29500" in text["torchrun"]
    assert "# strategy=ddp on each node: torchrun --nnodes 2" in text["training-args"]
    machines = yaml.safe_load(text["accelerate"])
    assert (machines["num_machines"], machines["num_processes"], machines["main_process_ip"]) == (2, 4, "box1")
    placed = [RunNode(), RunNode()]
    assert "--slurm=--nodes=2" in exported("command", tmp_path, strategy="ddp", nodes=placed, by_slurm=True).text


def test_the_adapters_of_a_run_are_lines_around_a_scripts_model(tmp_path):
    with pytest.raises(UserError, match="ended before its model had adapters"):
        exported("training-args", tmp_path, ranks=1, method="lora")
    layers = ["self_attn.q_proj", "self_attn.o_proj"]
    actual = {"kind": "actual", "t_ns": 1, "method": "qlora", "adapted_layers": layers}
    (tmp_path / "worker.jsonl").write_text(json.dumps(actual) + "\n")
    text = exported("training-args", tmp_path, ranks=1, device="cpu", method="qlora", lora_rank=8).text
    (tmp_path / "exported.py").write_text(text)
    names = runpy.run_path(str(tmp_path / "exported.py"))
    assert (names["lora"].r, names["lora"].lora_alpha, set(names["lora"].target_modules)) == (8, 8, set(layers))
    assert names["bits"].bnb_4bit_use_double_quant
    assert str(names["bits"].bnb_4bit_compute_dtype) == "torch.bfloat16"
    assert (
        "return get_peft_model(prepare_model_for_kbit_training(model, use_gradient_checkpointing=False), lora)" in text
    )
    assert "Cannot be expressed" not in text
    assert {"method", "lora_rank"} <= {*exported("torchrun", tmp_path, ranks=1, method="lora", lora_rank=8).left_out}


def test_accelerate_is_given_each_setting_once_and_deepspeeds_json_names_what_it_lacks(tmp_path):
    (tmp_path / "deepspeed.json").write_text(json.dumps(RECORDED))
    zero = exported("accelerate", tmp_path, strategy="zero2", precision="bf16")
    # accelerate refuses a precision that deepspeed.json gives too.
    assert "mixed_precision" not in zero.text
    assert json.loads(zero.files["deepspeed.json"]) == RECORDED
    fsdp = exported("accelerate", tmp_path, strategy="fsdp", reshard="off", checkpointing="full")
    assert "fsdp_reshard_after_forward: false" in fsdp.text
    assert fsdp.left_out == ()
    compiled = exported("accelerate", tmp_path, strategy="fsdp", compile="max-autotune", grad_accum=4).text
    assert "max-autotune-no-cudagraphs" in compiled, "gradients cannot accumulate in a replayed graph"
    turned = {"precision": "bf16", "optimizer": "adamw-fused", "weight_decay": 0.1, "checkpointing": "full"}
    recorded = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    (tmp_path / "deepspeed.json").write_text(json.dumps(recorded))
    zero = exported("deepspeed", tmp_path, strategy="zero3", **turned)
    assert json.loads(zero.text) == recorded
    # The optimizer is the script's own, and the number of processes the launcher's.
    assert set(zero.left_out) == {"optimizer", "weight_decay", "checkpointing", "devices"}


@pytest.mark.parametrize(
    ("device", "knobs", "named", "instead"),
    [
        ("cpu", {"strategy": "ddp"}, "accelerate starts one process on a CPU", "--to torchrun"),
        ("cpu", {"strategy": "zero2"}, "accelerate starts one process on a CPU", "--to torchrun"),
        ("cpu", {"strategy": "ddp", "ranks": 1}, "accelerate runs no MULTI_GPU on a CPU", "--to torchrun"),
        ("cpu", {"strategy": "zero2", "ranks": 1}, "r1 is strategy=zero2", "--to torchrun"),
        ("cuda", {"strategy": "dp"}, "accelerate has no strategy=dp", "--to training-args"),
        ("cuda", {"strategy": "pp"}, "accelerate has no strategy=pp", "--to command"),
        ("cuda", {"strategy": "ddp", "precision": "tf32"}, "no precision=tf32", "--to training-args"),
    ],
)
def test_accelerate_would_be_another_run(tmp_path, device, knobs, named, instead):
    with pytest.raises(UserError, match=named) as no:
        exported("accelerate", tmp_path, device, **knobs)
    assert instead in str(no.value.advice)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("single", "ran strategy=single, and under DeepSpeed it would be another run"),
        ("fsdp", "ran strategy=fsdp, and under DeepSpeed it would be another run"),
        ("zero2", "ended before it gave DeepSpeed a configuration"),
    ],
)
def test_deepspeed_would_be_another_run_of_what_it_never_was_given(tmp_path, strategy, reason):
    with pytest.raises(UserError, match=reason) as no:
        exported("deepspeed", tmp_path, strategy=strategy)
    assert no.value.exit_code == 2


def flags_of(command):
    """The words before the flags, and the flags as a script of the Trainer reads them."""
    transformers = pytest.importorskip("transformers")
    words = shlex.split(command)
    place = words.index("train.py")
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    # The file that --deepspeed names is none here, and bf16 may have no hardware: only the parser is asked.
    return words[:place], parser.parse_args(words[place + 1 :])


def test_a_script_is_started_with_the_flags_of_the_run(tmp_path):
    knobs = {"batch_size": 3, "precision": "bf16", "checkpointing": "full", "seq_len": 64, "lr": 1e-3, "steps": 9}
    found = exported("torchrun", tmp_path, strategy="ddp", p2p="off", **knobs)
    *comments, command = found.text.splitlines()
    start, flags = flags_of(command)
    assert start == ["env", "NCCL_P2P_DISABLE=1", "torchrun", "--standalone", "--nproc-per-node", "2"]
    assert (flags.per_device_train_batch_size, flags.learning_rate, flags.max_steps) == (3, 1e-3, 9)
    assert (flags.bf16, flags.fp16, flags.activation_checkpointing, flags.max_grad_norm) == (True, False, True, 0.0)
    assert found.left_out == ("seq_len",)
    assert "# Cannot be expressed in this format: seq_len." in comments
    assert any("train.py is a placeholder" in line for line in comments)
    *_, command = exported("torchrun", tmp_path, ranks=1, uuids=["GPU-a"], devices=1).text.splitlines()
    assert flags_of(command)[0] == ["env", "CUDA_VISIBLE_DEVICES=GPU-a", "python"]
    (tmp_path / "deepspeed.json").write_text(json.dumps(RECORDED))
    zero = exported("torchrun", tmp_path, strategy="zero2")
    assert flags_of(zero.text.splitlines()[-1])[1].deepspeed == "deepspeed.json"
    beside = json.loads(zero.files["deepspeed.json"])
    assert beside == {**RECORDED, "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}


@pytest.mark.parametrize(
    ("knobs", "named"),
    [({"strategy": "pp"}, "strategy=pp"), ({"strategy": "ddp", "precision": "bf16-pure"}, "precision=bf16-pure")],
)
def test_a_script_that_would_be_another_run_is_refused(tmp_path, knobs, named):
    for form in ("torchrun", "training-args"):
        with pytest.raises(UserError, match=f"the Trainer has no flag for {named}"):
            exported(form, tmp_path, **knobs)


def test_the_command_starts_the_run_again_and_a_preset_keeps_its_processes_and_its_name(tmp_path):
    own, comment = exported("command", tmp_path, strategy="ddp").text.splitlines()
    assert own.startswith("trainfast-tui run tiny-llama")
    assert comment.endswith("--to torchrun")
    assert "devices = 2" in exported("preset", tmp_path, strategy="zero2").text
    single = exported("preset", tmp_path, strategy="single", preset="llama-3.2")
    assert "devices = 2" not in single.text
    assert list(single.files) == ["llama-3.2.toml"]
    run = recorded("guide-single-gpu/fp16", "batch_size=2", "model.hidden_size=64")
    command = export_run(run, tmp_path, "command").text.splitlines()[0]
    assert command == "trainfast-tui run guide-single-gpu/fp16 --set model.hidden_size=64 --set batch_size=2"


@pytest.mark.ci
@pytest.mark.long
def test_the_trainer_and_accelerate_take_their_own(tmp_path, monkeypatch):
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    one = {"device": "cpu", "ranks": 1, "batch_size": 4, "seq_len": 16, "steps": 12, "lr": 3e-2}
    (tmp_path / "script.py").write_text(exported("training-args", tmp_path, **one).text)
    (tmp_path / "accelerate.yaml").write_text(exported("accelerate", tmp_path, **one).text)
    monkeypatch.chdir(tmp_path)
    # In this process, which may have imported transformers before; it leaves variables for its launches.
    with patch.dict(os.environ):
        args = runpy.run_path("script.py")["args"]
    assert (args.per_device_train_batch_size, args.max_steps, args.learning_rate) == (4, 12, 3e-2)
    assert args.max_grad_norm == 0.0
    assert "# seq_len=16: max_seq_length (of the data)" in (tmp_path / "script.py").read_text()
    config = config_args.load_config_from_file("accelerate.yaml")
    assert (config.distributed_type, config.mixed_precision, config.num_processes) == ("NO", "no", 1)


MINE = """
schema = 1
title = "Mine"
[model]
family = "gpt2"
n_layer = 2
initializer_range = 0.01
[data]
kind = "files"
texts = "lines"
paths = ["*.txt"]
[knobs]
batch_size = 3
lr = 0.01
"""


def recorded(reference, *settings):
    spec = resolve(reference, settings)
    fields = {**spec.record_fields(), "data": expand_paths(spec.data)}
    return run_file(run_id="20261121-000000-mine-aaaa", **fields, cwd=os.getcwd(), boot_id=boot_id())


@pytest.mark.parametrize("name", ["mine", "bert-large"], ids=["a name of its own", "the name of a shipped preset"])
def test_a_preset_by_its_path_is_spelled_out_and_exported_as_one(tmp_path, name):
    (tmp_path / "one two.txt").write_text("text")
    file = tmp_path / f"{name}.toml"
    file.write_text(MINE)
    run = recorded(str(file), "model.layer_norm_epsilon=1e-6")
    words = shlex.split(export_run(run, tmp_path, "command").text, comments=True)
    again = resolve(words[2], words[4::2])
    assert words[3::2] == ["--set"] * len(words[4::2])
    assert (again.model, again.data, again.knobs) == (run.model, run.data, run.knobs)
    file.write_text(export_run(run, tmp_path, "preset").text)
    assert (resolve(str(file)).model, resolve(str(file)).knobs) == (run.model, run.knobs)


def test_paths_that_no_command_can_hold_are_left_to_a_preset(tmp_path):
    plain = recorded("tiny-llama", "data.kind=random")
    for paths, why in ((["/a+b.txt"], r"contains \+"), ([f"/{'d' * 200}/{n}.jpg" for n in range(1000)], "1,000 files")):
        run = msgspec.structs.replace(plain, data={**plain.data, "paths": paths}, overrides=["data.paths"])
        with pytest.raises(UserError, match=why) as refused:
            export_run(run, tmp_path, "command")
        assert refused.value.as_json()["nearest"] == "--to preset"
        text = export_run(run, tmp_path, "preset").text
        assert all(path in text for path in paths)


MODEL_SETTINGS = [
    'rope_scaling={rope_type="linear",factor=2.0}', 'note="16"', 'note="true"', 'layers=[{a=[1,"b"]}]',
    'layer_types=["full_attention", "full_attention"]', "note=plain words",
]  # fmt: skip


@pytest.mark.parametrize("setting", MODEL_SETTINGS)
def test_a_field_of_the_model_comes_back_as_what_it_was(tmp_path, setting):
    run = recorded("tiny-llama", f"model.{setting}")
    words = shlex.split(export_run(run, tmp_path, "command").text, comments=True)
    assert resolve(words[2], words[4::2]).model == run.model


BREAKERS = ["\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029", "'", '"', "*/", "-->", "`", "$(x)", "\x00"]
LIVE = "{0}import os; os.system('touch PWNED'){0}PWNED: 1{0}PWNED=1{0}touch PWNED{0}#"
HOSTILE = st.one_of(
    st.sampled_from([LIVE.format(breaker) for breaker in BREAKERS]),
    st.sampled_from(["\x1b]52;c;QUJD\x07", "\x9b2J", "\u202e", "coding: utf-7 +AAo-x", "/../../x", "x.json", ""]),
    any_text(max_size=30),
)
FIELDS = {
    **{name: lambda text, name=name: {name: text} for name in ("run_id", "preset", "variant", "title", "cwd")},
    "version": lambda text: {"versions": {"torch": text, "transformers": f"5.1.{text}"}},
    "overrides": lambda text: {"overrides": [text]},
    "device_name": lambda text: {"device_names": [text]},
    "model": lambda text: {"model": {"family": "llama", "name": text}},
    "model source": lambda text: {"model": {"hub": text}},
    "model key": lambda text: {"model": {"family": "llama", text: 1}},
    "data": lambda text: {"data": {"kind": "files", "objective": "causal-lm", "paths": [text]}},
    **{
        f"knob {name}": lambda text, name=name: {"knobs": {**defaults(), name: text}}
        for name in ("attention", "p2p", "optimizer", "precision", "strategy", "devices", "offload_path", "batch_size")
    },
}
PARSED = {
    "training-args": lambda text: ast.dump(ast.parse(text.encode())),
    "accelerate": yaml.safe_load,
    "torchrun": lambda text: shlex.split(text, comments=True),
    "command": lambda text: len(shlex.split(text, comments=True)),
    "preset": lambda text: {name: type(value) for name, value in tomllib.loads(text).items()},
}
"""What of each form is the same for every text."""


def export_of(to, folder, fields):
    record = {"model": {"family": "llama"}, "data": {"kind": "text", "objective": "causal-lm"}, "knobs": defaults()}
    return export_run(run_file(**{**record, **fields}), folder, to)


@pytest.mark.parametrize("to", PARSED)
@settings(max_examples=60)
@given(field=st.sampled_from(sorted(FIELDS)), text=HOSTILE, oom=st.booleans())
@example(field="run_id", text="coding: utf-7 +AAo-import os+AAo-", oom=True)
def test_f01_any_text_of_a_record_leaves_the_code_of_an_export_as_it_is(to, field, text, oom):
    with tempfile.TemporaryDirectory() as folder:
        if oom:
            (Path(folder) / "result.json").write_text('{"run_id": "r1", "state": "oom", "reason": "", "preset": ""}')
        try:
            hostile = export_of(to, Path(folder), FIELDS[field](text))
        except UserError:
            return
        harmless = export_of(to, Path(folder), FIELDS[field]("x") if not field.startswith("knob") else {})
    assert all(name == Path(name).name for name in hostile.files)
    if field.startswith("knob"):
        # A text that is a value is another value, as code too.
        PARSED[to](hostile.text)
    else:
        assert PARSED[to](hostile.text) == PARSED[to](harmless.text)
    assert not {"\x1b", "\x9b", "\u202e", "\r"} & set(hostile.text)


@pytest.mark.parametrize("to", ["command", "preset"])
@settings(max_examples=60)
@given(text=HOSTILE.filter(bool))
def test_f01_any_text_of_a_script_leaves_the_code_of_its_export_as_it_is(to, text):
    def of_script(text):
        asked = ScriptAsked(command=["python", "train.py", text], argv=[])
        fields = {"preset": text, "cwd": text, "script": asked, "versions": {"torch": text}}
        return export_of(to, Path("/nowhere"), fields)

    try:
        hostile = of_script(text)
    except UserError:
        assert any(unicodedata.category(sign).startswith("C") for sign in text)
        return
    words = ["python", "train.py", text]
    assert all(name == Path(name).name for name in hostile.files)
    if to == "command":
        assert shlex.split(hostile.text, comments=True) == words
    else:
        assert tomllib.loads(hostile.text)["script"]["command"] == words

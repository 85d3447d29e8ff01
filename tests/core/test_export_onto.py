"""Settings of a run as a diff of the user's own script or shell file."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import msgspec
import pytest

from trainfast_runner.errors import UserError
from trainfast_runner.export.onto import OntoFile, onto
from trainfast_runner.records.run_file import ClockAnchor, RunFile
from trainfast_runner.records.script_run import ScriptAsked
from trainfast_runner.settings.knobs import defaults

KNOBS = {"batch_size": 16, "precision": "bf16", "checkpointing": "full", "workers": 2, "lr": 0.01}


def a_run(script: bool = False, **knobs: object) -> RunFile:
    return RunFile(
        run_id="r1",
        preset="tiny-llama",
        model={"family": "llama"},
        data={"kind": "text", "objective": "causal-lm"},
        knobs=knobs if script else {**defaults(), "devices": 1, **KNOBS, **knobs},
        script=ScriptAsked(command=["python", "train.py"], argv=[]) if script else None,
        clock=ClockAnchor(monotonic_ns=0, wall_ns=0),
    )


def changed(file: Path, run: RunFile | None = None) -> tuple[str, OntoFile]:
    """The file with the diff applied by git, and what was found."""
    found = onto(run or a_run(), file)
    if found.diff:
        (file.parent / "change.patch").write_text(found.diff.replace(str(file), file.name))
        subprocess.run(["git", "apply", "-p0", "change.patch"], cwd=file.parent, check=True)
    return file.read_text(), found


TRAINER = """\
# größer
args = TrainingArguments(
    "out",  # kept
    per_device_train_batch_size=(4),
    learning_rate=LR,
    activation_checkpointing=False,
    report_to="none",
)
"""


def test_a_trainers_call_gets_the_settings_and_keeps_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(TRAINER)
    text, found = changed(file)
    call = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    given = {one.arg: ast.unparse(one.value) for one in call.keywords}
    assert given["per_device_train_batch_size"] == "16"
    assert (given["bf16"], given["activation_checkpointing"], given["dataloader_num_workers"]) == ("True", "True", "2")
    assert given["learning_rate"] == "LR", "a preset's rate is not the user's"
    assert not {"gradient_checkpointing", "max_steps", "seed", "fp16"} & set(given)
    assert '    "out",  # kept\n' in text
    assert found.notes == ()
    assert changed(file)[1].diff == "", "a second time changes nothing"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_precision_without_tf32_turns_it_off_where_it_stands(tmp_path: Path, precision: str) -> None:
    file, shell = tmp_path / "train.py", tmp_path / "train.sh"
    file.write_text("args = TrainingArguments('out', tf32=True)\n")
    text, _ = changed(file, a_run(precision=precision))
    assert "tf32=False" in text
    shell.write_text("python train.py --output_dir out --tf32 True\n")
    text, _ = changed(shell, a_run(precision=precision))
    assert "--tf32 False" in text
    file.write_text("args = TrainingArguments('out')\n")
    assert "tf32" not in changed(file, a_run(precision=precision))[0], "not added"


def test_a_flag_that_goes_takes_its_line_along(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(
        "python train.py \\\n  --output_dir out \\\n  --dataloader_prefetch_factor 2 \\\n  --learning_rate 0.01\n"
    )
    text, _ = changed(file, a_run(workers=0))
    assert text.endswith("  --output_dir out \\\n  --learning_rate 0.01\n")


def test_a_lone_carriage_return_ends_a_line(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_bytes(b"x='''a\rb'''\nTrainingArguments(per_device_train_batch_size=1)\n")
    text, _ = changed(file)
    call = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    assert {one.arg: ast.unparse(one.value) for one in call.keywords}["per_device_train_batch_size"] == "16"


@pytest.mark.parametrize("end", ["\r", "\r\n", "\n"])
def test_an_argument_on_its_own_line_keeps_its_indent(tmp_path: Path, end: str) -> None:
    file = tmp_path / "train.py"
    file.write_bytes(end.join(("TrainingArguments(", "    report_to='none',", ")", "")).encode())
    text, _ = changed(file)
    assert "\n    report_to='none'" in text
    ast.parse(text)


def test_a_value_that_is_no_literal_is_left_and_named(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("args = TrainingArguments('out', per_device_train_batch_size=flags.bs, **more)\n")
    text, found = changed(file)
    assert "per_device_train_batch_size=flags.bs" in text
    assert f"{file}:1: per_device_train_batch_size is flags.bs: make it 16" in found.notes
    assert f"{file}:1: **more may hold settings too" in found.notes


def test_a_plain_loop_gets_them_into_its_loader(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("train = DataLoader(data, 4, shuffle=True)\nvalid = DataLoader(other)\nmodel.train()\n")
    text, _ = changed(file, a_run(script=True, workers=2, pin_memory="on"))
    assert "train = DataLoader(data, 4, num_workers=2, pin_memory=True, shuffle=True)\n" in text
    assert "valid = DataLoader(other)\n" in text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("DataLoader(data, 4)", "DataLoader(data, 16, num_workers=2)"),
        ("DataLoader(\n    data,\n)", "DataLoader(\n    data,\nbatch_size=16, num_workers=2)"),
        ("DataLoader(\n    data  # x, y\n)", "DataLoader(\n    data  # x, y\n, batch_size=16, num_workers=2)"),
    ],
)
def test_arguments_without_names_are_changed_in_their_places(tmp_path: Path, before: str, after: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"\x0c\nloader = {before}\n")
    assert changed(file, a_run(script=True, batch_size=16, workers=2))[0] == f"\x0c\nloader = {after}\n"


def test_a_loader_with_a_batch_sampler_gets_no_batch_size(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("loader = DataLoader(data, batch_sampler=sampler)\n")
    text, found = changed(file, a_run(script=True, batch_size=16, workers=2))
    assert text == "loader = DataLoader(data, num_workers=2, batch_sampler=sampler)\n"
    assert f"{file}:1: batch_sampler makes the batches: batch_size has to be 16" in found.notes


def test_a_shell_file_keeps_what_stands_behind_its_command(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text("cd x && python train.py --output_dir 'a;b' --fp16 False; echo done --bf16 # --optim\n")
    text, _ = changed(file, a_run(script=True, precision="fp16"))
    assert text == ("cd x && python train.py --output_dir 'a;b' --fp16 True; echo done --bf16 # --optim\n"), (
        "no flag of another command is taken for the script's"
    )


def test_a_launchers_module_is_not_the_script_of_a_shell_file(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    launch = "python -m accelerate.commands.launch --fp16 -m a.train"
    file.write_text(f"{launch} --output_dir x --config sizes.py\n")
    text, _ = changed(file, a_run(script=True, precision="fp16"))
    assert text == f"{launch} --fp16 True --output_dir x --config sizes.py\n"


@pytest.mark.parametrize("script", [False, True])
def test_the_note_on_several_processes_has_the_words_that_start_them(tmp_path: Path, script: bool) -> None:
    file = tmp_path / "train.py"
    file.write_text(TRAINER)
    run = a_run(script, batch_size=16) if script else a_run(strategy="ddp", devices=2)
    _, found = changed(file, msgspec.structs.replace(run, world_size=2))
    words = "torchrun --standalone --nproc-per-node 2"
    assert f"the run had 2 processes: start the script with {words}" in found.notes


def test_a_shell_file_gets_flags(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(
        "export WANDB=1\n# python old.py --bf16\ntorchrun --nproc-per-node 2 train.py \\\n  --output_dir out \\\n"
        '  --per-device-train-batch-size=4 --fp16 --optim "sgd" \\\n  --dataloader_num_workers $N "$@" > log 2>&1\n'
    )
    text, found = changed(file)
    assert "--per-device-train-batch-size=16 --fp16 False --optim adamw_torch \\\n" in text
    assert "train.py \\\n  --bf16 True" in text
    assert '--dataloader_num_workers $N "$@" > log 2>&1\n' in text
    assert f"{file}: --dataloader_num_workers is $N: make it 2" in found.notes
    assert text.startswith("export WANDB=1\n# python old.py --bf16\n")


@pytest.mark.parametrize(
    ("word", "new_word"),
    [
        ("'--per-device-train-batch-size=4'", "--per-device-train-batch-size=16"),
        ('"--per_device_train_batch_size" "4"', '"--per_device_train_batch_size" 16'),
        ('"--per_device_train_batch_size=$BS"', '"--per_device_train_batch_size=$BS"'),
        ('--"per-device-train-batch-size=4"', "--per-device-train-batch-size=16"),
    ],
)
def test_a_flag_in_quotes_is_not_given_twice(tmp_path: Path, word: str, new_word: str) -> None:
    file = tmp_path / "train.sh"
    file.write_text(f"python train.py {word} --output_dir out\n")
    text, found = changed(file, a_run(script=True, batch_size=16))
    assert text == f"python train.py {new_word} --output_dir out\n"
    assert found.notes == ((f"{file}: --per_device_train_batch_size is $BS: make it 16",) if "$" in word else ())


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("train.py", "x = (\n", "train.py:1: not Python"),
        ("train.py", f"x = {'-' * 9000}1\n", "train.py: Python's parser cannot read it"),
        ("train.py", "print(1)\n", "calls none of TrainingArguments, Accelerator, DataLoader"),
        ("train.sh", "ls\n", "starts no script"),
        ("train.sh", "python a.py --output_dir x\npython b.py\n", "starts scripts in lines 1, 2"),
        ("train.sh", "python a.py && python b.py --output_dir x\n", "starts scripts in lines 1, 1"),
        ("train.sh", "python a.py --bs 4\n", "none of the flags of transformers' TrainingArguments"),
    ],
)
def test_a_file_without_a_place_is_refused(tmp_path: Path, name: str, text: str, expected: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as refused:
        onto(a_run(), tmp_path / name)
    assert expected in refused.value.line()


def flagged_run(**knobs: object) -> RunFile:
    """The run of a script with flags of its own for batch size and precision."""
    flag_words = {"batch_size": "--bs {}", "precision": {"bf16": "--bf16", "fp32": ""}}
    asked = ScriptAsked(
        command=["python", "train.py"], argv=[], flagged=["batch_size", "precision"], flag_words=flag_words
    )
    return msgspec.structs.replace(a_run(script=True, **knobs), script=asked)


def test_flags_behind_a_redirection_are_the_commands(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text("python train.py --output_dir x 2>&1 > log.txt --fp16 True | tee >(cat) --fp16\n")
    text, _ = changed(file, a_run(script=True, precision="bf16"))
    assert text == "python train.py --bf16 True --output_dir x 2>&1 > log.txt --fp16 False | tee >(cat) --fp16\n"


def test_a_scripts_own_flags_are_put_into_its_command(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text('python  train.py \\\n  --bs 4 "$@" > log\n')
    text, found = changed(file, flagged_run(batch_size=16, precision="bf16", lr=0.1))
    assert text == 'python  train.py \\\n  --bs 16 "$@" --bf16 > log\n'
    assert found.notes == (f"{file}: its command has no flag for learning_rate",)
    file.write_text("python train.py --bs $BS\n")
    text, found = changed(file, flagged_run(batch_size=16))
    assert text == "python train.py --bs $BS\n"
    assert found.notes == (f"{file}: $BS has to be 16",)


def test_a_scripts_own_flag_gets_another_default(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "parser.add_argument('-b', '--bs', type=int, default=4)\nloader = DataLoader(data, batch_size=args.bs)\n"
    )
    text, found = changed(file, flagged_run(batch_size=16))
    assert text.startswith("parser.add_argument('-b', '--bs', type=int, default=16)\n")
    assert found.notes == (f"{file}:1: a command that names --bs wins over its default",)
    _, found = changed(file, flagged_run(batch_size=16, workers=2))
    assert "num_workers=2" in file.read_text()
    file.write_text("@click.option('--bs', required=True)\ndef main(bs): ...\n")
    assert changed(file, flagged_run(batch_size=16))[1].notes == (f"{file}:1: --bs is required: give it 16",)


def test_a_diff_has_the_path_that_git_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "below" / "train.py"
    file.parent.mkdir()
    file.write_text("loader = DataLoader(data)\n")
    monkeypatch.chdir(tmp_path)
    run = a_run(script=True, batch_size=16)
    for given in (file, file.relative_to(tmp_path)):
        assert onto(run, given).diff.startswith("--- below/train.py\n+++ below/train.py\n")
    monkeypatch.chdir(file.parent)
    assert onto(run, Path("../below/train.py")).diff.startswith("--- ../below/train.py\n")


def test_a_loaders_arguments_by_place_are_not_written_twice(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("loader = DataLoader(data, 4, True, None, None, 1)\n")
    assert "DataLoader(data, 4, True, None, None, 2" in changed(file, a_run(script=True, workers=2))[0]
    file.write_text("loader = DataLoader(*args, shuffle=True)\n")
    assert f"{file}:1: *args may hold settings too" in changed(file, a_run(script=True, workers=2))[1].notes

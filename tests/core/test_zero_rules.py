"""Settings that ZeRO cannot run are refused before launch, with settings that work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainfast_runner.errors import UserError
from trainfast_runner.machine import extensions
from trainfast_runner.machine.cpu import cpu_info
from trainfast_runner.machine.devices import Machine
from trainfast_runner.settings.compatibility import zero_rules
from trainfast_runner.settings.compatibility.check import check
from trainfast_runner.settings.compatibility.facts import Facts
from trainfast_runner.settings.spec import resolve
from trainfast_runner.settings.strategy_of_run import offload_folder

CPU = Machine(device="cpu", gpus=(), nvml_gpus=(), cores=2)
INSTALLED = {"deepspeed": "0.19.8", "bitsandbytes": "0.50"}


def refusal(*settings: str, versions: dict[str, str | None] = INSTALLED) -> UserError:
    with pytest.raises(UserError) as refused:
        check(Facts(resolve("tiny-llama", settings), CPU, {}, versions, "/env/bin/python"))
    return refused.value


@pytest.mark.parametrize(
    ("settings", "key", "expected", "instead"),
    [
        (["strategy=zero3", "optimizer=adamw-8bit"], "optimizer", "strategy=zero3", "strategy=zero2"),
        (["strategy=zero2-offload", "optimizer=adamw-8bit"], "optimizer", "strategy=zero2-offload", "zero2"),
        (["strategy=zero1", "optimizer=adafactor"], "optimizer", "strategy=zero1", "strategy=ddp"),
        (["strategy=zero2", "compile=default"], "compile", "strategy=zero2", "compile=off"),
        (["strategy=zero2", "engine=trainer"], "engine", "strategy=zero2", "engine=native"),
        (["strategy=zero2-offload", "offload_path=/tmp"], "offload_path", "belongs to strategy zero3-offload", ""),
        (["strategy=zero3-offload", "offload_path=/nowhere"], "offload_path", "does not exist", "mkdir -p /nowhere"),
        (["strategy=zero3-offload", f"offload_path={__file__}"], "offload_path", "is a file", ""),
    ],
)
def test_what_cannot_work_is_refused(settings: list[str], key: str, expected: str, instead: str) -> None:
    problem = refusal(*settings)
    assert problem.key == key
    assert settings[-1].partition("=")[0] in problem.message
    assert expected in problem.message
    assert instead in (problem.advice or "")


def test_an_offload_path_of_somebody_else_is_refused_and_untouched(tmp_path: Path) -> None:
    """Root is refused too, although root may write anywhere."""
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o755)
    (theirs / "trainfast-offload-work").mkdir()
    if os.geteuid() == 0:
        os.chown(theirs, 54321, 54321)
    else:
        theirs.chmod(0o555)
    text = refusal("strategy=zero3-offload", f"offload_path={theirs}").line()
    assert text.startswith(f"offload_path={theirs} {'belongs to user 54321' if os.geteuid() == 0 else 'cannot be'}")
    assert "a directory of your own" in text
    assert (theirs / "trainfast-offload-work").is_dir()


def test_a_full_offload_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_rules, "free_bytes", lambda folder: 3 << 20)
    text = refusal("strategy=zero3-offload", f"offload_path={tmp_path}").line()
    assert text == f"offload_path={tmp_path} is full: 3 MiB free; try a directory on a disk with free space"


@pytest.mark.parametrize(
    ("settings", "bytes_per_parameter"),
    [([], 12), (["optimizer=sgd"], 4), (["precision=bf16-pure"], 6), (["precision=bf16"], 12)],
)
def test_an_offload_path_too_small_for_the_states_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], bytes_per_parameter: int
) -> None:
    count = 10 << 20
    knobs = resolve("tiny-llama", ["strategy=zero3-offload", f"offload_path={tmp_path}", *settings]).knobs
    monkeypatch.setattr(zero_rules, "free_bytes", lambda folder: count * bytes_per_parameter)
    zero_rules.refuse_small_disk(knobs, count)
    zero_rules.refuse_small_disk(knobs, None)
    monkeypatch.setattr(zero_rules, "free_bytes", lambda folder: count * bytes_per_parameter - (1 << 20))
    with pytest.raises(UserError, match="the states of 10,485,760 parameters take") as refused:
        zero_rules.refuse_small_disk(knobs, count)
    assert f"has {10 * bytes_per_parameter - 1} MiB free" in refused.value.line()
    assert refused.value.exit_code == 2


def test_an_offload_path_that_the_strategy_does_not_read_is_ignored(tmp_path: Path) -> None:
    knobs = resolve("tiny-llama", ["strategy=zero3-offload", f"offload_path={tmp_path / 'gone'}"]).knobs
    assert offload_folder(knobs) == tmp_path / "gone"
    inherited = {**knobs, "strategy": "single"}
    assert offload_folder(inherited) is None
    zero_rules.refuse_small_disk(inherited, 10 << 20)


def test_deepspeed_is_named_with_the_command_that_installs_it() -> None:
    text = refusal("strategy=zero1", versions={"deepspeed": None}).line()
    assert "/env/bin/python -m pip install deepspeed" in text


def test_a_disk_needs_a_compiler_and_libaio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["strategy=zero3-offload", f"offload_path={tmp_path}"]
    monkeypatch.setattr(zero_rules, "missing_tool", lambda python: None)
    monkeypatch.setattr(zero_rules, "has_libaio", lambda python: False)
    assert "apt-get install libaio-dev" in refusal(*settings).line()
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "apt-get install g++" in refusal(*settings).line()
    (tmp_path / "c++").write_text("#!/bin/sh\n")
    (tmp_path / "c++").chmod(0o755)
    assert extensions.missing_tool("/env/bin/python") == ("ninja", "/env/bin/python -m pip install ninja")


def test_half_precision_needs_the_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = tmp_path / "cpuinfo"
    flags.write_text("flags: avx512f\n")
    monkeypatch.setattr(cpu_info, "CPU_INFO", flags)
    monkeypatch.setattr(cpu_info, "_cpu_info", cpu_info._cpu_info.__wrapped__)
    assert refusal("strategy=zero2", "precision=fp16").advice == "precision=bf16"


@pytest.mark.parametrize(
    "settings",
    [["strategy=zero1"], ["strategy=zero2", "optimizer=adamw-8bit"], ["strategy=zero3-offload", "precision=bf16"]],
)
def test_what_works_is_let_through(settings: list[str]) -> None:
    facts = Facts(resolve("tiny-llama", settings), CPU, {}, INSTALLED, "/env/bin/python")
    check(facts)

"""Settings that cannot work together: refused before launch, both named, and at once."""

from pathlib import Path

import pytest

from cli.command import Cli

WARM = ("strategy=ddp", "devices=9")
SECONDS = 1.0

BAD = [
    # What is asked, the knob at fault, words that the line must hold, the way out.
    (["strategy=zero3+pp"], "strategy", ["zero3 and pp do not work together"], "zero3"),
    (["strategy=zero3", "devices=2", "optimizer=adamw-8bit"], "optimizer", ["strategy=zero3"], "strategy=zero2"),
    (["strategy=zero2", "devices=2", "optimizer=adafactor"], "optimizer", ["strategy=zero2"], "optimizer=adamw"),
    (["strategy=zero2", "devices=2", "compile=default"], "compile", ["strategy=zero2"], "compile=off"),
    (["strategy=zero3-offload", "devices=2", "offload_path=/nowhere/nvme"], "offload_path", ["zero3-offload"], "mkdir"),
    (
        ["strategy=zero3-offload", f"offload_path={__file__}"],
        "offload_path",
        ["is a file"],
        f"offload_path={Path(__file__).parent}",
    ),
    (["strategy=fsdp", "devices=2", "optimizer=adamw-8bit"], "optimizer", ["strategy=fsdp"], "adamw-fused"),
    (["strategy=fsdp", "devices=2", "optimizer=adafactor"], "optimizer", ["strategy=fsdp"], "adamw-fused"),
    (["strategy=tp", "devices=2", "optimizer=adafactor"], "optimizer", ["strategy=tp"], "adamw-fused"),
    (["strategy=tp", "tp_degree=3"], "tp_degree", ["4 heads"], "tp_degree=2"),
    (["strategy=ddp+tp", "devices=3"], "devices", ["tp_degree=2"], "devices=4"),
    (["strategy=tp", "compile=default"], "compile", ["strategy=tp"], "compile=off"),
    (["strategy=pp", "pp_degree=8"], "pp_degree", ["4 layers"], "pp_degree=4"),
    (["strategy=pp", "micro_batches=3"], "micro_batches", ["batch_size=8"], "micro_batches=2"),
    (["strategy=pp", "compile=default"], "compile", ["strategy=pp"], "compile=off"),
    (["strategy=pp", "engine=trainer"], "engine", ["strategy=pp"], "engine=native"),
    (["strategy=fsdp", "engine=accelerate"], "engine", ["strategy=fsdp"], "engine=native"),
    (["strategy=dp", "devices=2"], "strategy", ["two or more GPUs"], "strategy=ddp"),
    (["strategy=naive-mp", "devices=2"], "strategy", ["two or more GPUs"], "strategy=pp"),
    (["strategy=ddp", "devices=2", "p2p=off"], "p2p", ["on the CPU"], "p2p=on"),
    (["p2p=off"], "p2p", ["on the CPU"], "p2p=on"),
    (["strategy=dp", "devices=cpu"], "strategy", ["strategy=dp", "devices=cpu"], "strategy=ddp with devices=cpu:2"),
    (["strategy=naive-mp", "devices=cpu:4"], "strategy", ["devices=cpu:4"], "strategy=pp with devices=cpu:4"),
    (["devices=cpu:2"], "strategy", ["strategy=single", "devices=cpu:2"], "strategy=ddp"),
    (["strategy=ddp", "reshard=off"], "reshard", ["strategy=ddp"], "leaving reshard out"),
    (["optimizer=paged-adamw-8bit"], "optimizer", ["on the CPU"], "optimizer=adamw-8bit"),
    (["attention=flash"], "attention", ["on the CPU"], "attention=sdpa"),
    (["precision=tf32"], "precision", ["on the CPU"], "precision=bf16"),
    (["strategy=ddp", "devices=9"], "devices", ["at most 8 processes"], "devices=8"),
    (["devices=4"], "strategy", ["strategy=single", "devices=4"], "strategy=ddp"),
    (["pp_schedule=1f1b"], "pp_schedule", ["strategy=single"], "leaving pp_schedule out"),
    pytest.param(
        ["strategy=zero2", "devices=2", "precision=fp16"],
        "precision",
        ["strategy=zero2"],
        "precision=bf16",
        marks=pytest.mark.skipif(
            "avx512_fp16" in Path("/proc/cpuinfo").read_text(), reason="this CPU has fp16 instructions"
        ),
    ),
]


@pytest.fixture(scope="module")
def warmed(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """A command line that has asked the training Python about the model before."""
    folder = tmp_path_factory.mktemp("refused")
    cli = Cli(folder / "home", folder / "config", cache)
    assert refused(cli, *WARM, seconds=60.0)
    return cli


def refused(cli: Cli, *settings: str, seconds: float = SECONDS, **environment: str) -> dict[str, object]:
    """The refusal's object; fails when the run was not refused within so many seconds of CPU time."""
    words = ["run", "tiny-llama", *(word for setting in settings for word in ("--set", setting)), "--detach", "--json"]
    done = cli(*words, **environment)
    done.refused()
    # Its own time, which on an idle machine is the time that passes: others use this machine as well.
    assert done.cpu_s < seconds
    error = done.json["error"]
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize(("settings", "key", "expected", "instead"), BAD, ids=lambda value: str(value)[:60])
def test_a_combination_that_cannot_work(warmed, settings, key, expected, instead):
    error = refused(warmed, *settings)
    assert error["key"] == key
    for words in expected:
        assert words in str(error["message"])
    assert instead in str(error["nearest"])
    assert not (warmed.home / "runs").exists() or not list((warmed.home / "runs").iterdir())


def test_a_refused_command_does_not_ask_the_training_python_again(warmed, tmp_path):
    started = tmp_path / "started"
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nwith open({str(started)!r}, 'a') as file:\n    print(sys.orig_argv, file=file)\n"
    )
    error = refused(warmed, "strategy=zero3+pp", seconds=60.0, PYTHONPATH=str(tmp_path))
    assert error["key"] == "strategy"
    assert "inspect_model" not in started.read_text()


@pytest.mark.long
def test_an_attention_that_the_model_has_not(warmed):
    error = refused(warmed, "model.family=gemma2", "model.num_hidden_layers=1", "attention=sdpa", seconds=60.0)
    assert error["key"] == "attention"
    assert "gemma2 has no attention=sdpa" in str(error["message"])
    assert "attention=auto, which takes eager" in str(error["nearest"])
    assert not (warmed.home / "runs").exists() or not list((warmed.home / "runs").iterdir())

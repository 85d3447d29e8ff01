"""`predict` as its user sees it: rows in their order as they come, words about what is traced, problems as rows."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.core.test_memory_model import model_of

from trainfast_runner.machine.calibration import CALIBRATION_FILE, Ceiling
from trainfast_runner.machine.cpu.cpu_info import cpu_name
from trainfast_runner.memory.warm_tracer import WarmTracer
from trainfast_runner.records.home import Home
from trainfast_tui.cli import main
from trainfast_tui.cli.printing import progress

PRESET = """
schema = 1
title = "three ways"
[model]
family = "llama"
[data]
kind = "random"
objective = "causal-lm"
[knobs]
batch_size = 8
[[variants]]
id = "plain"
knobs = { precision = "fp32" }
published = { memory_gb = 1.5 }
[[variants]]
id = "half"
knobs = { precision = "bf16" }
[[variants]]
id = "many"
knobs = { precision = "fp32", strategy = "pp" }
"""


class Tracer:
    """Stands in for the script that traces; answers the parts of some precisions before those asked first."""

    def __init__(self, first: str = "") -> None:
        self.first = first
        self.printed_before: list[str] = []
        self.look: Any = None

    def __call__(
        self, executable: str, asked: list[dict[str, Any]], cancelled: object, environment: object
    ) -> Generator[dict[str, Any]]:
        model = msgspec.to_builtins(model_of(12))
        model["stretches"] = model["segments"]  # the tracer's word
        requests = list(enumerate(asked))
        requests.sort(key=lambda one: one[1]["knobs"]["precision"] != self.first)
        for number, request in requests:
            if self.look is not None:
                self.printed_before.append(self.look())
            yield {"request": number, "unused": [], **_part(model, request)}


def _part(model: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    if request.get("stages"):
        return {"untraceable": "it has no blocks"}
    optimizer, step = ("before_optimizer", "optimizer_peak"), ("parameter_sizes", "stacks", "segments", "pipeline")
    return {name: model[name] for name in (optimizer if request["part"] == "optimizer" else step)}


@pytest.fixture
def preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TRAINFAST_HOME", str(tmp_path / "home"))
    file = tmp_path / "ways.toml"
    file.write_text(PRESET)
    return str(file)


def test_rows_come_in_their_order_as_soon_as_they_are_there(
    preset: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tracer = Tracer()
    tracer.look = lambda: capsys.readouterr().out
    monkeypatch.setattr(WarmTracer, "ask_each", tracer)
    assert main(["predict", preset]) == 0
    before = "".join(tracer.printed_before)
    assert "plain" in before, "the first row does not wait for the last trace"
    lines = (before + capsys.readouterr().out).splitlines()
    assert [line.split()[0] for line in lines] == ["variant", "plain", "half", "many"]
    assert "the tracer cannot follow this model: it has no blocks" in lines[3]
    assert lines[0].index("peak in") == lines[1].index("the optimizer step"), lines


def test_a_row_waits_for_those_before_it(
    preset: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(WarmTracer, "ask_each", Tracer(first="bf16"))
    assert main(["predict", preset]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["variant", "plain", "half", "many"]
    assert main(["predict", preset, "--json"]) == 0
    text = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert text["schema"] == 1
    assert [row["id"] for row in text["rows"]] == ["plain", "half", "many"]
    assert text["rows"][0]["predicted"]["total_bytes"] > 0
    assert text["rows"][2]["predicted"] is None


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ("strategy=fsdp devices=2 optimizer=adamw-8bit", "optimizer"),
        ("strategy=zero3 devices=2 optimizer=adafactor", "optimizer"),
        ("strategy=pp micro_batches=3", "micro_batches"),
        ("strategy=ddp+pp devices=3", "devices"),
        ("strategy=ddp devices=2 memory_limit=2GiB+1GiB+1GiB", "memory_limit"),
        ("strategy=fsdp devices=2 engine=trainer", "engine"),
    ],
)
def test_knobs_that_contradict_each_other_are_refused_as_a_run_refuses_them(
    settings: str, key: str, preset: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(WarmTracer, "ask_each", Tracer())
    chosen = [word for one in settings.split() for word in ("--set", one)]
    assert main(["predict", preset, *chosen, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["predicted"] for row in rows] == [None] * 3
    assert key in rows[0]["reason"]
    assert main(["predict", "tiny-llama", *chosen, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["key"] == key


def test_a_limit_below_the_weights_ends_with_3_and_says_what_they_need(
    preset: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(WarmTracer, "ask_each", Tracer())
    assert main(["predict", f"{preset}", "--set", "memory_limit=48KiB"]) == 0, "rows speak for themselves"
    capsys.readouterr()
    single = Path(preset).with_name("single.toml")
    single.write_text(PRESET.partition("[[variants]]")[0])
    assert main(["predict", str(single), "--set", "memory_limit=60KiB"]) == 0
    assert "not even batch_size 1" in capsys.readouterr().out
    assert main(["predict", str(single), "--set", "memory_limit=48KiB", "--json"]) == 3
    text = capsys.readouterr()
    assert json.loads(text.out.splitlines()[-1])["max_batch"] == 0
    assert text.err == (
        "trainfast-tui: memory_limit=48KiB is below what the 12,500 parameters alone need: 50,000 bytes (0 MiB)\n"
    )


def test_speed_stands_beside_memory_once_the_device_is_calibrated(
    preset: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(WarmTracer, "ask_each", Tracer())
    single = Path(preset).with_name("single.toml")
    single.write_text(PRESET.partition("[[variants]]")[0])
    predict = ["predict", str(single), "--set", "devices=cpu"]

    def said(*settings: str) -> dict[str, Any]:
        assert main([*predict, *settings, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return found

    before = said()
    assert before["samples_per_s"] is None
    assert "doctor --calibrate" in before["why"]
    ceiling = Ceiling(device="cpu", name="", tflops={"fp32": 0.1}, copy_gb_per_s=10.0, operation_us=10.0, cpu_share=1.0)
    home = Home().create()
    (home.path / CALIBRATION_FILE).write_bytes(msgspec.json.encode({cpu_name(): ceiling}))
    speed = said()["samples_per_s"]
    assert speed.keys() == {"median", "low", "high", "from"}
    assert 0 < speed["low"] < speed["median"] < speed["high"] < 3 * speed["low"]
    assert said("--set", "precision=bf16")["why"] == "precision=bf16 is not calibrated on this device"
    assert main(predict) == 0
    assert "90 % interval" in capsys.readouterr().out


def test_what_does_not_fit_says_so_and_by_how_much(
    preset: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(WarmTracer, "ask_each", Tracer())
    single = Path(preset).with_name("single.toml")
    single.write_text(PRESET.partition("[[variants]]")[0])
    limited = ["predict", str(single), "--set", "memory_limit=100MiB"]

    def said(*settings: str) -> dict[str, Any]:
        assert main([*limited, *(word for one in settings for word in ("--set", one)), "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return found

    most = said()["max_batch"]
    assert said(f"batch_size={most}")["fits"] is True
    beyond = said(f"batch_size={most + 1}")
    assert (beyond["fits"], beyond["limit_bytes"]) == (False, 100 << 20)
    assert beyond["needed_bytes"] > beyond["limit_bytes"]
    assert main([*limited, "--set", f"batch_size={10 * most}"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("fits"))
    assert re.fullmatch(
        rf"fits +no, [\d.]+ MiB too much for the 100 MiB memory_limit; up to batch_size {most:,} fits", line
    )
    assert main(["predict", preset, "--set", "memory_limit=100MiB", "--set", f"batch_size={10 * most}"]) == 0
    assert all("no, +" in line for line in capsys.readouterr().out.splitlines()[1:3])


def test_what_cannot_run_here_is_predicted_in_the_words_of_its_refusal(
    preset: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(WarmTracer, "ask_each", Tracer())
    single = Path(preset).with_name("single.toml")
    single.write_text(PRESET.partition("[[variants]]")[0])
    assert main(["predict", str(single), "--set", "strategy=ddp", "--set", "devices=99"]) == 0
    text = capsys.readouterr().out
    assert "peak memory" in text
    assert re.search(r"^cannot run here +devices=99: at most 8 processes on a CPU", text, re.MULTILINE)
    assert "shared by" not in text
    assert main(["predict", str(single), "--set", "strategy=dp", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["cannot_run"].startswith("strategy=dp copies the model to each of two or more GPUs")
    assert (found["fits"], found["max_batch"]) == (None, None)
    assert main(["predict", str(single), "--set", "precision=tf32"]) == 0
    assert re.search(r"^cannot run here +precision=tf32 is a format", capsys.readouterr().out, re.MULTILINE)


def test_another_length_has_no_published_figures(
    preset: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(WarmTracer, "ask_each", Tracer())
    why = "Published figures are left out: seq_len differs from the published run."
    assert main(["predict", preset, "--set", "seq_len=64"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert "published" not in header
    assert "difference" not in header
    assert header.index("peak in") == rows[0].index("the optimizer step")
    assert rows.count(why) == 1
    assert main(["predict", f"{preset}/plain", "--set", "seq_len=64"]) == 0
    text = capsys.readouterr().out
    assert why in text
    assert "\npublished " not in text
    assert main(["predict", f"{preset}/plain", "--set", "seq_len=64", "--json"]) == 0
    words = json.loads(capsys.readouterr().out)
    assert (words["published"], words["unpublished"]) == (None, why)


def test_the_wait_for_the_imports_is_shown(
    preset: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SLOW_S", 0.0)
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.0)

    def ask_each(_tracer: WarmTracer, *asked: Any) -> Generator[dict[str, Any]]:
        yield {"imported": True}
        yield from Tracer()(*asked)

    monkeypatch.setattr(WarmTracer, "ask_each", ask_each)
    assert main(["predict", preset]) == 0
    lines = capsys.readouterr().err.splitlines()
    importing = f"importing torch and transformers in {sys.executable} (first time: some seconds)"
    assert lines.index(importing) < lines.index(next(line for line in lines if line.startswith("tracing plain")))

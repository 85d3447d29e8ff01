"""`predict` as its user sees it: rows in their order, words about what is traced, problems as rows."""

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from layered_model import model_of

from cli.command import Done
from on_disk import put
from trainfast_runner.machine.calibration import CALIBRATION_FILE, Ceiling
from trainfast_runner.machine.cpu import cpu_name
from trainfast_runner.memory import tracing
from trainfast_runner.records.home import Home
from trainfast_tui.cli import main

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
    """Stands in for the warm Python of traces; answers the parts of some precisions before those asked first."""

    def __init__(self, first=""):
        self.first = first

    def __call__(self, executable, asked, cancelled, environment):
        model = msgspec.to_builtins(model_of(12))
        model["stretches"] = model["segments"]  # the tracer's word
        requests = list(enumerate(asked))
        requests.sort(key=lambda one: one[1]["knobs"]["precision"] != self.first)
        for number, request in requests:
            yield {"request": number, "unused": [], **_part(model, request)}


def _part(model, request):
    if request.get("stages"):
        return {"untraceable": "it has no blocks"}
    optimizer, step = ("before_optimizer", "optimizer_peak"), ("parameter_sizes", "stacks", "segments", "pipeline")
    return {name: model[name] for name in (optimizer if request["part"] == "optimizer" else step)}


@dataclass
class Predict:
    """The command in this process, for a preset with three variants or for one without."""

    folder: Path
    capsys: pytest.CaptureFixture[str]
    tracer: Tracer

    def __call__(self, reference, *settings, code=0, options=()):
        words = [word for one in settings for word in ("--set", one)]
        known = {"ways": self.folder / "ways.toml", "single": self.folder / "single.toml"}
        name, _, variant = reference.partition("/")
        found = "/".join(filter(None, (str(known.get(name, name)), variant)))
        assert main(["predict", found, *words, *options]) == code
        return Done(code, *self.capsys.readouterr())

    def json(self, reference, *settings, code=0):
        return self(reference, *settings, code=code, options=("--json",)).json


@pytest.fixture
def predict(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TRAINFAST_HOME", str(tmp_path / "home"))
    (tmp_path / "ways.toml").write_text(PRESET)
    (tmp_path / "single.toml").write_text(PRESET.partition("[[variants]]")[0])
    tracer = Tracer()
    monkeypatch.setattr(tracing, "WARM", SimpleNamespace(ask_each=tracer, is_warm=bool))
    return Predict(tmp_path, capsys, tracer)


def test_rows_are_in_their_order_whatever_is_traced_first(predict):
    predict.tracer.first = "bf16"
    lines = predict("ways").out.splitlines()
    assert [line.split()[0].rstrip(":") for line in lines] == ["variant", "plain", "half", "many"]
    assert "the tracer cannot follow this model: it has no blocks" in lines[3]
    assert lines[0].index("peak in") == lines[1].index("the optimizer step"), lines
    text = predict.json("ways")
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
        ("strategy=fsdp+tp+pp devices=6", "devices"),
        ("strategy=ddp devices=2 memory_limit=2GiB+1GiB+1GiB", "memory_limit"),
        ("strategy=fsdp devices=2 engine=trainer", "engine"),
    ],
)
def test_knobs_that_contradict_each_other_are_refused_as_a_run_refuses_them(predict, settings, key):
    rows = predict.json("ways", *settings.split())["rows"]
    assert [row["predicted"] for row in rows] == [None] * 3
    assert key in rows[0]["reason"]
    assert predict.json("tiny-llama", *settings.split(), code=2)["error"]["key"] == key


def test_a_limit_below_the_weights_ends_with_3_and_says_what_they_need(predict):
    predict("ways", "memory_limit=48KiB")  # rows speak for themselves
    assert "not even batch_size 1" in predict("single", "memory_limit=60KiB").out
    done = predict("single", "memory_limit=48KiB", code=3, options=("--json",))
    assert done.json["max_batch"] == 0
    assert done.err == (
        "trainfast-tui: memory_limit=48KiB is below what the 12,500 parameters alone need: 50,000 bytes (0 MiB)\n"
    )


def test_speed_stands_beside_memory_once_the_device_is_calibrated(predict):
    before = predict.json("single", "devices=cpu")
    assert before["samples_per_s"] is None
    assert "a run tells more" in before["why"]
    ceiling = Ceiling(device="cpu", name="", tflops={"fp32": 0.1}, copy_gb_per_s=10.0, operation_us=10.0, cpu_share=1.0)
    put(Home().create().path / CALIBRATION_FILE, {cpu_name(): ceiling})
    speed = predict.json("single", "devices=cpu")["samples_per_s"]
    assert speed.keys() == {"median", "low", "high", "from"}
    assert 0 < speed["low"] < speed["median"] < speed["high"] < 3 * speed["low"]
    why = predict.json("single", "devices=cpu", "precision=bf16")["why"]
    assert why == "precision=bf16 is not calibrated on this device"
    limited = predict.json("single", "devices=cpu", "memory_limit=4GiB")
    assert limited["samples_per_s"] is None
    assert "memory_limit" in limited["why"]
    assert "90 % interval" in predict("single", "devices=cpu").out


def test_what_does_not_fit_says_so_and_by_how_much(predict):
    limit = "memory_limit=100MiB"
    most = predict.json("single", limit)["max_batch"]
    assert predict.json("single", limit, f"batch_size={most}")["fits"] is True
    beyond = predict.json("single", limit, f"batch_size={most + 1}")
    assert (beyond["fits"], beyond["limit_bytes"]) == (False, 100 << 20)
    assert beyond["needed_bytes"] > beyond["limit_bytes"]
    text = predict("single", limit, f"batch_size={10 * most}").out
    fits = rf"^fits +no, [\d.]+ MiB too much for the 100 MiB memory_limit; up to batch_size {most:,} fits$"
    assert re.search(fits, text, re.MULTILINE)
    rows = predict("ways", limit, f"batch_size={10 * most}").out.splitlines()[1:3]
    assert all("no, +" in line for line in rows)

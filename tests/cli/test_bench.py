"""`bench` and `doctor --calibrate` for real."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.command import Cli
from plans import PLAN
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Result
from trainfast_runner.running.launch import DevicesBusy
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.bench.variants import Entry
from trainfast_runner.search.bench.warm_rows import warm_rows
from trainfast_tui.cli import bench
from trainfast_tui.cli.follow_run import Signals

pytestmark = pytest.mark.xdist_group("trainings-of-the-command-line")

TABLE = """
schema = 1
extends = "tiny-llama"
title = "Two rows and one that cannot run"
baseline = "plain"
[model]
hidden_size = 32
num_hidden_layers = 1
[data]
kind = "random"
[knobs]
seq_len = 16
steps = 8
[[variants]]
id = "plain"
knobs = { batch_size = 4 }
published = { samples_per_s = 10.0 }
[[variants]]
id = "two cards"
knobs = { strategy = "dp", devices = 2 }
published = { samples_per_s = 20.0 }
[[variants]]
id = "bert"
model = { family = "bert", hidden_size = 32, num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = 64 }
data = { objective = "masked-lm" }
knobs = { batch_size = 4 }
"""


@pytest.mark.long
def test_a_table_of_real_runs_beside_a_measured_ceiling(cli: Cli, tmp_path: Path) -> None:
    (cli.presets / "mine.toml").write_text(TABLE)
    measured = cli("doctor", "--calibrate", "--json").json["calibration"]
    assert measured["tflops"]["fp32"] > 0
    assert measured["copy_gb_per_s"] > 0
    assert 0 < measured["cpu_share"] <= 1
    report = tmp_path / "table.md"
    done = cli("bench", "mine", "--scale-batch", "0.5", "-o", str(report), "--json")
    assert done.code == 0, done.err
    assert "mine 2/3: two cards" in done.err
    table = done.json
    assert (table["preset"], table["baseline"]) == ("mine", "plain")
    plain, refused, bert = table["rows"]
    assert (plain["state"], plain["vs_baseline_percent"]) == ("finished", 0.0)
    assert plain["result"]["knobs"]["batch_size"] == 2
    assert plain["ratio"] == pytest.approx(plain["result"]["throughput"]["samples_per_s"]["median"] / 10)
    flops = plain["result"]["flops"]
    assert flops["peak_source"] == "measured by doctor --calibrate"
    assert flops["peak_tflops"] == measured["tflops"]["fp32"]
    assert flops["mfu"] == pytest.approx(flops["model_tflops_per_device"] / flops["peak_tflops"])
    assert (refused["state"], refused["result"], refused["ratio"]) == ("refused", None, None)
    assert "two GPUs" in refused["reason"] or "GPU" in refused["reason"]
    assert bert["state"] == "finished"
    text = report.read_text()
    assert "| plain (baseline) |" in text
    assert "trainfast-tui bench mine --scale-batch 0.5" in text


@pytest.mark.long
def test_ctrl_c_stops_the_run_and_the_bench(cli: Cli) -> None:
    (cli.presets / "mine.toml").write_text(TABLE)
    started = cli.start("bench", "mine", "--set", "steps=1000000", "--json")
    started.until_said("running 1")
    started.signal(signal.SIGINT)
    done = started.end()
    assert done.code == 130, done.err
    rows = json.loads(done.out.splitlines()[-1])["rows"]
    assert [row["state"] for row in rows] == ["stopped", "not_run", "not_run"]


def test_what_bench_cannot_take_is_refused_at_once(cli: Cli) -> None:
    assert "no variants" in cli("bench", "tiny-llama").refused()
    assert "--repeat: must be a whole number from 1 on" in cli("bench", "benchmarks-bert", "--repeat", "0").refused()
    assert "--scale-batch" in cli("bench", "benchmarks-bert", "--scale-batch", "-1").refused()
    assert "did you mean steps?" in cli("bench", "benchmarks-bert", "--set", "step=3").refused()


@pytest.mark.parametrize("wait", [True, False])
def test_with_wait_a_run_that_takes_the_device_between_two_rows_fails_none(
    wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noting(name: str) -> Callable[..., None]:
        return lambda *arguments: done.append(name)

    def start(plan: RunPlan, home: Home) -> Path:
        done.append("start")
        if done.count("start") == 1:
            raise DevicesBusy("the CPU is in use by another-run")
        return tmp_path

    for name in ("await_devices", "predict_memory", "await_cooling"):
        monkeypatch.setattr(bench, name, noting(name))
    monkeypatch.setattr(bench.launch, "start", start)
    monkeypatch.setattr(bench, "follow", lambda *arguments, **options: Result(run_id="r", state="finished"))
    row, asked = Entry("one", PLAN.spec, {}, lambda: PLAN), argparse.Namespace(wait=wait, cool_to=50.0)
    home = Home(tmp_path)
    with warm_rows(home, lambda: None) as warm:
        if not wait:
            with pytest.raises(DevicesBusy):
                bench._run_one(row, None, warm, home, Signals(), asked)
            return
        outcome = bench._run_one(row, None, warm, home, Signals(), asked)
    assert isinstance(outcome, Result)
    assert done == ["await_devices", "await_cooling", "predict_memory", "start"] * 2

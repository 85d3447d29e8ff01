"""`bench` and `doctor --calibrate` for real."""

import argparse
import itertools
import json
import os
import signal
from dataclasses import replace

import pytest

from cli.command import SMALL
from on_disk import put, run_file
from plans import PLAN
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Result, Spread, Throughput
from trainfast_runner.records.run_directory import shared_lock
from trainfast_runner.running.planning import DevicesBusy
from trainfast_runner.search.conductor import Cancelled
from trainfast_tui.cli import bench, launching
from trainfast_tui.cli.signals import caught_signals

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
def test_a_table_of_real_runs_beside_a_measured_ceiling(cli, tmp_path):
    (cli.presets / "mine.toml").write_text(TABLE)
    measured = cli("doctor", "--calibrate", "--json").json["calibration"]
    assert measured["tflops"]["fp32"] > 0
    assert measured["copy_gb_per_s"] > 0
    assert measured["launches_per_s"] == pytest.approx(1e6 / measured["operation_us"])
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


TINY = ("bench", "tiny-llama", *SMALL, "--set", "steps=6", "--json")


@pytest.mark.long
def test_rows_are_runs_of_their_own_and_a_refused_one_keeps_its_reason(cli, tmp_path):
    page = tmp_path / "table.html"
    done = cli(*TINY, "--vary", "batch_size=2,4", "--vary", "strategy=single,dp", "--repeat", "2", "-o", str(page))
    assert done.code == 0, done.err
    assert done.json["baseline"] == "batch_size=2 strategy=single"
    one, refused, two, also_refused = done.json["rows"]
    assert [(row["state"], "GPU" in row["reason"]) for row in (refused, also_refused)] == [("refused", True)] * 2
    assert [(row["state"], len(row["samples_per_s"])) for row in (one, two)] == [("finished", 2)] * 2
    assert len(cli("runs", "list", "--json").json["runs"]) == 4
    median = [sum(row["samples_per_s"]) / 2 for row in (one, two)]
    assert two["vs_baseline_percent"] == pytest.approx(100 * (median[1] / median[0] - 1))
    assert "<td>batch_size=4 strategy=single</td>" in page.read_text()


BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 2048}
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 2048}


@pytest.mark.longest
@pytest.mark.parametrize(
    ("row", "model"),
    [
        ("benchmarks-bert/bert_6", BERT),
        ("benchmarks-gpt2/gpt_2", GPT2),
        ("benchmarks-multi-gpu/mgpt_1 (zero2)", BERT),
        ("guide-dp-ddp-nvlink/dp", GPT2),
        ("guide-fp16-batch/b64-fp16", BERT),
        ("guide-single-gpu/all+adam8bit", {**BERT, "vocab_size": 32000}),
    ],
)
def test_a_row_of_every_table_runs_beside_its_baseline(cli, tmp_path, row, model):
    preset, _, variant = row.partition("/")
    settings = [f"model.{name}={value}" for name, value in model.items()]
    settings += ["seq_len=16", "steps=4", "timing_warmup=1"]
    report = tmp_path / "table.md"
    words = [word for setting in settings for word in ("--set", setting)]
    done = cli("bench", row, "--scale-batch", "0.01", *words, "-o", str(report), "--json")
    assert done.code == 0, done.err
    rows = {found["id"]: found for found in done.json["rows"]}
    assert (done.json["preset"], set(rows)) == (preset, {done.json["baseline"], variant})
    assert rows[done.json["baseline"]]["state"] == "finished", done.err
    mine = rows[variant]
    # The model is another one than that of the published figures.
    assert (mine["published"], mine["ratio"]) == ({}, None)
    assert "model.hidden_size" in done.json["unpublished"] or "model.n_embd" in done.json["unpublished"]
    if variant == "dp":
        assert (mine["state"], mine["ratio"]) == ("refused", None)
        assert "two or more GPUs" in mine["reason"]
    else:
        assert mine["state"] == "finished", mine["reason"]
        rate = mine["result"]["throughput"]["samples_per_s"]["median"]
        assert rate > 0
        # GPT-2 stands in BERT's table, but their samples are not the same work.
        assert (mine["vs_baseline_percent"] is None) == variant.startswith("mgpt")
    assert f"| {variant} |" in report.read_text()


@pytest.mark.long
def test_ctrl_c_stops_the_run_and_the_bench(cli):
    (cli.presets / "mine.toml").write_text(TABLE)
    started = cli.start("bench", "mine", "--set", "steps=1000000", "--json")
    started.until_printed("running 1")
    started.signal(signal.SIGINT)
    done = started.end()
    assert done.code == 130, done.err
    rows = json.loads(done.out.splitlines()[-1])["rows"]
    assert [row["state"] for row in rows] == ["stopped", "not_run", "not_run"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_wait_of_a_bench_for_a_device(cli, number, code):
    (cli.presets / "mine.toml").write_text(TABLE)
    run_id, directory = Home(cli.home).create().new_run("holder")
    run = run_file(run_id=run_id, device="cpu")
    put(directory / "run.json", run)
    with shared_lock(directory):
        started = cli.start("bench", "mine", "--wait", "--json")
        started.until_printed(f"waiting for {run_id}")
        started.signal(number)
        done = started.end()
    assert done.code == code, done.err
    if code == 130:
        assert [row["state"] for row in done.json["rows"]] == ["not_run"] * 3


def test_ctrl_c_during_a_start_that_loses_the_device_ends_the_command(tmp_path, monkeypatch):
    waited = []

    def start(plan, home, on_wait):
        os.kill(os.getpid(), signal.SIGINT)
        raise DevicesBusy("the CPU is in use by another-run")

    monkeypatch.setattr(launching, "await_devices", lambda *arguments: waited.append("wait"))
    monkeypatch.setattr(launching.launch, "start", start)
    monkeypatch.setattr(launching, "predict_memory", lambda *arguments: None)
    with caught_signals() as signals, pytest.raises(Cancelled):
        launching.start_when_free(PLAN, Home(tmp_path), signals, wait=True)
    assert waited == ["wait"]


def benched(*words):
    """The exit code of `bench tiny-llama --json` with these words, in this process."""
    parser = argparse.ArgumentParser()
    bench.bench_arguments(parser)
    return bench.bench(parser.parse_args(["tiny-llama", "--json", "--set", "batch_size=2", *words]))


@pytest.fixture
def starts(tmp_path, monkeypatch):
    """Numbers, from 1, of the starts that find the device in use by another run; every other run finishes at once."""
    busy = []
    numbers = itertools.count(1)

    def start(plan, home, on_wait):
        if next(numbers) in busy:
            raise DevicesBusy("the CPU is in use by another-run", advice="trainfast-tui stop another-run, or --wait")
        return tmp_path

    finished = Result(run_id="r", state="finished", throughput=Throughput(samples_per_s=Spread(median=9.0, mad=0.01)))
    monkeypatch.setenv("TRAINFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(bench.planning, "plan_run", lambda spec, python: replace(PLAN, spec=spec))
    monkeypatch.setattr(launching, "predict_memory", lambda *arguments: None)
    monkeypatch.setattr(launching.launch, "start", start)
    monkeypatch.setattr(bench, "follow", lambda *arguments, **options: finished)
    return busy


def test_row_whose_device_another_run_took_is_named_and_the_measured_rows_stay(starts, capsys):
    # Two rounds of three rows: the second row misses its first, the baseline its second, the third row both.
    starts += [2, 3, 4, 6]
    assert benched("--vary", "batch_size=2,4,8", "--repeat", "2") == 0, "the baseline finished"
    out, err = capsys.readouterr()
    rows = {row["id"]: row for row in json.loads(out.splitlines()[-1])["rows"]}
    assert {id: (row["state"], len(row["samples_per_s"])) for id, row in rows.items()} == {
        "batch_size=2": ("finished", 1),
        "batch_size=4": ("finished", 1),
        "batch_size=8": ("not_run", 0),
    }
    assert rows["batch_size=8"]["reason"].startswith("the CPU is in use by another-run; try trainfast-tui stop")
    lines = err.splitlines()
    beneath = lines[lines.index("tiny-llama 3/6: batch_size=8") + 1]
    assert beneath.startswith("not run: the CPU is in use by another-run")


def test_device_in_use_before_anything_is_measured_refuses_the_bench(starts):
    starts += [1]
    with pytest.raises(DevicesBusy):
        benched("--vary", "batch_size=2,4")

"""The table of a bench, from results whose right answers are known."""

import msgspec
import pytest

from trainfast_runner.errors import UserError
from trainfast_runner.records.result import Diagnosis, Result, RunConditions, Spread, StepCount, Throttle, Throughput
from trainfast_runner.results.comparison import paired_interval
from trainfast_runner.search.bench import NOT_RUN, REFUSED, needs_no_repeat, prepare, run_order, tabulate
from trainfast_tui.cli.bench import WRITERS


def ended(rate, state="finished", reason=""):
    throughput = Throughput(samples_per_s=Spread(median=rate, mad=0.01))
    return Result(run_id="r", state=state, reason=reason, throughput=throughput, steps=StepCount(measured=9))


@pytest.fixture
def bench():
    return prepare("benchmarks-bert", ["seq_len=32"], 0.01)


def test_settings_and_scale_reach_every_row(bench):
    assert [planned.spec.knobs["batch_size"] for planned in bench.rows] == [1, 1, 1, 1, 1, 3]
    assert {planned.spec.knobs["seq_len"] for planned in bench.rows} == {32}
    assert [planned.id for planned in prepare("benchmarks-bert/bert_4").rows] == ["bert_1", "bert_4"]


def test_runs_interleave_with_the_baseline_first():
    multi = prepare("guide-dp-ddp-nvlink")
    assert [planned.id for planned in run_order(multi, 2)] == ["ddp", "dp", "ddp-nop2p", "ddp", "dp", "ddp-nop2p"]


@pytest.mark.parametrize(
    ("setting", "named"), [("seq_len=32", "seq_len"), ("model.num_hidden_layers=2", "model.num_hidden_layers")]
)
def test_another_model_or_length_has_no_published_figures(setting, named):
    other = prepare("guide-single-gpu/fp16", [setting])
    table = tabulate(other, {"vanilla": [ended(9)], "fp16": [ended(18)]})
    assert [(row.published, row.ratio, row.published_vs_baseline_percent) for row in table.rows] == [
        ({}, None, None)
    ] * 2
    text = WRITERS[".md"](table, "x")
    assert "published" not in text.replace(table.bench.unpublished, "")
    assert table.bench.unpublished == f"Published figures are left out: {named} differs from the published run."
    assert text.count(table.bench.unpublished) == 1


def test_a_batch_or_the_same_length_keeps_the_published_figures():
    same = prepare("guide-single-gpu/fp16", ["seq_len=512", "batch_size=2"])
    assert same.unpublished == ""
    assert tabulate(same, {"vanilla": [ended(8.86)]}).rows[0].ratio == pytest.approx(1)


def test_rows_stand_beside_the_baseline_and_the_published_figure():
    bench = prepare("benchmarks-bert", ["steps=32"], 0.01)
    results_by_row = {
        "bert_1": [ended(100), ended(50), ended(90)],
        "bert_2": [ended(180)],
        "bert_3": [ended(0, "oom", "could not allocate")],
        "bert_4": [UserError("no such | unit", key="precision")],
    }
    table = tabulate(bench, results_by_row)
    base, faster, oom, refused, *rest = table.rows
    assert (base.vs_baseline_percent, base.samples_per_s) == (0.0, [100, 50, 90])
    assert base.result.throughput.samples_per_s.median == 90
    assert (faster.vs_baseline_percent, faster.ratio) == (pytest.approx(100), pytest.approx(180 / 133.5))
    assert faster.verdict == "better"
    assert (oom.state, oom.reason, oom.vs_baseline_percent, oom.ratio) == ("oom", "could not allocate", None, None)
    assert (refused.state, refused.result) == (REFUSED, None)
    assert [row.state for row in rest] == [NOT_RUN] * 2
    assert needs_no_repeat(results_by_row["bert_3"])
    assert needs_no_repeat(results_by_row["bert_4"])
    assert not needs_no_repeat(results_by_row["bert_1"])
    lines = WRITERS[".md"](table, "trainfast-tui bench x").splitlines()
    rows = [line for line in lines if line.startswith("| bert_")]
    assert len(rows) == 6
    assert "+100.0 %" in rows[1]
    assert "133.5" in rows[1]
    # What the source gained by the same step stands beside its figures, run here or not.
    assert "| +50.2 % |" in rows[1]
    assert "| +56.6 % |" in rows[5]
    assert "model." not in rows[1]
    assert rows[2].endswith("| out of memory: could not allocate |")
    # A reason cannot break the table.
    assert "no such \\| unit" in rows[3]


def test_a_diagnosis_stands_beside_the_ratio():
    bench = prepare("guide-single-gpu/accum+ckpt+fp16")
    found = [Diagnosis(rule="launch-bound", line="the GPU is idle"), Diagnosis(rule="small-batch", line="too small")]
    slow = msgspec.structs.replace(ended(6.1), diagnosis=found)
    table = tabulate(bench, {"vanilla": [ended(36.6)], "accum+ckpt+fp16": [slow]})
    assert [row.diagnosis for row in table.rows] == [None, "launch-bound"]
    assert [row["diagnosis"] for row in msgspec.to_builtins(table.fields())["rows"]] == [None, "launch-bound"]
    heading, _, vanilla, launch_bound = [
        [cell.strip() for cell in line.split("|")]
        for line in WRITERS[".md"](table, "x").splitlines()
        if line.startswith("|")
    ]
    at = heading.index("diagnosis")
    assert heading[at - 1] == "ours / published"
    assert (vanilla[at], launch_bound[at - 1 : at + 1]) == ("", ["0.605", "launch-bound"])


def test_a_row_of_another_model_says_which_and_is_not_compared_with_the_baseline():
    multi = prepare("benchmarks-multi-gpu")
    results_by_row = {name: [ended(9)] for name in ("mbert_2 (ddp)", "mgpt_2 (zero2)")}
    table = tabulate(multi, results_by_row)
    found = {row.id: row for row in table.rows}
    assert found["mbert_3 (zero2)"].published_vs_baseline_percent == pytest.approx(100 * (297.4 / 319.9 - 1))
    gpt = found["mgpt_2 (zero2)"]
    assert (gpt.vs_baseline_percent, gpt.verdict, gpt.published_vs_baseline_percent) == (None, None, None)
    assert gpt.ratio == pytest.approx(9 / 2.2)
    lines = WRITERS[".md"](table, "x").splitlines()
    row = next(line for line in lines if line.startswith("| mgpt_2"))
    assert "model.family=gpt2" in row
    assert "model.num_hidden_layers=48" in row


def test_repeated_pairs_say_how_sure_a_difference_is(bench):
    """The machine slows down from repetition to repetition: the pairs do not mind, and unpaired rates would."""
    base, faster, same = (100.0, 80.0, 60.0, 40.0), (110.0, 88.5, 66.0, 43.8), (103.0, 79.0, 60.5, 39.5)
    results_by_row = {
        "bert_1": [ended(rate) for rate in base],
        "bert_2": [ended(rate) for rate in faster],
        "bert_3": [ended(rate) for rate in same],
        "bert_4": [ended(200), ended(160)],
    }
    table = tabulate(bench, results_by_row)
    _, better, noise, two, *_ = table.rows
    assert better.verdict == "better"
    assert 9 < better.interval_percent[0] < 10 < better.interval_percent[1] < 11
    assert noise.verdict == "no significant difference"
    assert noise.interval_percent[0] < 0 < noise.interval_percent[1]
    # Of two pairs Student says next to nothing: the steps of the middle runs speak.
    assert two.interval_percent[1] - two.interval_percent[0] < 15
    assert "| +9." in WRITERS[".md"](table, "x")


def test_a_row_whose_conditions_are_doubtful_says_so_beside_its_figures(bench):
    hot = msgspec.structs.replace(
        ended(90), throttle=Throttle(thermal_fraction=0.3), conditions=RunConditions(still_warming=True)
    )
    lines = WRITERS[".md"](tabulate(bench, {"bert_1": [ended(100)], "bert_2": [hot]}), "x").splitlines()
    rows = [line for line in lines if line.startswith("| bert_")]
    assert rows[0].endswith("| finished |")
    assert rows[1].endswith("| finished ? heat, warming up |")


def test_students_interval_is_the_textbooks():
    # Ratios 1.1, 1.2 and 1.3: mean of logs 0.1800, deviation 0.0836, times 4.303 / sqrt(3).
    low, high = paired_interval([(1, 1.1), (1, 1.2), (1, 1.3)]) or (0, 0)
    assert (low, high) == (pytest.approx(-2.7, abs=0.1), pytest.approx(47.3, abs=0.2))
    assert paired_interval([(1, 1.1), (1, 1.2)]) is None

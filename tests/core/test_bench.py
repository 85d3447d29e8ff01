"""The rows of a bench, its table from results whose right answers are known, and its files."""

import json

import msgspec
import pytest
from msgspec.structs import replace

from trainfast_runner.errors import UserError
from trainfast_runner.records.result import Diagnosis, Result, RunConditions, Spread, StepCount, Throttle, Throughput
from trainfast_runner.results.comparison import paired_interval
from trainfast_runner.search.bench import MAX_ROWS, NOT_RUN, REFUSED, needs_no_repeat, prepare, run_order, tabulate
from trainfast_runner.settings.knobs import read_vary
from trainfast_tui.cli.bench import WRITERS
from trainfast_tui.cli.printing import output_path, write_output


def ended(rate, state="finished", reason=""):
    throughput = Throughput(samples_per_s=Spread(median=rate, mad=0.01))
    return Result(run_id="r", state=state, reason=reason, throughput=throughput, steps=StepCount(measured=9))


@pytest.fixture
def bench():
    return prepare("benchmarks-bert", ["seq_len=32"], 0.01)


def test_settings_and_scale_reach_every_row_and_runs_interleave_with_the_baseline_first(bench):
    assert [planned.spec.knobs["batch_size"] for planned in bench.rows] == [1, 1, 1, 1, 1, 3]
    assert {planned.spec.knobs["seq_len"] for planned in bench.rows} == {32}
    assert [planned.id for planned in prepare("benchmarks-bert/bert_4").rows] == ["bert_1", "bert_4"]
    multi = prepare("guide-dp-ddp-nvlink")
    assert [planned.id for planned in run_order(multi, 2)] == ["ddp", "dp", "ddp-nop2p", "ddp", "dp", "ddp-nop2p"]
    same = prepare("guide-single-gpu/fp16", ["seq_len=512", "batch_size=2"])
    assert same.unpublished == ""
    assert tabulate(same, {"vanilla": [ended(8.86)]}).rows[0].ratio == pytest.approx(1)


@pytest.mark.parametrize("setting", ["seq_len=32", "model.num_hidden_layers=2"])
def test_another_model_or_length_has_no_published_figures(setting):
    other = prepare("guide-single-gpu/fp16", [setting])
    table = tabulate(other, {"vanilla": [ended(9)], "fp16": [ended(18)]})
    named = setting.partition("=")[0]
    assert [(*row.published, row.ratio, row.published_vs_baseline_percent) for row in table.rows] == [(None, None)] * 2
    text = WRITERS[".md"](table, "x")
    assert "published" not in text.replace(table.bench.unpublished, "")
    assert table.bench.unpublished == f"Published figures are left out: {named} differs from the published run."
    assert text.count(table.bench.unpublished) == 1


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


def test_repeated_pairs_say_how_sure_a_difference_is_by_the_textbooks_interval(bench):
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
    # Ratios 1.1, 1.2 and 1.3: mean of logs 0.1800, deviation 0.0836, times 4.303 / sqrt(3).
    low, high = paired_interval([(1, 1.1), (1, 1.2), (1, 1.3)]) or (0, 0)
    assert (low, high) == (pytest.approx(-2.7, abs=0.1), pytest.approx(47.3, abs=0.2))
    assert paired_interval([(1, 1.1), (1, 1.2)]) is None


def test_a_row_whose_conditions_are_doubtful_says_so_beside_its_figures(bench):
    hot = replace(ended(90), throttle=Throttle(thermal_fraction=0.3), conditions=RunConditions(still_warming=True))
    lines = WRITERS[".md"](tabulate(bench, {"bert_1": [ended(100)], "bert_2": [hot]}), "x").splitlines()
    rows = [line for line in lines if line.startswith("| bert_")]
    assert rows[0].endswith("| finished |")
    assert rows[1].endswith("| finished ? heat, warming up |")


def grid(reference, *vary, settings=()):
    return prepare(reference, settings, vary=read_vary(vary))


def ids(bench):
    return [planned.id for planned in bench.rows]


@pytest.mark.parametrize(
    ("reference", "vary", "settings", "own", "others"),
    [
        (
            "tiny-llama",
            ("batch_size=8,16", "precision=fp32,bf16"),
            (),
            "batch_size=8 precision=fp32",
            ["batch_size=8 precision=bf16", "batch_size=16 precision=fp32", "batch_size=16 precision=bf16"],
        ),
        ("tiny-llama", ("batch_size=2,4",), ("batch_size=3",), "batch_size=3", ["batch_size=2", "batch_size=4"]),
        ("tiny-llama", ("batch_size=8, 08,16",), (), "batch_size=8", ["batch_size=16"]),
        ("benchmarks-bert/bert_4", ("grad_accum=1,2",), (), "grad_accum=1", ["grad_accum=2"]),
    ],
    ids=["the product", "a baseline of its own", "equal values", "a variant"],
)
def test_rows_are_the_combinations_after_the_presets_own_settings(reference, vary, settings, own, others):
    bench = grid(reference, *vary, settings=settings)
    assert (bench.baseline_id, ids(bench)) == (own, [own, *others])
    assert [planned.id for planned in run_order(bench, 2)] == ids(bench) * 2
    assert {planned.spec.variant for planned in bench.rows} == {reference.partition("/")[2] or None}


def test_devices_are_joined_by_plus_and_each_variant_has_the_grid():
    rows = grid("tiny-llama", "devices=0+1,2,cpu").rows
    assert [planned.spec.knobs["devices"] for planned in rows] == [None, "0+1", 2, "cpu"]
    bench = grid("benchmarks-bert", "batch_size=4,512")
    assert (bench.baseline_id, len(bench.rows)) == ("bert_1 batch_size=56", 6 * 2 + 1)
    assert "bert_6 batch_size=512" in ids(bench)
    own = next(planned for planned in bench.rows if planned.id == bench.baseline_id)
    assert own.published["samples_per_s"] == 88.9
    # A source measured its own settings only.
    assert all(not planned.published for planned in bench.rows if planned is not own)


def test_a_grid_of_a_million_rows_or_of_scaled_sizes_is_refused():
    hundred = ",".join(map(str, range(1, 101)))
    with pytest.raises(UserError) as refused:
        grid("tiny-llama", f"batch_size={hundred}", "workers=0,1", f"grad_accum={hundred}", f"seed={hundred}")
    line = refused.value.line()
    assert line.startswith(f"the grid has 2,000,000 rows, more than {MAX_ROWS}; try dropping --vary batch_size and")
    assert line.endswith("--vary grad_accum, which leaves 200")
    with pytest.raises(UserError, match="--scale-batch"):
        prepare("tiny-llama", (), 0.5, read_vary(["batch_size=1,2"]))
    assert prepare("tiny-llama", (), 0.5, read_vary(["workers=0,1"])).rows[0].spec.knobs["batch_size"] == 4


@pytest.fixture
def varied():
    return grid("tiny-llama", "batch_size=8,16", "strategy=single,dp")


@pytest.fixture
def results_by_row(varied):
    refused = UserError("<b>dp</b> needs\n two | GPUs \x1b[31m", key="strategy")
    return {
        "batch_size=8 strategy=single": [ended(100), ended(110)],
        "batch_size=8 strategy=dp": [refused],
        "batch_size=16 strategy=single": [ended(150), ended(160)],
        "batch_size=16 strategy=dp": [refused],
    }


def written(varied, results_by_row, path):
    output = output_path(str(path), tuple(WRITERS))
    write_output(output, WRITERS[output.suffix.lower()](tabulate(varied, results_by_row), "trainfast-tui bench x"))
    return path.read_text()


def test_a_row_of_the_table_does_not_repeat_its_id_and_json_is_that_of_the_command(varied, results_by_row, tmp_path):
    lines = WRITERS[".md"](tabulate(varied, results_by_row), "x").splitlines()
    rows = [line for line in lines if "batch_size=" in line]
    assert rows[0].startswith("| batch_size=8 strategy=single (baseline) | seq_len=128 precision=fp32 | 105 | 0.0 %")
    assert rows[2].startswith("| batch_size=16 strategy=single |  | 155 | +47.6 %")
    found = json.loads(written(varied, results_by_row, tmp_path / "table.json"))
    assert [row["state"] for row in found["rows"]] == ["finished", "refused"] * 2
    assert [row["knobs"]["batch_size"] for row in found["rows"]] == [8, 8, 16, 16]
    assert found["rows"][2]["result"]["throughput"]["samples_per_s"]["median"] == 150


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("table.md", "refused: &lt;b&gt;dp&lt;/b&gt; needs two \\| GPUs "),
        ("TABLE.HTML", "refused: &lt;b&gt;dp&lt;/b&gt; needs two | GPUs"),
    ],
)
def test_text_of_an_exception_is_escaped(varied, results_by_row, tmp_path, name, escaped):
    text = written(varied, results_by_row, tmp_path / name)
    assert escaped in text
    assert [part for part in ("\x1b", "<b>", "<script", " src=", " href=", "url(") if part in text] == []

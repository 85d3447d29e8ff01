"""The rows of `bench --vary`, and the files of a table."""

import json

import pytest

from core.test_bench import ended
from trainfast_runner.errors import UserError
from trainfast_runner.search.bench import MAX_ROWS, prepare, run_order, tabulate
from trainfast_runner.settings.knobs import read_vary
from trainfast_tui.cli.bench import WRITERS
from trainfast_tui.cli.printing import output_path, write_output


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


def test_a_preset_with_variants_has_the_grid_for_each_of_them():
    bench = grid("benchmarks-bert", "batch_size=4,512")
    assert bench.baseline_id == "bert_1 batch_size=56"
    assert len(bench.rows) == 6 * 2 + 1
    assert "bert_6 batch_size=512" in ids(bench)
    own = next(planned for planned in bench.rows if planned.id == bench.baseline_id)
    assert own.published["samples_per_s"] == 88.9
    # A source measured its own settings only.
    assert all(not planned.published for planned in bench.rows if planned is not own)


def test_devices_are_joined_by_plus():
    assert [planned.spec.knobs["devices"] for planned in grid("tiny-llama", "devices=0+1,2,cpu").rows] == [
        None,
        "0+1",
        2,
        "cpu",
    ]


def test_a_grid_of_a_million_rows_names_the_knobs_to_drop():
    hundred = ",".join(map(str, range(1, 101)))
    with pytest.raises(UserError) as refused:
        grid("tiny-llama", f"batch_size={hundred}", "workers=0,1", f"grad_accum={hundred}", f"seed={hundred}")
    line = refused.value.line()
    assert line.startswith(f"the grid has 2,000,000 rows, more than {MAX_ROWS}; try dropping --vary batch_size and")
    assert line.endswith("--vary grad_accum, which leaves 200")


def test_scaled_sizes_are_not_those_of_the_ids():
    with pytest.raises(UserError, match="--scale-batch"):
        prepare("tiny-llama", (), 0.5, read_vary(["batch_size=1,2"]))
    assert prepare("tiny-llama", (), 0.5, read_vary(["workers=0,1"])).rows[0].spec.knobs["batch_size"] == 4


@pytest.fixture
def bench():
    return grid("tiny-llama", "batch_size=8,16", "strategy=single,dp")


@pytest.fixture
def results_by_row(bench):
    refused = UserError("<b>dp</b> needs\n two | GPUs \x1b[31m", key="strategy")
    return {
        "batch_size=8 strategy=single": [ended(100), ended(110)],
        "batch_size=8 strategy=dp": [refused],
        "batch_size=16 strategy=single": [ended(150), ended(160)],
        "batch_size=16 strategy=dp": [refused],
    }


def written(bench, results_by_row, path):
    output = output_path(str(path), tuple(WRITERS))
    write_output(output, WRITERS[output.suffix.lower()](tabulate(bench, results_by_row), "trainfast-tui bench x"))
    return path.read_text()


def test_a_row_of_the_table_does_not_repeat_its_id(bench, results_by_row):
    lines = WRITERS[".md"](tabulate(bench, results_by_row), "x").splitlines()
    rows = [line for line in lines if "batch_size=" in line]
    assert rows[0].startswith("| batch_size=8 strategy=single (baseline) | seq_len=128 precision=fp32 | 105 | 0.0 %")
    assert rows[2].startswith("| batch_size=16 strategy=single |  | 155 | +47.6 %")


def test_json_is_that_of_the_command(bench, results_by_row, tmp_path):
    found = json.loads(written(bench, results_by_row, tmp_path / "table.json"))
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
def test_text_of_an_exception_is_escaped(bench, results_by_row, tmp_path, name, escaped):
    text = written(bench, results_by_row, tmp_path / name)
    assert escaped in text
    assert [part for part in ("\x1b", "<b>", "<script", " src=", " href=", "url(") if part in text] == []

"""The rows of `bench --vary`, and the files of a table."""

import csv
import json

import pytest

from core.test_bench import ended
from trainfast_runner.errors import UserError
from trainfast_runner.search.bench import MAX_ROWS, prepare_grid, prepare_script_grid, run_order, tabulate, warm_groups
from trainfast_runner.settings.knobs import read_vary
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_tui.cli.bench import WRITERS, bench_markdown
from trainfast_tui.cli.printing import output_path, write_output


def grid(reference, *vary, settings=()):
    return prepare_grid(reference, read_vary(vary), settings)


def ids(bench):
    return [planned.id for planned in bench.rows]


def test_rows_are_the_product_of_the_values():
    bench = grid("tiny-llama", "batch_size=8,16", "precision=fp32,bf16")
    assert ids(bench) == [
        "batch_size=8 precision=fp32",
        "batch_size=8 precision=bf16",
        "batch_size=16 precision=fp32",
        "batch_size=16 precision=bf16",
    ]
    assert [planned.spec.overrides for planned in bench.rows] == [
        (),
        ("precision",),
        ("batch_size",),
        ("batch_size", "precision"),
    ]
    assert bench.baseline_id == "batch_size=8 precision=fp32"


def test_the_baseline_is_the_presets_own_settings_and_a_row_of_its_own_where_the_grid_lacks_it():
    bench = grid("tiny-llama", "batch_size=2,4", settings=("batch_size=3",))
    assert (bench.baseline_id, ids(bench)) == ("batch_size=3", ["batch_size=3", "batch_size=2", "batch_size=4"])
    assert [planned.id for planned in run_order(bench, 2, {})] == ids(bench) * 2


def test_a_preset_with_variants_has_the_grid_for_each_of_them():
    bench = grid("benchmarks-bert", "batch_size=4,512")
    assert bench.baseline_id == "bert_1 batch_size=56"
    assert len(bench.rows) == 6 * 2 + 1
    assert "bert_6 batch_size=512" in ids(bench)
    own = next(planned for planned in bench.rows if planned.id == bench.baseline_id)
    assert own.published["samples_per_s"] == 88.9
    # A source measured its own settings only.
    assert all(not planned.published for planned in bench.rows if planned is not own)


def test_a_variant_is_its_own_baseline():
    bench = grid("benchmarks-bert/bert_4", "grad_accum=1,2")
    assert (bench.baseline_id, ids(bench)) == ("grad_accum=1", ["grad_accum=1", "grad_accum=2"])
    assert {planned.spec.variant for planned in bench.rows} == {"bert_4"}


def test_equal_values_are_one_row():
    assert ids(grid("tiny-llama", "batch_size=8, 08,16")) == ["batch_size=8", "batch_size=16"]


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
        prepare_grid("tiny-llama", read_vary(["batch_size=1,2"]), (), 0.5)
    assert prepare_grid("tiny-llama", read_vary(["workers=0,1"]), (), 0.5).rows[0].spec.knobs["batch_size"] == 4


def sharing(bench):
    """The rows of each warm process."""
    groups = {}
    for id, key in warm_groups(bench).items():
        groups.setdefault(key, []).append(id)
    return list(groups.values())


def test_rows_that_differ_only_in_warm_knobs_share_a_process():
    bench = grid("tiny-llama", "batch_size=8,4", "precision=fp32,bf16", "optimizer=adamw,sgd")
    assert sharing(bench) == [ids(bench)]


def test_another_value_of_a_cold_knob_is_another_process():
    bench = grid("tiny-llama", "batch_size=8,4", "seq_len=64,128")
    assert sharing(bench) == [
        ["batch_size=8 seq_len=64", "batch_size=4 seq_len=64"],
        ["batch_size=8 seq_len=128", "batch_size=4 seq_len=128"],
    ]
    # Their rows follow each other, the baseline's process first.
    assert [planned.id for planned in run_order(bench, 1, warm_groups(bench))] == [
        "batch_size=8 seq_len=128",
        "batch_size=4 seq_len=128",
        "batch_size=8 seq_len=64",
        "batch_size=4 seq_len=64",
    ]


def test_a_row_alone_in_its_group_is_cold():
    bench = grid("tiny-llama", "precision=fp32,bf16,fp16")
    assert sharing(bench) == [["precision=fp32", "precision=bf16"]]


@pytest.mark.parametrize(
    "setting", ["memory_limit=2GiB", "compile=default", "engine=accelerate", "strategy=fsdp", "strategy=dp"]
)
def test_some_settings_need_a_process_a_row(setting):
    assert sharing(grid("tiny-llama", "batch_size=4,8", settings=(setting,))) == []


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
    write_output(
        output, WRITERS[output.suffix.lower()](bench, tabulate(bench, results_by_row), "trainfast-tui bench x")
    )
    return path.read_text()


def test_a_row_of_the_table_does_not_repeat_its_id(bench, results_by_row):
    lines = bench_markdown(bench, tabulate(bench, results_by_row), "x").splitlines()
    rows = [line for line in lines if "batch_size=" in line]
    assert rows[0].startswith("| batch_size=8 strategy=single (baseline) | seq_len=128 precision=fp32 | 105 | 0.0 %")
    assert rows[2].startswith("| batch_size=16 strategy=single |  | 155 | +47.6 %")


def test_json_is_that_of_the_command(bench, results_by_row, tmp_path):
    found = json.loads(written(bench, results_by_row, tmp_path / "table.json"))
    assert [row["state"] for row in found["rows"]] == ["finished", "refused"] * 2
    assert [row["knobs"]["batch_size"] for row in found["rows"]] == [8, 8, 16, 16]
    assert found["rows"][2]["result"]["throughput"]["samples_per_s"]["median"] == 150


def test_csv_has_figures_in_full_and_the_knobs_that_differ(bench, results_by_row, tmp_path):
    base, refused, faster, _ = csv.DictReader(written(bench, results_by_row, tmp_path / "table.csv").splitlines())
    assert (base["baseline"], float(base["samples_per_s"]), base["strategy"]) == ("1", 105, "single")
    assert (refused["state"], refused["samples_per_s"]) == ("refused", "")
    assert "two | GPUs" in refused["reason"]
    assert float(faster["vs_baseline_percent"]) == pytest.approx(100 * (155 / 105 - 1))
    assert faster["batch_size"] == "16"
    assert "seq_len" not in faster


def test_csv_of_a_script_leaves_a_knob_empty_that_its_baseline_does_not_set(tmp_path):
    script = ScriptPreset(command=("python", "train.py"), name="mine")
    bench = prepare_script_grid(script, read_vary(["batch_size=8,16"]), (), None)
    text = written(bench, {"batch_size=8": [ended(100)]}, tmp_path / "table.csv")
    rows = list(csv.DictReader(text.splitlines()))
    assert [(row["id"], row["batch_size"]) for row in rows] == [
        ("as it is", ""),
        ("batch_size=8", "8"),
        ("batch_size=16", "16"),
    ]


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("table.md", "refused: &lt;b&gt;dp&lt;/b&gt; needs two \\| GPUs "),
        ("TABLE.HTML", "refused: &lt;b&gt;dp&lt;/b&gt; needs two | GPUs "),
    ],
)
def test_text_of_an_exception_is_escaped(bench, results_by_row, tmp_path, name, escaped):
    text = written(bench, results_by_row, tmp_path / name)
    assert escaped in text
    assert [part for part in ("\x1b", "<b>", "<script", " src=", " href=", "url(") if part in text] == []

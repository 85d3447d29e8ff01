"""The published tables, reduced until a CPU runs them: the baseline of each and one row beside it."""

import pytest

pytestmark = pytest.mark.longest
BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 2048}
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 2048}


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

"""The presets that carry a published table, and variants that bring a model of their own."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from trainfast_runner.errors import UserError
from trainfast_runner.settings import presets
from trainfast_runner.settings.spec import expand_paths, from_preset, resolve

PUBLISHED = {
    table["name"]: table["rows"]
    for table in tomllib.loads(Path(__file__).with_name("published.toml").read_text())["table"]
}
BASELINES = {
    "benchmarks-bert": "bert_1",
    "benchmarks-gpt2": "gpt_1",
    "benchmarks-multi-gpu": "mbert_2 (ddp)",
    "guide-dp-ddp-nvlink": "ddp",
    "guide-fp16-batch": "b8",
    "guide-single-gpu": "vanilla",
}
SHAPES = {"bert-large": ("bert", 24, 1024, 16), "gpt2-large": ("gpt2", 36, 1280, 20), "gpt2-xl": ("gpt2", 48, 1600, 25)}


def rows_of(name: str) -> dict[str, dict[str, Any]]:
    """The source's rows by the preset's ids: knobs, figures and, where a row has its own, the model's name."""
    rows: dict[str, dict[str, Any]] = {}
    for row in PUBLISHED[name]:
        id, knobs, model = row["id"], row["knobs"], row.get("model")
        figures = {key: value for key, value in row.items() if key not in ("id", "knobs", "model")}
        if "fp16_mb" in figures:
            # One printed row is two runs.
            half = {**knobs, "precision": "fp16"}
            rows[f"{id}-fp16"] = {"knobs": half, "model": model, "figures": {"memory_mb": figures["fp16_mb"]}}
            figures = {"memory_mb": figures["fp32_mb"]}
        rows[id] = {"knobs": knobs, "model": model, "figures": figures}
    return rows


@pytest.mark.parametrize("name", BASELINES)
def test_a_table_has_the_sources_rows_and_its_figures(name: str) -> None:
    preset, _ = presets.load(name)
    assert preset.baseline == BASELINES[name]
    assert {row.id for row in preset.variants} == set(rows_of(name))
    for id, row in rows_of(name).items():
        variant = preset.variant(id)
        assert variant.published == row["figures"], id
        spec = from_preset(preset, variant)
        assert {knob: spec.knobs[knob] for knob in row["knobs"]} == row["knobs"], id
        if row["model"]:
            model = spec.model
            shape = (model["family"], model["num_hidden_layers"], model["hidden_size"], model["num_attention_heads"])
            assert shape == SHAPES[row["model"]], id


def test_rows_of_one_table_train_different_models() -> None:
    bert = resolve("benchmarks-multi-gpu/mbert_3 nop2p")
    assert (bert.model["family"], bert.data["objective"]) == ("bert", "masked-lm")
    assert (bert.knobs["strategy"], bert.knobs["p2p"], bert.knobs["batch_size"]) == ("zero2", "off", 128)
    gpt = resolve("benchmarks-multi-gpu/mgpt_1 (zero2)", ["model.hidden_size=64"])
    assert gpt.data["objective"] == "causal-lm"
    # Nothing of BERT stays, and --set has the last word.
    assert gpt.model == {"family": "gpt2", "hidden_size": 64, "num_hidden_layers": 36, "num_attention_heads": 20}
    assert (gpt.knobs["seq_len"], gpt.knobs["grad_accum"], gpt.knobs["precision"]) == (1024, 16, "bf16")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('model = { family = "llama", hub = "x" }', "exactly one of hub, path, family"),
        ('data = { kind = "jpg" }', "did you mean jpeg?"),
        ('data = { kin = "text" }', "did you mean kind?"),
        ("model = 3", "model must be a table"),
    ],
)
def test_a_mistake_in_a_variants_model_names_its_line(tmp_path: Path, line: str, expected: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'schema = 1\nextends = "tiny-llama"\n[[variants]]\nid = "a"\n{line}\n')
    with pytest.raises(UserError) as refused:
        presets.load(str(file))
    assert refused.value.where == f"{file}:5"
    assert expected in refused.value.line()


def test_a_folder_of_photographs_is_searched(tmp_path: Path) -> None:
    for name in ("a/1.jpg", "a/deep/2.JPEG", "b/note.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    spec = resolve("vit-large", [f"data.paths={tmp_path}"])
    assert spec.data["kind"] == "jpeg"
    found = expand_paths(spec.data)["paths"]
    assert [Path(path).name for path in found] == ["1.jpg", "2.JPEG"]
    with pytest.raises(UserError, match="matches no JPEG file"):
        expand_paths({**spec.data, "paths": [str(tmp_path / "b")]})
    assert "paths" not in expand_paths(resolve("vit-large").data)

"""The presets that carry a published table, and variants that bring a model of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainfast_runner import presets
from trainfast_runner.problem import Problem
from trainfast_runner.spec import expand_paths, resolve

PUBLISHED = {
    "benchmarks-bert": ("bert_1", 6, "bert_6", {"memory_gb": 19.2, "samples_per_s": 139.2, "tflops": 48.4}),
    "benchmarks-gpt2": ("gpt_1", 2, "gpt_2", {"memory_gb": 21.2, "samples_per_s": 21.1, "tflops": 24.5}),
    "benchmarks-multi-gpu": (
        "mbert_2 (ddp)",
        8,
        "mgpt_2 (zero2)",
        {"memory_gb": 15.3, "samples_per_s": 2.2, "tflops": 11.8},
    ),
    "guide-dp-ddp-nvlink": (
        "ddp",
        3,
        "ddp-nop2p",
        {"time_s": 131.4367, "steps_per_s": 1.522, "samples_per_s": 12.17},
    ),
    "guide-fp16-batch": ("b8", 8, "b64-fp16", {"memory_mb": 8061}),
    "guide-single-gpu": ("vanilla", 9, "accum", {"time_s": 66.03, "samples_per_s": 7.75, "memory_mb": 8681}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_table_has_its_rows_and_their_published_figures(name: str) -> None:
    baseline, rows, id, published = PUBLISHED[name]
    preset, _ = presets.load(name)
    assert (preset.baseline, len(preset.variants)) == (baseline, rows)
    assert preset.variant(id).published == published
    assert all(row.published for row in preset.variants)


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
    ("line", "said"),
    [
        ('model = { family = "llama", hub = "x" }', "exactly one of hub, path, family"),
        ('data = { kind = "jpg" }', "did you mean jpeg?"),
        ('data = { kin = "text" }', "did you mean kind?"),
        ("model = 3", "model must be a table"),
    ],
)
def test_a_mistake_in_a_variants_model_names_its_line(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'schema = 1\nextends = "tiny-llama"\n[[variants]]\nid = "a"\n{line}\n')
    with pytest.raises(Problem) as refused:
        presets.load(str(file))
    assert refused.value.where == f"{file}:5"
    assert said in refused.value.line()


def test_a_folder_of_photographs_is_searched(tmp_path: Path) -> None:
    for name in ("a/1.jpg", "a/deep/2.JPEG", "b/note.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    spec = resolve("vit-large", [f"data.paths={tmp_path}"])
    assert spec.data["kind"] == "jpeg"
    found = expand_paths(spec.data)["paths"]
    assert [Path(path).name for path in found] == ["1.jpg", "2.JPEG"]
    with pytest.raises(Problem, match="matches no JPEG file"):
        expand_paths({**spec.data, "paths": [str(tmp_path / "b")]})
    assert "paths" not in expand_paths(resolve("vit-large").data)

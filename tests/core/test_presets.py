"""Presets: what is shipped and published, and how one extends another; cli/transcripts has what is refused."""

import tomllib
from pathlib import Path

import pytest

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import cache_directory, home_directory
from trainfast_runner.settings import presets
from trainfast_runner.settings.spec import expand_paths, from_preset, resolve


@pytest.fixture
def user_presets(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "trainfast-tui" / "presets"
    folder.mkdir(parents=True)
    return folder


def test_every_shipped_preset_resolves_and_explains_itself():
    shipped = {path.stem: path for path in presets.shipped_directory().glob("*.toml")}
    assert {"tiny-llama", "gpt2-medium", "bert-large", "gpt2-xl", "llama-1b", "guide-single-gpu"} <= set(shipped)
    for name, path in shipped.items():
        assert path.read_text().startswith("#"), name
        assert resolve(name).title != name


def test_a_user_preset_extends_a_shipped_one(user_presets):
    (user_presets / "mine.toml").write_text('schema = 1\nextends = "tiny-llama"\n[knobs]\nbatch_size = 3\n')
    spec = resolve("mine", ["grad_accum=2", "model.num_hidden_layers=1", "data.kind=random"])
    assert (spec.knobs["batch_size"], spec.knobs["seq_len"], spec.knobs["grad_accum"]) == (3, 128, 2)
    assert (spec.model["num_hidden_layers"], spec.model["family"], spec.data["kind"]) == (1, "llama", "random")
    assert spec.overrides == ("grad_accum", "model.num_hidden_layers", "data.kind")
    (user_presets / "tiny-llama.toml").write_text('schema = 1\nextends = "tiny-llama"\n[knobs]\nbatch_size = 5\n')
    assert resolve("tiny-llama").knobs["batch_size"] == 5, "it may refine the one that it hides"
    model = resolve("tiny-llama", ["model.hidden_size=64", "model.family=gpt2"]).model
    assert model == {"family": "gpt2", "hidden_size": 64}, "a field set before its model stays, the preset's go"


def test_a_glob_that_matches_nothing_is_refused_and_a_folder_of_photographs_searched(tmp_path):
    spec = resolve("tiny-llama", [f"data.paths={tmp_path}/*.txt"])
    assert spec.data["kind"] == "files"
    with pytest.raises(UserError, match="matches no file"):
        expand_paths(spec.data)
    for name in ("notes [1].txt", "notes 1.txt"):
        (tmp_path / name).write_text("text")
    assert expand_paths(spec.data)["paths"] == [str(tmp_path / "notes 1.txt"), str(tmp_path / "notes [1].txt")]
    named = str(tmp_path / "notes [1].txt")
    assert expand_paths({"kind": "files", "paths": [named]})["paths"] == [named]
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


def test_a_user_without_a_home_directory_has_presets_in_the_home_of_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRAINFAST_HOME", str(tmp_path))
    assert presets.user_directory() == tmp_path / "config" / "presets"
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("TRAINFAST_HOME")
    with pytest.raises(UserError, match="there is no home directory"):
        home_directory()


PUBLISHED = {
    table["name"]: table["rows"]
    for table in tomllib.loads(Path(__file__).with_name("published.toml").read_text())["table"]
}
BASELINES = {
    "benchmarks-bert": "bert_1", "benchmarks-gpt2": "gpt_1", "benchmarks-multi-gpu": "mbert_2 (ddp)",
    "guide-dp-ddp-nvlink": "ddp", "guide-fp16-batch": "b8", "guide-single-gpu": "vanilla",
}  # fmt: skip
SHAPES = {"bert-large": ("bert", 24, 1024, 16), "gpt2-large": ("gpt2", 36, 1280, 20), "gpt2-xl": ("gpt2", 48, 1600, 25)}


@pytest.mark.parametrize("name", BASELINES)
def test_a_table_has_the_sources_rows_and_its_figures(name):
    preset, _ = presets.load(name)
    assert preset.baseline == BASELINES[name]
    assert {row.id for row in preset.variants} == {row["id"] for row in PUBLISHED[name]}
    for row in PUBLISHED[name]:
        id, knobs, of_model = row.pop("id"), row.pop("knobs"), row.pop("model", None)
        assert preset.variant(id).published == row, id
        spec = from_preset(preset, preset.variant(id))
        assert {knob: spec.knobs[knob] for knob in knobs} == knobs, id
        if of_model:
            names = ("family", "num_hidden_layers", "hidden_size", "num_attention_heads")
            assert tuple(spec.model[field] for field in names) == SHAPES[of_model], id


def test_rows_of_one_table_train_different_models():
    bert = resolve("benchmarks-multi-gpu/mbert_3 nop2p")
    assert (bert.model["family"], bert.data["objective"]) == ("bert", "masked-lm")
    assert (bert.knobs["strategy"], bert.knobs["p2p"], bert.knobs["batch_size"]) == ("zero2", "off", 128)
    gpt = resolve("benchmarks-multi-gpu/mgpt_1 (zero2)", ["model.hidden_size=64"])
    assert gpt.data["objective"] == "causal-lm"
    # Nothing of BERT stays, and --set has the last word.
    assert gpt.model == {"family": "gpt2", "hidden_size": 64, "num_hidden_layers": 36, "num_attention_heads": 20}
    assert (gpt.knobs["seq_len"], gpt.knobs["grad_accum"], gpt.knobs["precision"]) == (1024, 16, "bf16")

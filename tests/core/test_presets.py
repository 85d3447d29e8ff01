"""Presets: what is shipped, how one extends another, and what a misspelt one is told, with file and line."""

import tomllib
from pathlib import Path

import pytest

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import cache_directory, home_directory
from trainfast_runner.settings import presets
from trainfast_runner.settings.spec import expand_paths, resolve, with_setting


@pytest.fixture
def user_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "trainfast-tui" / "presets"
    folder.mkdir(parents=True)
    return folder


def refusal(reference: str, *settings: str) -> UserError:
    with pytest.raises(UserError) as refused:
        resolve(reference, settings)
    assert refused.value.exit_code == 2
    assert "\n" not in refused.value.line()
    return refused.value


def test_every_shipped_preset_resolves_and_explains_itself() -> None:
    shipped = {path.stem: path for path in presets.shipped_directory().glob("*.toml")}
    assert {"tiny-llama", "gpt2-medium", "bert-large", "gpt2-xl", "llama-1b", "guide-single-gpu"} <= set(shipped)
    for name, path in shipped.items():
        assert path.read_text().startswith("#"), name
        assert resolve(name).title != name


def test_the_single_gpu_guide_has_its_nine_variants() -> None:
    preset, _ = presets.load("guide-single-gpu")
    assert len(preset.variants) == 9
    assert preset.baseline == "vanilla"
    assert preset.variant("fp16").published == {"time_s": 27.46, "samples_per_s": 18.64, "memory_mb": 13939}
    assert preset.variant("all+adam8bit").published["memory_mb"] == 5363
    spec = resolve("guide-single-gpu/accum+ckpt")
    assert (spec.knobs["batch_size"], spec.knobs["grad_accum"], spec.knobs["checkpointing"]) == (1, 4, "full")
    assert spec.data == {"kind": "random", "objective": "sequence-classification"}


def test_a_user_preset_extends_a_shipped_one(user_presets: Path) -> None:
    (user_presets / "mine.toml").write_text('schema = 1\nextends = "tiny-llama"\n[knobs]\nbatch_size = 3\n')
    spec = resolve("mine", ["grad_accum=2", "model.num_hidden_layers=1", "data.kind=random"])
    assert spec.knobs["batch_size"] == 3
    assert spec.knobs["seq_len"] == 128
    assert spec.knobs["grad_accum"] == 2
    assert spec.model["num_hidden_layers"] == 1
    assert spec.model["family"] == "llama"
    assert spec.data["kind"] == "random"
    assert spec.overrides == ("grad_accum", "model.num_hidden_layers", "data.kind")


def test_a_user_preset_may_refine_the_shipped_one_it_hides(user_presets: Path) -> None:
    (user_presets / "tiny-llama.toml").write_text('schema = 1\nextends = "tiny-llama"\n[knobs]\nbatch_size = 5\n')
    assert resolve("tiny-llama").knobs["batch_size"] == 5


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ('schema = 1\nextends = "tiny-llama"\n[knobs]\nbatchsize = 3\n', 4, "did you mean batch_size?"),
        ('schema = 1\nextends = "tiny-llama"\n[knobs]\nseed = 1\nbatch_size = "lots"\n', 5, "must be a whole number"),
        ('schema = 1\nextends = "tiny-lama"\n', 2, "did you mean tiny-llama?"),
        ('schema = 1\nextends = "mine"\n', 2, "cannot extend itself"),
        ('schema = 1\nextends = "./base"\n', 2, "there is no preset './base'; try a path that ends in .toml"),
        ('schema = 1\n[model]\nfamily = "llama"\n"" = 3\n', 2, "there is no model field ''"),
        ('schema = 1\ntitel = "x"\nextends = "tiny-llama"\n', 2, "did you mean title?"),
        ('schema = 2\n[model]\nfamily = "llama"\n', 1, "schema must be 1"),
        ('schema = true\n[model]\nfamily = "llama"\n', 1, "schema must be 1"),
        ('schema = 1.0\n[model]\nfamily = "llama"\n', 1, "schema must be 1"),
        ("schema = 1\n[model]\nhidden_size = 4\n", 2, "exactly one of hub, path, family"),
        ('schema = 1\n[model]\nfamily = "llama"\nhub = "x"\n', 4, "exactly one of hub, path, family"),
        ('schema = 1\n[model]\nfamily = "llama"\n[data]\nkind = "txt"\n', 5, "did you mean text?"),
        (
            'schema = 1\n[model]\nfamily = "llama"\n[[variants]]\nid = "a"\nknobs = { lr = "x" }\n',
            6,
            "must be a number",
        ),
        ('schema = 1\nbaseline = "b"\n[model]\nfamily = "llama"\n[[variants]]\nid = "a"\n', 2, "not a variant"),
    ],
)
def test_the_error_of_a_broken_preset_names_file_line_and_key(
    user_presets: Path, text: str, line: int, expected: str
) -> None:
    path = user_presets / "mine.toml"
    path.write_text(text)
    problem = refusal("mine")
    assert problem.line().startswith(f"{path}:{line}: ")
    assert expected in problem.line()


def test_invalid_toml_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("schema = 1\n[model\n")
    assert "line 2" in refusal(str(path)).line()


def test_two_presets_cannot_extend_each_other(user_presets: Path) -> None:
    (user_presets / "a.toml").write_text('schema = 1\nextends = "b"\n')
    (user_presets / "b.toml").write_text('schema = 1\nextends = "a"\n')
    assert "a extends b extends a" in refusal("a").line()


@pytest.mark.parametrize(
    ("reference", "settings", "key"),
    [
        ("tiny-lama", [], "tiny-lama"),
        ("guide-single-gpu/fp61", [], "fp61"),
        ("nowhere.toml", [], "nowhere.toml"),
        ("tiny-llama", ["batchsize=8"], "batchsize"),
        ("tiny-llama", ["batch_size"], "batch_size"),
        ("tiny-llama", ["data.kindd=text"], "data.kindd"),
        ("tiny-llama", ["modle.hidden_size=4"], "modle.hidden_size"),
        ("tiny-llama", ["model.path="], "model.path"),
        ("tiny-llama", ["model.hub="], "model.hub"),
        ("tiny-llama", ["model.=3"], "model."),
    ],
)
def test_a_bad_command_line_names_its_word(reference: str, settings: list[str], key: str) -> None:
    assert refusal(reference, *settings).key == key


def test_a_glob_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    spec = resolve("tiny-llama", [f"data.paths={tmp_path}/*.txt"])
    assert spec.data["kind"] == "files"
    with pytest.raises(UserError, match="matches no file"):
        expand_paths(spec.data)
    (tmp_path / "one.txt").write_text("text")
    assert expand_paths(spec.data)["paths"] == [str(tmp_path / "one.txt")]


def test_presets_are_plain_toml() -> None:
    for path in presets.shipped_directory().glob("*.toml"):
        assert tomllib.loads(path.read_text())["schema"] == 1


def test_a_file_whose_name_looks_like_a_pattern_is_found(tmp_path: Path) -> None:
    text = tmp_path / "notes [1].txt"
    text.write_text("some text")
    (tmp_path / "notes 1.txt").write_text("other text")
    assert expand_paths({"kind": "files", "paths": [str(text)]})["paths"] == [str(text)]


@pytest.mark.parametrize("number", ["9" * 5000, "-" + "9" * 5000])
def test_a_number_of_thousands_of_digits_is_refused(tmp_path: Path, number: str) -> None:
    assert with_setting(resolve("tiny-llama"), f"model.hidden_size={number}").model["hidden_size"] == number
    path = tmp_path / "huge.toml"
    path.write_text(f'schema = 1\nextends = "tiny-llama"\n[knobs]\nsteps = {number}\n')
    with pytest.raises(UserError) as refused:
        resolve(str(path))
    assert str(path) in refused.value.line()


def test_a_field_set_before_its_model_is_refused_as_it_would_be_lost() -> None:
    with pytest.raises(UserError, match=r"model\.hidden_size, which is set before it, would be lost") as refused:
        resolve("tiny-llama", ["model.hidden_size=64", "model.family=bert"])
    assert refused.value.key == "model.family"
    assert resolve("tiny-llama", ["model.family=bert", "model.hidden_size=64"]).model["hidden_size"] == 64


def test_a_user_without_a_home_directory_has_presets_in_the_home_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_entry(_uid: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.setattr("pwd.getpwuid", no_entry)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRAINFAST_HOME", str(tmp_path))
    assert presets.user_directory() == tmp_path / "config" / "presets"
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("TRAINFAST_HOME")
    with pytest.raises(UserError, match="there is no home directory"):
        home_directory()

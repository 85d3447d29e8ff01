"""`presets`: listed, shown, and made from one another with their comments kept."""

from __future__ import annotations

import tomllib

import pytest

from cli.command import Cli


def test_a_broken_preset_is_a_row(cli: Cli) -> None:
    (cli.presets / "broken.toml").write_text("schema = 1\nmodle = 3\n")
    done = cli("presets", "list", "--json")
    assert done.code == 0
    rows = {row["name"]: row for row in done.json["presets"]}
    assert rows["tiny-llama"]["shipped"]
    assert rows["guide-single-gpu"]["variants"] == 9
    assert "did you mean model?" in rows["broken"]["error"]
    assert "broken: " in cli("presets", "list").out


def test_show_resolves_a_variant_and_prints_what_was_published(cli: Cli) -> None:
    shown = cli("presets", "show", "guide-single-gpu/fp16", "--json").json
    assert shown["knobs"]["precision"] == "fp16"
    assert shown["knobs"]["seq_len"] == 512
    assert shown["model"]["family"] == "bert"
    text = cli("presets", "show", "guide-single-gpu").out
    assert "published samples_per_s" in text
    assert "vanilla (baseline)" in text
    assert "18.64" in text


def test_new_keeps_comments_and_changes_only_what_was_set(cli: Cli) -> None:
    small = ["--set", "model.hidden_size=32", "--set", "model.num_hidden_layers=1"]  # as other tests have it
    settings = ["--set", "batch_size=16", *small, "--set", "memory_limit=2GiB"]
    made = cli("presets", "new", "mine", "--from", "tiny-llama", *settings, "--json").json
    text = (cli.presets / "mine.toml").read_text()
    assert made == {"name": "mine", "path": str(cli.presets / "mine.toml")}
    assert "# the byte-level BPE is trained to this size, once" in text
    assert text.startswith("# A Llama small enough")
    before = cli("presets", "show", "tiny-llama", "--json").json
    after = cli("presets", "show", "mine", "--json").json
    assert after["knobs"] == {**before["knobs"], "batch_size": 16, "memory_limit": "2GiB"}
    assert after["model"] == {**before["model"], "hidden_size": 32, "num_hidden_layers": 1}
    assert after["data"] == before["data"]
    assert not after["shipped"]


def test_new_from_a_variant_has_its_knobs_and_no_variants(cli: Cli) -> None:
    assert cli("presets", "new", "half", "--from", "guide-single-gpu/fp16").code == 0
    shown = cli("presets", "show", "half", "--json").json
    assert shown["knobs"]["precision"] == "fp16"
    assert shown["variants"] == []


def test_new_from_a_table_keeps_its_variants(cli: Cli) -> None:
    assert cli("presets", "new", "table", "--from", "guide-single-gpu", "--set", "steps=16").code == 0
    shown = cli("presets", "show", "table", "--json").json
    assert len(shown["variants"]) == 9
    assert shown["knobs"]["steps"] == 16


def test_new_over_a_parent_stays_an_extension(cli: Cli) -> None:
    (cli.presets / "child.toml").write_text('schema = 1\nextends = "tiny-llama"\n\n[knobs]\nlr = 1e-4  # slower\n')
    assert cli("presets", "new", "grandchild", "--from", "child", "--set", "batch_size=2").code == 0
    raw = tomllib.loads((cli.presets / "grandchild.toml").read_text())
    assert raw["extends"] == "tiny-llama"
    assert raw["knobs"] == {"lr": 1e-4, "batch_size": 2}
    assert "# slower" in (cli.presets / "grandchild.toml").read_text()


@pytest.mark.parametrize(
    "text",
    [
        '[model]\n# small\nfamily = "llama"\nhidden_size = 64\n[data]\nkind = "text"\n[model.rope]\ntheta = 1.0\n',
        'model.family = "llama"  # small\ndata.kind = "text"\nmodel.hidden_size = 64\nmodel.rope.theta = 1.0\n',
    ],
)
def test_new_from_a_table_that_stands_in_two_places(cli: Cli, text: str) -> None:
    (cli.presets / "mine.toml").write_text(f"schema = 1\n{text}")
    assert cli("presets", "new", "wide", "--from", "mine", "--set", "model.hidden_size=256").code == 0
    saved_text = (cli.presets / "wide.toml").read_text()
    saved = tomllib.loads(saved_text)
    assert saved["model"] == {"family": "llama", "hidden_size": 256, "rope": {"theta": 1.0}}
    assert saved["data"] == {"kind": "text"}
    assert saved_text == (cli.presets / "mine.toml").read_text().replace("64", "256")
    assert cli("presets", "new", "other", "--from", "mine", "--set", "model.family=gpt2").code == 0
    assert tomllib.loads((cli.presets / "other.toml").read_text())["model"] == {"family": "gpt2"}
    scaling = ["--set", "model.scaling={kind={factor=2}}"]
    assert cli("presets", "new", "scaled", "--from", "mine", *scaling).code == 0
    saved = tomllib.loads((cli.presets / "scaled.toml").read_text())
    assert saved["model"]["scaling"] == {"kind": {"factor": 2}}
    assert saved["data"] == {"kind": "text"}


def test_another_model_brings_its_own_fields(cli: Cli) -> None:
    settings = ["--set", "model.family=gpt2", "--set", "model.n_layer=2", "--set", "memory_limit=none"]
    assert cli("presets", "new", "other", *settings).code == 0
    assert cli("presets", "show", "other", "--json").json["model"] == {"family": "gpt2", "n_layer": 2}


def test_new_from_a_path_makes_its_paths_absolute(cli: Cli) -> None:
    source = cli.presets.parent.parent / "here.toml"
    source.write_text('schema = 1\nextends = "tiny-llama"\n[data]\nkind = "files"\npaths = ["notes.txt"]  # my notes\n')
    assert cli("presets", "new", "mine", "--from", str(source)).code == 0
    assert cli("presets", "show", "mine", "--json").json["data"]["paths"] == [str(source.parent / "notes.txt")]


def test_new_overwrites_only_with_the_flag(cli: Cli) -> None:
    assert cli("presets", "new", "mine").code == 0
    assert "you already have a preset mine" in cli("presets", "new", "mine").refused()
    assert cli("presets", "new", "mine", "--overwrite", "--set", "steps=9").code == 0
    assert cli("presets", "show", "mine", "--json").json["knobs"]["steps"] == 9


def test_new_hides_a_shipped_preset_only_with_the_flag(cli: Cli) -> None:
    assert "tiny-llama would hide the shipped preset" in cli("presets", "new", "tiny-llama").refused()
    assert not list(cli.presets.iterdir())
    assert cli("presets", "new", "tiny-llama", "--overwrite").code == 0


def test_new_replaces_no_preset_that_it_extends(cli: Cli) -> None:
    text = 'schema = 1\nextends = "tiny-llama"\n[knobs]\n'
    (cli.presets / "tiny-llama.toml").write_text(f"{text}batch_size = 4\n")
    (cli.presets / "mine.toml").write_text(f"{text}steps = 9\n")
    refused = cli("presets", "new", "tiny-llama", "--from", "mine", "--overwrite").refused()
    assert "tiny-llama would extend itself" in refused
    assert cli("presets", "show", "mine", "--json").json["knobs"]["batch_size"] == 4
    assert cli("presets", "new", "tiny-llama", "--from", "tiny-llama", "--overwrite", "--set", "steps=7").code == 0
    knobs = cli("presets", "show", "tiny-llama", "--json").json["knobs"]
    assert (knobs["batch_size"], knobs["steps"]) == (4, 7), "its own file refines the shipped one"


def test_new_makes_no_circle_of_several_presets(cli: Cli) -> None:
    for name, parent in (("a", "tiny-llama"), ("b", "a"), ("c", "b")):
        (cli.presets / f"{name}.toml").write_text(f'schema = 1\nextends = "{parent}"\n')
    assert "a would extend itself" in cli("presets", "new", "a", "--from", "c", "--overwrite").refused()
    assert [cli("presets", "show", name).code for name in ("a", "b", "c")] == [0, 0, 0]


def test_a_variant_may_replace_the_preset_that_its_own_extends(cli: Cli) -> None:
    (cli.presets / "base.toml").write_text('schema = 1\nextends = "tiny-llama"\n[knobs]\nsteps = 9\n')
    rows = '[[variants]]\nid = "v"\nknobs = { batch_size = 4 }\n'
    (cli.presets / "table.toml").write_text(f'schema = 1\nextends = "base"\n{rows}')
    assert cli("presets", "new", "base", "--from", "table/v", "--overwrite").code == 0
    knobs = cli("presets", "show", "base", "--json").json["knobs"]
    assert (knobs["batch_size"], knobs["steps"]) == (4, 9)


def test_a_directory_and_a_preset_without_schema_are_refused_in_words(cli: Cli) -> None:
    (cli.presets / "folder.toml").mkdir()
    assert "is a directory, not a preset file" in cli("run", str(cli.presets / "folder.toml")).refused()
    (cli.presets / "mine.toml").write_text('extends = "tiny-llama"\n')
    assert "schema is missing: add schema = 1" in cli("run", "mine").refused()


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../up", "x.toml", "with space", "a" * 65])
def test_new_refuses_bad_names(cli: Cli, name: str) -> None:
    assert "cannot name a preset" in cli("presets", "new", name).refused()


def test_new_where_nothing_can_be_written(cli: Cli) -> None:
    assert "cannot use /proc/" in cli("presets", "new", "mine", XDG_CONFIG_HOME="/proc/nothing").refused()

"""`presets`: listed, shown, and made from one another."""

import tomllib
from typing import Any

from cli.command import Cli


def new(cli: Cli, *words: str) -> None:
    assert cli("presets", "new", *words).code == 0


def shown(cli: Cli, reference: str) -> Any:
    return cli("presets", "show", reference, "--json").json


def test_a_broken_preset_is_a_row(cli):
    (cli.presets / "broken.toml").write_text("schema = 1\nmodle = 3\n")
    done = cli("presets", "list", "--json")
    assert done.code == 0
    rows = {row["name"]: row for row in done.json["presets"]}
    assert rows["tiny-llama"]["shipped"]
    assert rows["guide-single-gpu"]["variants"] == 9
    assert "did you mean model?" in rows["broken"]["error"]
    assert "broken: " in cli("presets", "list").out


def test_show_resolves_a_variant_and_prints_what_was_published(cli):
    found = shown(cli, "guide-single-gpu/fp16")
    assert found["knobs"]["precision"] == "fp16"
    assert found["knobs"]["seq_len"] == 512
    assert found["model"]["family"] == "bert"
    text = cli("presets", "show", "guide-single-gpu").out
    assert "(published: " in text
    assert "vanilla (baseline)" in text
    assert "18.64" in text


def test_new_changes_only_what_was_set(cli):
    small = ["--set", "model.hidden_size=32", "--set", "model.num_hidden_layers=1"]  # as other tests have it
    settings = ["--set", "batch_size=16", *small, "--set", "memory_limit=2GiB"]
    made = cli("presets", "new", "mine", "--from", "tiny-llama", *settings, "--json").json
    assert made == {"name": "mine", "path": str(cli.presets / "mine.toml")}
    before = shown(cli, "tiny-llama")
    after = shown(cli, "mine")
    assert after["knobs"] == {**before["knobs"], "batch_size": 16, "memory_limit": "2GiB"}
    assert after["model"] == {**before["model"], "hidden_size": 32, "num_hidden_layers": 1}
    assert after["data"] == before["data"]
    assert not after["shipped"]


def test_new_from_a_variant_has_its_knobs_and_no_variants(cli):
    new(cli, "half", "--from", "guide-single-gpu/fp16")
    found = shown(cli, "half")
    assert found["knobs"]["precision"] == "fp16"
    assert found["variants"] == []


def test_new_from_a_table_keeps_its_variants(cli):
    new(cli, "table", "--from", "guide-single-gpu", "--set", "steps=16")
    found = shown(cli, "table")
    assert len(found["variants"]) == 9
    assert found["knobs"]["steps"] == 16
    original = shown(cli, "guide-single-gpu")
    for key in ("title", "model", "data", "variants"):
        assert found[key] == original[key]


def test_new_from_an_extension_is_whole(cli):
    (cli.presets / "child.toml").write_text('schema = 1\nextends = "tiny-llama"\n\n[knobs]\nlr = 1e-4  # slower\n')
    new(cli, "grandchild", "--from", "child", "--set", "batch_size=2")
    knobs = shown(cli, "grandchild")["knobs"]
    assert knobs == {**shown(cli, "tiny-llama")["knobs"], "lr": 1e-4, "batch_size": 2}


def test_new_writes_nested_tables_and_another_model(cli):
    text = 'schema = 1\n[model]\nfamily = "llama"\nhidden_size = 64\n[data]\nkind = "text"\n[model.rope]\ntheta = 1.0\n'
    (cli.presets / "mine.toml").write_text(text)
    new(cli, "wide", "--from", "mine", "--set", "model.hidden_size=256", "--set", "model.scaling={kind={factor=2}}")
    saved = tomllib.loads((cli.presets / "wide.toml").read_text())
    scaling = {"kind": {"factor": 2}}
    assert saved["model"] == {"family": "llama", "hidden_size": 256, "rope": {"theta": 1.0}, "scaling": scaling}
    assert saved["data"] == {"kind": "text", "objective": "causal-lm"}
    new(cli, "other", "--from", "mine", "--set", "model.family=gpt2")
    assert tomllib.loads((cli.presets / "other.toml").read_text())["model"] == {"family": "gpt2"}


def test_another_model_brings_its_own_fields(cli):
    settings = ["--set", "model.family=gpt2", "--set", "model.n_layer=2", "--set", "memory_limit=none"]
    new(cli, "other", *settings)
    assert shown(cli, "other")["model"] == {"family": "gpt2", "n_layer": 2}


def test_new_from_a_path_makes_its_paths_absolute(cli):
    source = cli.presets.parent.parent / "here.toml"
    source.write_text('schema = 1\nextends = "tiny-llama"\n[data]\nkind = "files"\npaths = ["notes.txt"]  # my notes\n')
    new(cli, "mine", "--from", str(source))
    assert shown(cli, "mine")["data"]["paths"] == [str(source.parent / "notes.txt")]


def test_new_may_replace_the_preset_that_it_extends(cli):
    text = 'schema = 1\nextends = "tiny-llama"\n[knobs]\n'
    (cli.presets / "tiny-llama.toml").write_text(f"{text}batch_size = 4\n")
    (cli.presets / "mine.toml").write_text(f"{text}steps = 9\n")
    new(cli, "tiny-llama", "--from", "mine", "--overwrite")
    knobs = shown(cli, "tiny-llama")["knobs"]
    assert (knobs["batch_size"], knobs["steps"]) == (4, 9)


def test_a_variant_may_replace_the_preset_that_its_own_extends(cli):
    (cli.presets / "base.toml").write_text('schema = 1\nextends = "tiny-llama"\n[knobs]\nsteps = 9\n')
    rows = '[[variants]]\nid = "v"\nknobs = { batch_size = 4 }\n'
    (cli.presets / "table.toml").write_text(f'schema = 1\nextends = "base"\n{rows}')
    new(cli, "base", "--from", "table/v", "--overwrite")
    knobs = shown(cli, "base")["knobs"]
    assert (knobs["batch_size"], knobs["steps"]) == (4, 9)

"""Exports of records that hold any text: a comment stays a comment, a word stays a word, a file's name is no path."""

import ast
import shlex
import tempfile
import tomllib
import unicodedata
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from on_disk import run_file
from texts import any_text
from trainfast_runner.errors import UserError
from trainfast_runner.export.formats import export_run
from trainfast_runner.records.run_file import ScriptAsked
from trainfast_runner.settings.knobs import defaults

BREAKERS = ["\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029", "'", '"', "*/", "-->", "`", "$(x)", "\x00"]
LIVE = "{0}import os; os.system('touch PWNED'){0}PWNED: 1{0}PWNED=1{0}touch PWNED{0}#"
HOSTILE = st.one_of(
    st.sampled_from([LIVE.format(breaker) for breaker in BREAKERS]),
    st.sampled_from(["\x1b]52;c;QUJD\x07", "\x9b2J", "\u202e", "coding: utf-7 +AAo-x", "/../../x", "x.json", ""]),
    any_text(max_size=30),
)
FIELDS = {
    **{name: lambda text, name=name: {name: text} for name in ("run_id", "preset", "variant", "title", "cwd")},
    "version": lambda text: {"versions": {"torch": text, "transformers": f"5.1{text}"}},
    "overrides": lambda text: {"overrides": [text]},
    "device_name": lambda text: {"device_names": [text]},
    "model": lambda text: {"model": {"family": "llama", "name": text}},
    "model source": lambda text: {"model": {"hub": text}},
    "model key": lambda text: {"model": {"family": "llama", text: 1}},
    "data": lambda text: {"data": {"kind": "files", "objective": "causal-lm", "paths": [text]}},
    **{
        f"knob {name}": lambda text, name=name: {"knobs": {**defaults(), name: text}}
        for name in ("attention", "p2p", "optimizer", "precision", "strategy", "devices", "offload_path", "batch_size")
    },
}
PARSED = {
    "training-args": lambda text: ast.dump(ast.parse(text.encode())),
    "accelerate": yaml.safe_load,
    "torchrun": lambda text: shlex.split(text, comments=True),
    "command": lambda text: len(shlex.split(text, comments=True)),
    "preset": lambda text: {name: type(value) for name, value in tomllib.loads(text).items()},
}
"""What of each form is the same for every text."""


def exported(to, folder, fields):
    record = {"model": {"family": "llama"}, "data": {"kind": "text", "objective": "causal-lm"}, "knobs": defaults()}
    return export_run(run_file(**{**record, **fields}), folder, to)


@pytest.mark.parametrize("to", PARSED)
@settings(max_examples=60)
@given(field=st.sampled_from(sorted(FIELDS)), text=HOSTILE, oom=st.booleans())
@example(field="run_id", text="coding: utf-7 +AAo-import os+AAo-", oom=True)
def test_f01_any_text_of_a_record_leaves_the_code_of_an_export_as_it_is(to, field, text, oom):
    with tempfile.TemporaryDirectory() as folder:
        if oom:
            (Path(folder) / "result.json").write_text('{"run_id": "r1", "state": "oom", "reason": "", "preset": ""}')
        try:
            hostile = exported(to, Path(folder), FIELDS[field](text))
        except UserError:
            return
        harmless = exported(to, Path(folder), FIELDS[field]("x") if not field.startswith("knob") else {})
    assert all(name == Path(name).name for name in hostile.files)
    if field.startswith("knob"):
        # A text that is a value is another value, as code too.
        PARSED[to](hostile.text)
    else:
        assert PARSED[to](hostile.text) == PARSED[to](harmless.text)
    assert not {"\x1b", "\x9b", "\u202e", "\r"} & set(hostile.text)


@pytest.mark.parametrize("to", ["command", "preset"])
@settings(max_examples=60)
@given(text=HOSTILE.filter(bool))
def test_f01_any_text_of_a_script_leaves_the_code_of_its_export_as_it_is(to, text):
    def of_script(text):
        asked = ScriptAsked(command=["python", "train.py", text], argv=[])
        fields = {"preset": text, "cwd": text, "script": asked, "versions": {"torch": text}}
        return exported(to, Path("/nowhere"), fields)

    try:
        hostile = of_script(text)
    except UserError:
        assert any(unicodedata.category(sign).startswith("C") for sign in text)
        return
    words = ["python", "train.py", text]
    assert all(name == Path(name).name for name in hostile.files)
    if to == "command":
        assert shlex.split(hostile.text, comments=True) == words
    else:
        assert tomllib.loads(hostile.text)["script"]["command"] == words

"""Properties of any text after `--set`, and for a record file cut off anywhere."""

import os
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from texts import any_text
from trainfast_runner.errors import UserError
from trainfast_runner.records.json_lines import Tail, read_all
from trainfast_runner.records.run_directory import read_result
from trainfast_runner.records.run_lines import Step
from trainfast_runner.settings.knobs import KNOBS, KNOBS_BY_NAME
from trainfast_runner.settings.spec import RunSpec, resolve, with_setting

BASE = resolve("tiny-llama")
OTHERS = ["model.hidden_size", "data.kind", "data.paths", "data.", ".", "model."]
KEYS = st.sampled_from([*KNOBS_BY_NAME, *OTHERS]) | any_text()
STEPS = st.builds(
    Step, t_ns=st.integers(0, 2**62), step=st.integers(1, 10**9), warmup=st.booleans(), samples=st.integers(0, 10**9),
    tokens=st.integers(0, 10**12), loss=st.none() | st.floats(-1e300, 1e300), step_ms=st.floats(0, 1e9),
)  # fmt: skip


def after_set(text):
    """Return the spec with `--set TEXT`, or its refusal. A setting is taken by its name, a refusal is one line."""
    answer: RunSpec | UserError
    try:
        answer = with_setting(BASE, text)
    except UserError as problem:
        answer = problem
    if isinstance(answer, UserError):
        assert (answer.exit_code, len(answer.line().splitlines())) == (2, 1)
    else:
        assert answer.overrides == (text.partition("=")[0].strip(),)
    return answer


@given(key=KEYS, value=any_text(), bare=any_text())
def test_a_setting_and_any_text_at_all_are_taken_or_refused_in_one_line(key, value, bare):
    answer = after_set(f"{key}={value}")
    if key in KNOBS_BY_NAME and isinstance(answer, UserError):
        assert key in answer.line(), "the refusal of a value names its knob"
    answer = after_set(bare)
    if "=" not in bare:
        assert isinstance(answer, UserError)
        assert answer.line().startswith("--set takes knob=value")


@pytest.mark.parametrize("entry", KNOBS, ids=lambda entry: str(entry.name))
def test_every_value_reads_back_as_it_is_shown(entry):
    for value in entry.values.ladder(entry.default):
        assert entry.read(entry.text_of(value)) == value
        spec = with_setting(BASE, f"{entry.name}={entry.text_of(value)}")
        assert spec.knobs[entry.name] == value


@given(steps=st.lists(STEPS, max_size=8), cuts=st.lists(st.integers(1, 400), max_size=12))
def test_a_file_that_grows_in_any_pieces_gives_each_record_once(steps, cuts):
    content = b"".join(msgspec.json.encode(step) + b"\n" for step in steps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        tail = Tail(path, Step)
        found = []
        place = 0
        for length in [*cuts, len(content)]:
            with path.open("ab") as file:
                file.write(content[place : place + length])
            place += length
            found += tail.new()
        assert found == steps
        assert tail.unreadable == 0


@given(
    steps=st.lists(STEPS, min_size=1, max_size=6),
    damage=st.lists(st.binary(min_size=1, max_size=60).filter(lambda line: b"\n" not in line), max_size=4),
    seed=st.randoms(),
    keep=st.floats(0, 1),
)
def test_damaged_lines_are_counted_and_cost_no_other_record_and_a_file_cut_off_keeps_its_own(steps, damage, seed, keep):
    lines = [msgspec.json.encode(step) + b"\n" for step in steps]
    whole = b"".join(lines)
    for broken in damage:
        lines.insert(seed.randrange(len(lines) + 1), b"{" + broken + b"\n")  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        path.write_bytes(b"".join(lines))
        assert read_all(path, Step) == (steps, len(damage))
        cut = whole[: round(len(whole) * keep)]
        path.write_bytes(cut)
        assert read_all(path, Step) == (steps[: cut.count(b"\n")], 0)
        path.write_bytes(whole)
        tail = Tail(path, Step)
        assert tail.new() == steps
        os.truncate(path, whole.index(b"\n") + 1)
        assert tail.new() == (steps[:1] if len(steps) > 1 else []), "a file cut back is read from its start"


def test_brackets_nested_thousands_deep_are_damage_like_any_other(tmp_path):
    step = Step(t_ns=1, step=1, samples=1, tokens=1, step_ms=1.0)
    deep = b'{"t_ns":1,"x":' + b"[" * 20_000 + b"\n"
    (tmp_path / "steps.jsonl").write_bytes(deep + msgspec.json.encode(step) + b"\n")
    assert read_all(tmp_path / "steps.jsonl", Step) == ([step], 1)
    (tmp_path / "result.json").write_bytes(deep)
    assert read_result(tmp_path) is None

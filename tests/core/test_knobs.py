"""The knob table: how values are read, refused, stepped through and written back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from texts import any_text
from trainfast_runner.errors import UserError
from trainfast_runner.settings.knob_values import BYTE_UNITS, parse_bytes, parse_bytes_per_rank
from trainfast_runner.settings.knobs import KNOBS, KNOBS_BY_NAME, knob
from trainfast_runner.worker.catalog import ADAPTER_KNOBS


def test_each_knob_is_declared_once_with_a_default_and_search_values_of_its_own():
    for entry in KNOBS:
        assert entry.read(entry.default if entry.default is not None else "auto") == entry.default
        assert entry.default in list(entry.values.ladder(entry.default))
        assert len(entry.what) > 15, entry.name
    assert len(KNOBS_BY_NAME) == len(KNOBS)
    for entry in KNOBS:
        for value in entry.search_values:
            assert entry.read(value) == value
            assert entry.keeps_training(entry.search_values[0], value), entry.name


READ = [
    ("batch_size", "16", 16), ("batch_size", "1_024", 1024), ("lr", "3e-4", 3e-4), ("lr", 1, 1.0),
    ("pin_memory", True, "on"), ("devices", "2", 2), ("devices", "0+1", "0+1"), ("devices", "0+", "0+"),
    ("devices", "auto", None), ("watch", "0", "0"), ("watch", 0, "0"), ("watch", "0+3", "0+3"), ("watch", "none", ""),
    ("memory_limit", "2GiB+1536MiB", "2GiB+1536MiB"), ("memory_limit", "none", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "raw", "value"), READ)
def test_values_are_read(name, raw, value):
    assert knob(name).read(raw) == value


REFUSED = [
    ("batch_size", 2.5, "must be a whole number"), ("batch_size", True, "must be a whole number"),
    ("precision", "bf-16", "did you mean bf16?"), ("devices", "0", "a count of devices starts at 1"),
    ("devices", "1+1", "names a device twice"),
    ("memory_limit", "1x", "1536m, 1536MiB, 2g, 2GiB (binary), 1.5GB (decimal)"),
    ("memory_limit", "0MiB", "no memory at all"), ("memory_limit", "9" * 400 + "GiB", "more than any machine has"),
    ("memory_limit", "99999999TiB", "more than any machine has"),
    ("devices", "9" * 5000 + "+1", "neither a count nor a list"), ("lr", "nan", "out of range"),
    pytest.param("lr", 10**400, "must be a number", id="lr-larger-than-a-float"),
    ("batch_size", float("inf"), "must be a whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "raw", "expected"), REFUSED)
def test_bad_values_are_refused_by_name(name, raw, expected):
    with pytest.raises(UserError) as refused:
        knob(name).read(raw)
    assert expected in refused.value.line()
    assert refused.value.key == name
    assert refused.value.line().startswith(f"{name}: ")
    assert refused.value.allowed


@pytest.mark.parametrize(
    ("ask", "nearest"),
    [
        (lambda: knob("batchsize"), "batch_size"),
        (lambda: knob("strategy").read("tp+ddp"), "ddp+tp"),
        (lambda: parse_bytes_per_rank("600MiB, 700MiB"), "600MiB+700MiB"),
    ],
)
def test_what_is_close_to_a_name_or_value_gets_it(ask, nearest):
    with pytest.raises(UserError) as refused:
        ask()
    assert refused.value.nearest == nearest
    assert "do not work together" not in refused.value.line()


def test_arrows_stop_at_the_ends_find_back_from_an_odd_value_and_digits_are_typed_whole():
    batch = KNOBS_BY_NAME["batch_size"]
    assert (batch.turn(8, 1), batch.turn(12, 1), batch.turn(12, -1), batch.turn(1, -1)) == (16, 16, 8, 1)
    assert KNOBS_BY_NAME["precision"].turn("fp32", -1) == "fp32"
    values = knob("memory_limit").values
    assert (list(values.ladder("3GiB"))[3:6], values.ladder("1024MiB")[-1]) == (["2GiB", "3GiB", "4GiB"], "40GiB")
    assert values.ladder("2GiB+1GiB")[-1] == "2GiB+1GiB"
    assert (knob("lr").text_of(0.000123456789), knob("lr").text_of(1e-4)) == ("0.000123456789", "0.0001")


@given(st.integers(1, 10**6), st.sampled_from(sorted(BYTE_UNITS)))
def test_bytes_carry_their_unit(count, unit):
    assert parse_bytes(f"{count}{unit}") == count * BYTE_UNITS[unit]
    assert parse_bytes_per_rank(f"{count} {unit}+1GiB") == [count * BYTE_UNITS[unit], 2**30]


@given(st.integers(1, 10**6), st.sampled_from(["k", "m", "g", "t"]), st.sampled_from(["", "i", "ib"]), st.data())
def test_a_binary_unit_is_taken_in_each_spelling_and_case(count, letter, rest, data):
    """A letter alone is binary, as `docker run --memory 1g` takes it."""
    unit = f"{letter.upper()}iB"
    spelling = "".join(data.draw(st.sampled_from([sign, sign.upper()])) for sign in letter + rest)
    gap = data.draw(st.sampled_from(["", " "]))
    assert parse_bytes(f"{count}{gap}{spelling}") == count * BYTE_UNITS[unit]
    assert knob("memory_limit").read(f"{count}{gap}{spelling}") == f"{count}{unit}", "the same in every record"


@given(any_text(max_size=12))
def test_no_text_breaks_a_knob(text):
    for entry in KNOBS:
        answer: object
        try:
            answer = entry.read(text)
        except UserError as problem:
            answer = problem
        if isinstance(answer, UserError):
            assert answer.line().startswith(f"{entry.name}: ")
        else:
            assert entry.read(answer) == answer, "what was taken once is taken again, when a record of it is read"


def test_a_knob_tells_which_values_train_the_same_and_which_need_a_process():
    precision, optimizer = KNOBS_BY_NAME["precision"], KNOBS_BY_NAME["optimizer"]
    assert precision.keeps_training("fp32", "bf16")
    assert not precision.keeps_training("fp32", "bf16-pure")
    assert precision.keeps_training("bf16-pure", "bf16-pure")
    assert optimizer.keeps_training("adamw", "adamw-fused")
    assert not optimizer.keeps_training("adamw", "sgd")
    assert KNOBS_BY_NAME["batch_size"].keeps_training(1, 64)
    assert not KNOBS_BY_NAME["seq_len"].keeps_training(64, 128)
    differing = {entry.name for entry in KNOBS if not entry.equivalent_values}
    optimization = {entry.name for entry in KNOBS if entry.group == "optimization"}
    assert differing == {"samples", "seq_len", "steps", *ADAPTER_KNOBS, *optimization}
    assert "fp32, tf32, fp16, bf16 train alike" in precision.training
    assert not KNOBS_BY_NAME["batch_size"].needs_process(4)
    assert not KNOBS_BY_NAME["precision"].needs_process("bf16")
    assert KNOBS_BY_NAME["precision"].needs_process("fp16")
    assert KNOBS_BY_NAME["strategy"].needs_process("ddp")

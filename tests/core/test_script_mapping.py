"""The mapping of knobs to a script's flags: the guess by names and help, and the present value of a corrected one."""

import pytest

from trainfast_runner.records.run_file import Flag
from trainfast_runner.settings.script_preset import mapping_typed, propose


@pytest.mark.parametrize(
    ("help", "precision"),
    [("bf16 autocast", "bf16"), ("train in bfloat16", "bf16"), ("", "fp16"), ("fp16 or bf16 by the GPU", "fp16")],
)
def test_a_flag_for_half_precision_is_what_its_help_says(help, precision):
    (found,) = propose([Flag(names=["--half"], type="switch", value=False, help=help)])
    assert (found.flag_words, found.value) == ({precision: "--half", "fp32": ""}, "fp32")


def test_nw_is_the_number_of_workers():
    (found,) = propose([Flag(names=["--nw"], type="int", default=2, value=2)])
    assert (found.knob, found.flag_words, found.value) == ("workers", "--nw {}", 2)


@pytest.mark.parametrize(
    ("given", "typed", "value"),
    [
        (False, "bf16: --half, fp32: nothing", "fp32"),
        (True, "bf16: --half, fp32: nothing", "bf16"),
        (False, "bf16: --half", None),
    ],
)
def test_a_corrected_mapping_keeps_the_present_value(given, typed, value):
    flags = [Flag(names=["--half"], type="switch", value=given)]
    assert mapping_typed("precision", typed, flags, "given by you").value == value


def test_of_two_flags_of_a_precision_the_surest_is_taken():
    flags = [Flag(names=[name], type="switch", value=False) for name in ("--use_bf16", "--bf16")]
    (found,) = propose(flags)
    assert found.flag_words == {"bf16": "--bf16", "fp32": ""}


@pytest.mark.parametrize(("dtype", "value"), [("float32", "fp32"), ("bfloat16", "bf16"), ("float64", None)])
def test_the_present_value_is_read_from_a_flag_with_words(dtype, value):
    flags = [Flag(names=["--dtype"], value=dtype), Flag(names=["--fast"], type="bool", value=True)]
    typed = "fp32: --dtype float32 --fast=true, bf16: --dtype=bfloat16 --fast true"
    assert mapping_typed("precision", typed, flags, "given by you").value == value

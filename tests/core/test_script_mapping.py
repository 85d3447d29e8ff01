"""The mapping of knobs to a script's flags: the guess by names and help."""

import pytest

from trainfast_runner.records.run_file import Flag
from trainfast_runner.settings.script_preset import propose


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


def test_of_two_flags_of_a_precision_the_surest_is_taken():
    flags = [Flag(names=[name], type="switch", value=False) for name in ("--use_bf16", "--bf16")]
    (found,) = propose(flags)
    assert found.flag_words == {"bf16": "--bf16", "fp32": ""}

"""The bar, by the text a person would see."""

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from trainfast_tui.text.ascii import to_ascii
from trainfast_tui.widgets.bar import bar_runs


def test_a_bar_knows_eighths_and_ascii() -> None:
    def text(*arguments: Any) -> str:
        return "".join(part for part, _ in bar_runs(*arguments))

    assert text(0.5, 8) == "████····"
    assert text(1 / 16, 8) == "▌·······"
    assert text(None, 4) == "····"
    assert text(math.nan, 4, math.nan) == "····"
    assert text(7.0, 4) == "████"
    assert to_ascii(text(0.5, 8, 1.0)) == "####...|"
    assert text(0.5, 0) == ""


@given(st.none() | st.floats(), st.integers(0, 50), st.none() | st.floats())
def test_a_bar_is_exactly_as_wide_as_asked(fraction: float | None, width: int, marker: float | None) -> None:
    text = "".join(part for part, _ in bar_runs(fraction, width, marker))
    assert cell_len(text) == cell_len(to_ascii(text)) == width

"""The bar, by the text a person would see."""

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from trainfast_tui.text.ascii import to_ascii
from trainfast_tui.widgets.bar import bar


def text(share: float | None, width: int) -> str:
    return "".join(part for part, _ in bar(share, width))


def test_a_bar_knows_eighths_and_ascii() -> None:
    assert text(0.5, 8) == "████····"
    assert text(1 / 16, 8) == "▌·······"
    assert text(None, 4) == "····"
    assert text(7.0, 4) == "████"
    assert to_ascii(text(0.5, 8)) == "####...."
    assert text(0.5, 0) == ""


@given(st.none() | st.floats(allow_nan=False), st.integers(0, 50))
def test_a_bar_is_exactly_as_wide_as_asked(share: float | None, width: int) -> None:
    assert cell_len(text(share, width)) == cell_len(to_ascii(text(share, width))) == width

"""The bar, by the text a person would see."""

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from textual.app import App, ComposeResult

from trainfast_tui.widgets.bar import Bar, bar_runs


class Screen(App[None]):
    def compose(self) -> ComposeResult:
        yield Bar(label_width=18)


async def test_the_bar_shows_its_share_and_label() -> None:
    app = Screen()
    async with app.run_test(size=(80, 15)) as pilot:
        bar = app.query_one(Bar)
        bar.show(0.5, "20480 / 40960 MiB", marker=0.9)
        await pilot.pause()
        text = bar.render_line(0).text
        assert text.endswith("20480 / 40960 MiB")
        assert text.count("█") == 30
        assert text.index("┃") == 54


def test_a_bar_knows_eighths_and_ascii() -> None:
    def text(*arguments: Any, **options: Any) -> str:
        return "".join(part for part, _ in bar_runs(*arguments, **options))

    assert text(0.5, 8) == "████····"
    assert text(1 / 16, 8) == "▌·······"
    assert text(None, 4) == "····"
    assert text(math.nan, 4, math.nan) == "····"
    assert text(7.0, 4) == "████"
    assert text(0.5, 8, 1.0, ascii=True) == "####...|"
    assert text(0.5, 0) == ""


@given(st.none() | st.floats(), st.integers(0, 50), st.none() | st.floats(), st.booleans())
def test_a_bar_is_exactly_as_wide_as_asked(
    fraction: float | None, width: int, marker: float | None, ascii: bool
) -> None:
    text = "".join(part for part, _ in bar_runs(fraction, width, marker, ascii=ascii))
    assert cell_len(text) == width
    assert text.isascii() or not ascii

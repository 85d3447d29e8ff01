"""Updates sent to the terminal: a small terminal shows the right screen, and no more than that is sent."""

import re
from io import StringIO
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from trainfast_tui.terminal.cells import CLEAR_SCREEN, MIN_GAP, SentCells, cells_of, changed_ranges

WIDTH = 40
CONSOLE = Console(file=StringIO(), force_terminal=True, color_system="truecolor")
STYLES = [
    None,
    Style(color="red", bgcolor="black"),
    Style(color="blue", bgcolor="black", bold=True),
    Style(color="blue"),
    Style(color="#102030", bgcolor="white", italic=True),
    Style(color="red", bgcolor="black", underline=True),
    Style(reverse=True),
]


class Terminal:
    """Understands moving to a cell or a column, SGR, and text of single cells."""

    def __init__(self):
        self.cells: dict[tuple[int, int], tuple[str, frozenset[str]]] = {}
        self.received = 0

    def take(self, text):
        x = y = 0
        sgr = {}
        for codes, final, character in re.findall(r"\x1b\[([\d;]*)([A-Za-z])|(.)", text):
            if final == "H":
                y, x = (int(at) - 1 for at in codes.split(";"))
            elif final == "G":
                x = int(codes) - 1
            elif final == "m":
                sgr = styled(sgr, codes)
            else:
                self.received += 1
                self.cells[x, y] = seen(character, sgr)
                x += 1
        assert not sgr, "what is drawn next begins without colours"


def styled(sgr, codes):
    """The style after these codes of SGR."""
    sgr = dict(sgr)
    numbers = codes.split(";")
    while numbers:
        code = numbers.pop(0)
        if code == "0":
            sgr.clear()
        elif code in ("38", "48"):
            sgr[code] = ",".join(numbers[:4])
            del numbers[:4]
        elif 30 <= int(code) <= 37 or 40 <= int(code) <= 47:
            sgr[f"{code[0]}8"] = code
        else:
            sgr[code] = ""
    return sgr


def seen(character, sgr):
    """The visible part of a cell: of a blank the background, and the letters' colour only with a line or reversed."""
    lined = {"4", "7"} & sgr.keys()
    shown = {f"{code}:{value}" for code, value in sgr.items() if character != " " or lined or code == "48"}
    return character, frozenset(shown)


_rows = st.lists(
    st.tuples(st.text(st.sampled_from("ab ⠤"), min_size=1, max_size=12), st.sampled_from(STYLES)), max_size=6
)
_screens = st.lists(_rows, min_size=3, max_size=3)


def strips(screen):
    return [Strip([Segment(*piece) for piece in row]).adjust_cell_length(WIDTH) for row in screen]


@given(_screens, _screens, _screens)
def test_a_terminal_that_was_sent_the_differences_shows_what_one_shows_that_was_sent_all(first, second, third):
    sent, terminal = SentCells(), Terminal()
    terminal.take(sent.draw_all([[strip] for strip in strips(first)], CONSOLE))
    for screen in (second, third):
        # In two pieces, as where two widgets meet.
        pieces = [(x, y, row.crop(x, end)) for y, row in enumerate(strips(screen)) for x, end in ((0, 13), (13, WIDTH))]
        terminal.take(sent.draw(pieces, CONSOLE))
        whole = Terminal()
        whole.take("".join(f"\x1b[{y + 1};1H{strip.render(CONSOLE)}" for y, strip in enumerate(strips(screen))))
        assert terminal.cells == whole.cells
        assert sent.draw(pieces, CONSOLE) == "", "the same is not sent again"


def test_after_forgetting_everything_is_sent_and_of_wide_characters_each_time():
    sent = SentCells()
    rows = [[strip] for strip in strips([[("abc", None)], [("", None)], [("a b", None)]])]
    whole = sent.draw_all(rows, CONSOLE)
    assert sent.draw([(0, 0, rows[0][0])], CONSOLE) == ""
    sent.forget()
    assert sent.draw_all(rows, CONSOLE) == CLEAR_SCREEN + whole
    assert sent.draw_all(rows, CONSOLE) == whole, "it is cleared once"
    sent = SentCells()
    wide = Strip([Segment("温度 88", Style(color="red"))])
    first = sent.draw([(4, 2, wide)], CONSOLE)
    assert first == f"\x1b[3;5H{wide.render(CONSOLE)}"
    assert sent.draw([(4, 2, wide)], CONSOLE) == first
    narrow = sent.draw([(4, 2, Strip([Segment("plain  ")]))], CONSOLE)
    assert narrow == "\x1b[3;5Hplain  ", "nothing of what was wide is left"


_cells = st.lists(st.sampled_from("ab"), min_size=120, max_size=120)


@given(_cells, st.lists(st.integers(0, 119), max_size=6))
def test_of_a_long_row_only_the_stretches_that_differ_are_sent(row, places):
    red = Style(color="red")
    other = ["c" if at in places else character for at, character in enumerate(row)]
    before, after = (cells_of(Strip([Segment("".join(text), red)])) for text in (row, other))
    spans = changed_ranges(before, after)
    sent = {cell for start, end in spans for cell in range(start, end)}
    assert {at for at in range(120) if row[at] != other[at]} <= sent
    assert all(after[0] - before[1] >= MIN_GAP for before, after in pairwise(spans))
    assert len(sent) <= len(set(places)) * (MIN_GAP + 1)

"""Numbers with their units, and untrusted text made safe to show."""

import math
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from texts import any_text
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import to_ascii, with_more, wrap
from trainfast_tui.text.next_run_words import short_overrides

FORMATTERS = (
    fmt.number, fmt.size, fmt.count, fmt.bytes_per_second, fmt.milliseconds, fmt.watts, fmt.joules, fmt.celsius,
    fmt.megahertz, fmt.percent, fmt.signed_percent, fmt.duration,
)  # fmt: skip


READS_AS = [
    (fmt.number(0.09996), "0.100"), (fmt.number(0.0015), "0.00150"), (fmt.number(9.996), "10.0"),
    (fmt.number(12345.6), "12,346"), (fmt.number(0), "0"), (fmt.number(0.00001), "1.0e-05"),
    (fmt.beside_limit("300 W", "400 W"), "300/400 W"), (fmt.beside_limit(fmt.ABSENT, "400 W"), "–/400 W"),
    (fmt.beside_limit(fmt.ABSENT, fmt.ABSENT), fmt.ABSENT), (fmt.size(1024), "1.00 KiB"),
    (fmt.size(1023.9 * 2**20), "1.00 GiB"), (fmt.count(12345), "12,345"),
    (fmt.bytes_per_second(1.25 * 2**30), "1.25 GiB/s"), (fmt.milliseconds(1234), "1,234 ms"),
    (fmt.watts(250.6), "251 W"), (fmt.joules(12345), "12.3 kJ"), (fmt.percent(97.64, 1), "97.6 %"),
    (fmt.signed_percent(-0.01), "0.0 %"), (fmt.signed_percent(13196.7), "+13,197 %"),
    (fmt.signed_percent(999.96), "+1,000 %"), (fmt.signed_interval(-0.04, 1234.5), "0.0 to +1,234 %"),
    (fmt.duration(9.99), "10 s"), (fmt.duration(59.7), "1 min"), (fmt.duration(125), "2 min 05 s"),
    (fmt.duration(3720), "1 h 02 min"), (fmt.duration(3 * 86400 + 4 * 3600), "3 d 04 h"),
    (fmt.duration(-125), "-2 min 05 s"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), READS_AS)
def test_reads_as(text, expected):
    assert text == expected


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_absent_is_never_zero(formatter):
    for value in (None, math.nan, math.inf, -math.inf):
        assert formatter(value) == fmt.ABSENT


def test_a_long_count_of_bytes_in_a_message_has_its_size_behind_it():
    torch = "you tried to allocate 6442450944 bytes. Error code 12"
    assert fmt.with_sizes(torch) == "you tried to allocate 6442450944 bytes (6.00 GiB). Error code 12"
    for message in ("tried to allocate 8 bytes", "6442450944 bytes (6.00 GiB)", "6,442,450,944 bytes", "9" * 5000):
        assert fmt.with_sizes(message) == message


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(FORMATTERS))
def test_every_number_has_a_text_of_one_line(value, formatter):
    text = formatter(value)
    assert text.strip() == text
    assert "\n" not in text


@given(st.floats(0, 1e15))
def test_a_size_reads_back_within_its_precision(size_bytes):
    figure, unit = fmt.size(size_bytes).split()
    factor = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB", "PiB").index(unit)
    assert float(figure.replace(",", "")) * factor == pytest.approx(size_bytes, rel=0.006, abs=0.5)


@pytest.mark.parametrize(
    ("untrusted", "expected"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x9b31mred", "red"),
        ("\x1bP1;2q#0\x1b\\after", "after"),
        ("\x1b]52;c;cGFzdGU=", "52;c;cGFzdGU="),
        ("\x1b(Bx\x1b7y\x1bcz", "xyz"),
        ("a\tb", "a       b"),
        ("loss: 1\r\nloss: 2", "loss: 1  loss: 2"),
        ("user\u202etxt.exe", "usertxt.exe"),
        ("a\x00b\x7fc\x85d", "abc d"),
        ("half\ud83d", "half\ufffd"),
        ("[bold]not markup[/]", "[bold]not markup[/]"),
    ],
)
def test_control_sequences_are_taken_out(untrusted, expected):
    assert fmt.plain(untrusted) == expected


_hostile = st.lists(
    st.one_of(
        any_text(max_size=6),
        st.sampled_from(["\x1b[", "\x1b]", "\x1b", "\x9b", "\x9d", "\x07", "\x1b\\", "\u202e", "\u2066", "31m"]),
        st.characters(categories=["Cc", "Cf", "Cs", "Zl"]),
    )
).map("".join)


@given(_hostile, st.none() | st.integers(-1, 40))
@example("\x1b\x1b[[31m", None)
@example("\u200d\u200d000", 2)
def test_plain_text_is_harmless(untrusted, width):
    text = fmt.plain(untrusted, width)
    assert not [c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")]
    assert not set(text) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c")
    text.encode()
    if width is not None:
        assert cell_len(text) <= max(width, 0)
    assert fmt.plain(text, width) == text


@given(any_text(), st.integers(0, 30), st.sampled_from(["left", "right"]))
def test_fit_is_exact(text, width, align):
    assert to_ascii(text).isascii()
    fitted = fmt.to_width(text, width, "left" if align == "left" else "right")
    assert cell_len(fitted) == width


def test_a_wide_character_is_not_cut_in_half_and_lines_count_cells():
    assert [fmt.truncate("温度计", cells) for cells in (5, 4)] == ["温度…", "温 …"]
    assert fmt.to_width("温度", 6, "right") == "  温度"
    overrides = {"data.path": "/数据/語料庫", "batch_size": 8}
    for cells in range(6, 40):
        assert cell_len(short_overrides(overrides, cells)) <= cells
        assert cell_len(with_more("語料庫語料庫語料庫語料庫語料庫語料庫", cells)) <= cells
    assert with_more("as it was", 20) == "as it was …"


@given(st.text(st.characters(blacklist_categories=["Cc", "Cs", "Mn", "Me", "Cf", "Mc"])))
def test_ascii_takes_the_same_cells(text):
    assert to_ascii(text).isascii()
    assert cell_len(to_ascii(text)) == cell_len(text)


def test_a_path_longer_than_the_line_is_broken_behind_its_slashes():
    path = "/home/anna/projects/a-long-name/.venv/bin/python"
    assert wrap(f"there is no {path}: look again", 30) == [
        "there is no /home/anna/",
        "projects/a-long-name/.venv/",
        "bin/python: look again",
    ]
    assert wrap(f"there is no {path}", 50) == ["there is no", path]
    assert wrap("x/" + "y" * 40, 20) == ["x/", "y" * 19 + "…"]
    assert wrap("either/or is short", 10) == ["either/or", "is short"]


def test_a_text_too_long_for_the_last_column_goes_on_below_and_a_page_counts_hidden_lines():
    rows = [("peak allocated", "118 MiB", "no significant difference"), ("step", "190 ms", "worse")]
    lines = fmt.toned_table(("FIGURE", "A", ""), rows, ["text", "error"], 40)
    assert [fmt.line_text(line) for line in lines] == [
        "FIGURE          A",
        "peak allocated  118 MiB  no significant",
        "                         difference",
        "step            190 ms   worse",
    ]
    assert [line[0][1] for line in lines] == ["muted", "text", "text", "error"]
    page = [[(f"line {number}", "text")] for number in range(9)]
    assert fmt.scrolled_page(page, 5, 9) == (0, page), "all of it fits"
    top, lines = fmt.scrolled_page(page, 99, 5)
    assert top == 5
    assert [fmt.line_text(line) for line in lines[-2:]] == ["line 8", "more lines: 5 above  PgUp PgDn"]

"""Charts, by the text a person would see: strips over time, settings, and those of a report."""

import re

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import MIB, START_NS, S, a_gpu, a_run, a_tick, with_start
from rich.cells import cell_len
from rich.style import Style
from textual.app import App
from textual.color import Color

from texts import any_text
from trainfast_runner.records.run_directory import read_result
from trainfast_tui.charts.chart_data import GUTTER, ChartData, Limit, Series, ThrottledSpan, TimeAxis, YRange, gap_ns_of
from trainfast_tui.charts.charted import throttled_spans
from trainfast_tui.charts.scatter_chart import ChartPoint, front_of, scatter_chart
from trainfast_tui.charts.strip_chart import StripChart, paint
from trainfast_tui.painting import TONES
from trainfast_tui.report.document import charts_of, read_run
from trainfast_tui.terminal.cells import SentCells
from trainfast_tui.text import format as fmt
from trainfast_tui.text.event_words import SHADES
from trainfast_tui.text.format import to_ascii

UNSTYLED = dict.fromkeys(TONES, Style.null())


def a_series(values, every_s=1.0, name="GPU 0"):
    return Series(name, [int(i * every_s * S) for i in range(len(values))], values)


def a_chart(*series, seconds=120, **changes):
    fields = {
        "title": "Power",
        "series": series,
        "axis": TimeAxis(0, int(seconds * S), is_live=True),
        "gap_ns": 3 * S,
        "format_value": fmt.watts,
    }
    return ChartData(**{**fields, **changes})


def lines(data, width=81, height=14, *, ascii=False, **options):
    rows = paint(data, width, height, options.pop("y_range", None) or YRange(), UNSTYLED, **options)
    texts = ["".join(segment.text for segment in row) for row in rows]
    return list(map(to_ascii, texts)) if ascii else texts


def plot(data, width=81, height=14, **options):
    """The rows of the plot alone, without title, gutter, marks and times."""
    return [row[GUTTER:] for row in lines(data, width, height, **options)[1:-2]]


def test_a_spike_of_one_sample_in_thousands_survives():
    values = [100.0] * 6000
    values[3000] = 400.0
    rows = plot(a_chart(a_series(values, 0.02)))
    assert rows[0].strip(), "the spike's top must be drawn in the first row"
    assert len(rows[0].strip()) == 1
    assert abs(rows[0].index(rows[0].strip()) - 35) <= 1, "the spike stands in the middle"


def test_absent_readings_and_late_samples_leave_a_gap():
    values = [200.0] * 120
    values[40:60] = [None] * 20
    late = Series("late", [i * S for i in range(120) if not 80 <= i < 100], [200.0] * 100)
    for chart, start, end in ((a_chart(a_series(values)), 42, 58), (a_chart(late), 82, 98)):
        rows = plot(chart)
        columns = [any(row[x] != " " for row in rows) for x in range(70)]
        assert not any(columns[start * 70 // 120 + 1 : end * 70 // 120 - 1])
        assert all(columns[2 : start * 70 // 120 - 2])
        assert all(columns[end * 70 // 120 + 3 : -1])


def test_throttled_time_has_letters_under_the_plot_and_a_shade():
    chart = a_chart(
        a_series([100.0] * 121),
        spans=(ThrottledSpan(30 * S, 60 * S, "thermal"), ThrottledSpan(100 * S, 120 * S, "power")),
    )
    palette = {**UNSTYLED, "error": Style(color="red"), "warning": Style(color="yellow")}
    rows = paint(chart, 81, 14, YRange(), palette)
    marks = "".join(segment.text for segment in rows[-2])
    assert marks.startswith(" throttle └")
    assert 15 <= marks.count("T") <= 19
    assert marks.endswith("PPPP")
    for letter, glyph, colour in (("T", "░", "red"), ("P", "·", "yellow")):
        for row in (rows[2], rows[5]):
            shaded = [one for one in row if one.style and one.style.color and one.style.color.name == colour]
            assert sum(one.text.count(glyph) for one in shaded) == marks.count(letter)


def test_throttled_time_does_not_go_on_over_a_gap_without_samples():
    def spans(*seconds):
        reasons = [["sw_power_cap"]] * (len(seconds) - 1) + [[]]
        ticks = [
            msgspec.structs.replace(a_tick(second), devices=[a_gpu(0, throttle_reasons=own)])
            for second, own in zip(seconds, reasons, strict=True)
        ]
        found = throttled_spans(ticks, (), gap_ns_of([tick.t_ns for tick in ticks]))
        return [((span.start_ns - START_NS) // S, (span.end_ns - START_NS) // S) for span in found]

    assert spans(0, 1, 2, 602, 603, 604) == [(0, 2), (602, 604)]
    assert spans(0, 8, 16, 24) == [(0, 24)], "a slow sampler's readings lie further apart"
    assert spans(0, 300, 600, 900) == [(0, 900)], "so do thinned records"


def test_time_throttled_on_and_off_does_not_cut_a_row_into_pieces():
    """Each change of style costs the terminal more bytes than the cells between two of them."""
    spans = tuple(ThrottledSpan(at * S, (at + 3) * S, "thermal") for at in range(0, 120, 6))
    palette = {**UNSTYLED, "error": Style(color="red")}
    rows = paint(a_chart(a_series([100.0] * 121), spans=spans), 120, 14, YRange(), palette)
    assert "░░░ " in "".join(segment.text for segment in rows[5])
    assert max(map(len, rows[1:-2])) <= 6


def test_each_cause_and_series_has_a_texture_that_needs_no_colour():
    causes = ("thermal", "power", "brake", "sync_boost", "hardware")
    spans = tuple(ThrottledSpan(20 * S * at, (20 * at + 12) * S, cause) for at, cause in enumerate(causes))
    chart = a_chart(a_series([100.0] * 121), spans=spans)
    for ascii in (False, True):
        rows = lines(chart, 201, 14, ascii=ascii)
        fills = {row[GUTTER + int((20 * at + 6) / 120 * 190)] for at in range(5) for row in rows[2:3]}
        assert len(fills - {" "}) == 5, "five causes, five textures"
        assert rows[-1].count("throttled by heat") == 1
        for words in ("at the power limit", "power brake", "sync boost", "hardware slowdown"):
            assert words in rows[-1]
    assert "throttled by heat" not in lines(a_chart(a_series([100.0] * 121)))[-1]
    chart = a_chart(a_series([100.0] * 121), a_series([300.0] * 121, name="GPU 1"))
    rows = [row.strip() for row in plot(chart) if row.strip()]
    assert len(rows) == 2
    assert set(rows[0]).isdisjoint(rows[1])


def test_of_two_causes_at_once_the_worse_is_drawn_and_the_shortest_is_marked():
    both = (ThrottledSpan(0, 120 * S, "thermal"), ThrottledSpan(0, 120 * S, "power"))
    for spans in (both, both[::-1]):
        *_, marks, legend = lines(a_chart(a_series([100.0] * 121), spans=spans))
        assert "T" in marks
        assert "P" not in marks
        assert "░░ T throttled by heat  + P at the power limit" in legend, "the other one is not kept back"
    rows = lines(a_chart(a_series([100.0] * 121), spans=(ThrottledSpan(60 * S, 60 * S + 1, "thermal"),)))
    assert rows[-2].count("T") == 1


def test_empty_data_says_the_owners_sentence_and_no_size_is_no_error():
    for chart in (a_chart(), a_chart(a_series([None] * 9)), a_chart(Series("old", [-500 * S], [1.0]))):
        rows = lines(msgspec.structs.replace(chart, empty="No GPU was found."))
        assert sum("No GPU was found." in row for row in rows) == 1
    assert (lines(a_chart(a_series([1.0])), 0, 3), lines(a_chart(a_series([1.0])), 5, 0)) == (["", "", ""], [])
    assert len(lines(a_chart(a_series([1.0])), 1, 1)[0]) == 1


def test_ascii_has_only_ascii_and_names_cannot_send_control_sequences():
    chart = a_chart(
        a_series([60.0, None, 80.0] * 40, name="µ"), a_series([20.0] * 120, name="zwei…"), title="Temperatur °C – 温度",
        format_value=fmt.celsius, spans=(ThrottledSpan(0, 120 * S, "thermal"),), limit=Limit(90.0, "≥ 90 °C"),
        empty="nichts – ",
    )  # fmt: skip
    for width in (3, 12, 40, 120):
        text = "".join(lines(chart, width, 12, ascii=True))
        assert text.isascii()
    assert lines(msgspec.structs.replace(chart, series=()), 5, 8, ascii=True)
    assert "*" in "".join(plot(chart, ascii=True))
    assert "o" in "".join(plot(chart, ascii=True))
    chart = a_chart(a_series([1.0], name="\x1b]0;evil\x07n\x9b31m"), title="a\x1b[2Jb", empty="\x1b[H")
    assert "\x1b" not in "".join(lines(chart))
    assert lines(chart)[0].startswith("ab")


_values = st.lists(st.one_of(st.none(), st.floats(), st.floats(0, 100)), max_size=60)
_texts = any_text(max_size=12)
_causes = st.sampled_from([shade.cause for shade in SHADES])


@st.composite
def charts(draw):
    t_min = draw(st.integers(-(10**12), 10**12))
    t_max = t_min + draw(st.integers(-5, 10**12))
    times = st.integers(t_min - 10**9, t_min + 10**12)
    series = []
    for _ in range(draw(st.integers(0, 2))):
        values = draw(_values)
        stamps = sorted(draw(st.lists(times, min_size=len(values), max_size=len(values))))
        series.append(Series(draw(_texts), stamps, values))
    spans = draw(st.lists(st.builds(ThrottledSpan, times, times, _causes), max_size=3))
    return ChartData(
        title=draw(_texts), series=tuple(series), axis=TimeAxis(t_min, t_max, is_live=True),
        gap_ns=draw(st.integers(0, 10**12)),
        format_value=draw(st.sampled_from([fmt.watts, fmt.size, fmt.celsius, fmt.number])), spans=tuple(spans),
        limit=draw(st.none() | st.builds(Limit, st.floats(0, 1e300), _texts)),
        y_min=draw(st.none() | st.just(0.0) | st.floats(-1e9, 1e9)), y_max=draw(st.none() | st.floats(-1e9, 1e9)),
        binary=draw(st.booleans()), empty=draw(_texts),
    )  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(st.lists(charts(), min_size=1, max_size=3), st.integers(1, 60), st.integers(1, 20), st.booleans(), st.booleans())
def test_every_line_is_exactly_as_wide_as_the_chart(shown, width, height, ascii, time_labels):
    y_range = YRange()
    for data in shown:
        rows = paint(data, width, height, y_range, UNSTYLED, time_labels=time_labels)
        assert len(rows) == height
        for row in rows:
            text = "".join(segment.text for segment in row)
            assert cell_len(to_ascii(text) if ascii else text) == width


class Screen(App[None]):
    def compose(self):
        yield StripChart(id="chart")


def seen(chart):
    return [chart.render_line(y).text for y in range(chart.size.height)]


def sent_now(chart, terminal):
    """The cells of the chart that this terminal, where it stands, has to be sent."""
    rows = [(0, y, chart.render_line(y)) for y in range(chart.size.height)]
    return len(re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", terminal.draw(rows, chart.app.console)))


async def test_the_widget_shows_data_and_dirties_only_what_changed():
    app = Screen()
    async with app.run_test(size=(80, 15)) as pilot:
        chart = app.query_one(StripChart)
        assert not "".join(seen(chart)).strip()
        values = [100.0] * 121
        chart.show_chart(a_chart(a_series(values), seconds=120))
        await pilot.pause()
        before = seen(chart)
        assert "Power" in before[0]
        terminal = SentCells()
        sent_now(chart, terminal)

        asked = []
        refresh = chart.refresh

        def watched(*regions, **options):
            asked.append(regions)
            return refresh(*regions, **options)

        chart.refresh = watched
        chart.show_chart(a_chart(a_series(values), seconds=120))
        assert asked == [], "the same picture is not sent again"
        chart.show_chart(a_chart(a_series([*values[:-1], 60.0]), seconds=120))
        (regions,) = asked
        assert len(regions) < chart.size.height, "a row that is the same is not drawn again"
        assert sent_now(chart, terminal) < 40
        await pilot.pause()
        assert seen(chart) != before


async def test_every_part_can_be_read_in_every_theme():
    app = Screen()
    async with app.run_test(size=(80, 15)) as pilot:
        chart = app.query_one(StripChart)
        causes = [shade.cause for shade in SHADES]
        spans = tuple(ThrottledSpan(20 * S * at, 20 * S * (at + 1), cause) for at, cause in enumerate(causes))
        data = a_chart(a_series([100.0] * 121), spans=spans, limit=Limit(300, "limit"))
        chart.show_chart(data)
        for theme in sorted(app.available_themes):
            app.theme = theme
            await pilot.pause()
            behind = chart.background_colors[1]
            for y in range(chart.size.height):
                for text, style, _ in chart.render_line(y):
                    if style is None or style.color is None or theme.startswith("ansi") or not text.strip():
                        continue
                    ground = Color.from_rich_color(style.bgcolor) if style.bgcolor else behind
                    seen_colour = Color.from_rich_color(style.color)
                    assert abs(seen_colour.brightness - ground.brightness) > 0.1, (theme, text)


def test_the_range_grows_at_once_and_shrinks_late():
    y_range = YRange()
    assert (y_range.fit(0, 95, 0), y_range.fit(0, 310, 1 * S)) == ((0, 100), (0, 400))
    for second in range(2, 22):
        assert y_range.fit(0, 95, second * S) == (0, 400)
    assert y_range.fit(0, 95, 22 * S) == (0, 100)
    y_range = YRange()
    y_range.fit(0, 400, 0)
    for second in range(200):
        high = 300 if second % 15 == 0 else 90
        assert y_range.fit(0, high, second * S) == (0, 400), "it stays while the data returns"


def test_the_front_is_what_none_beats_in_both_and_a_limit_far_beyond_is_written():
    points = [ChartPoint(300, 9.0, "•", "text"), ChartPoint(200, 9.0, "•", "text"), ChartPoint(100, 5.0, "•", "text")]
    others = [ChartPoint(50, None, "✗", "error"), ChartPoint(150, 4.0, "•", "text")]
    assert front_of([*points, *others]) == [points[2], points[1]]
    points = [ChartPoint(100 * MIB, 9.0, "•", "text"), ChartPoint(200 * MIB, 19.0, "•", "text")]
    text = "\n".join("".join(piece for piece, _ in line) for line in scatter_chart(points, 80 << 30, 70, 10))
    assert "┊" not in text
    assert "the limit 80.0 GiB is far right" in text
    assert scatter_chart(points, None, 70, 4) == [], "too small for a chart"


def test_a_gpu_that_the_run_never_used_shades_no_chart(home):
    # GPU 1 is at its power limit, GPU 3 is throttled by heat.
    directory = with_start(a_run(home, gpus=4), device_uuids=["GPU-00000000"])
    charts = charts_of(read_run("A", directory, read_result(directory)))
    assert {chart.title: chart.spans for chart in charts if chart.spans} == {}

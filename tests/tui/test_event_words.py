"""The time line: what happened to run and machine, said in words, on the axis of the charts."""

import msgspec
from recorded import RAMP, START_NS, S, a_run, a_step, a_thermal_ramp, write_lines
from still import a_snapshot, running
from textual.app import App

from trainfast_runner.records.run_lines import Event
from trainfast_runner.running.follower import Follower
from trainfast_tui.charts.chart_column import EventLine
from trainfast_tui.charts.chart_data import DEFAULT_WINDOW, TimeAxis, time_axis
from trainfast_tui.charts.strip_chart import StripChart
from trainfast_tui.text.event_words import DescribedEvent, events_of_run


def words_of(home, *events):
    directory = a_run(home)
    write_lines(directory / "events.jsonl", list(events))
    return [event.words for event in events_of_run(Follower(directory).poll())]


def test_what_begins_and_ends_says_how_long_it_lasted(home):
    assert words_of(
        home,
        Event(t_ns=START_NS, kind="throttle_on", device=3, detail="sw_thermal"),
        Event(t_ns=START_NS + S, kind="gpu_lost", device=1, detail="GPU is lost"),
        Event(t_ns=START_NS + 9 * S, kind="gpu_back", device=1),
        Event(t_ns=START_NS + 12 * S, kind="throttle_off", device=3, detail="sw_thermal"),
        Event(t_ns=START_NS + 13 * S, kind="never heard of"),
        Event(t_ns=START_NS + 14 * S, kind="xid", device=0, detail="79"),
    ) == [
        "GPU 3: thermal slowdown (software)",
        "GPU 1 does not answer: GPU is lost",
        "GPU 1 answers again, after 8 s",
        "GPU 3: no longer: thermal slowdown (software), after 12 s",
        "GPU 0: Xid error 79",
    ]


def test_a_compilation_stands_where_it_began(home):
    directory = a_run(home, steps=2)
    first = a_step(1)
    write_lines(directory / "steps.jsonl", [msgspec.structs.replace(first, compiling=True, step_ms=7000.0)])
    event = next(one for one in events_of_run(Follower(directory).poll()) if one.sign == "c")
    assert (event.t_ns, event.words) == (first.t_ns - 7 * S, "step 1 compiled: it took 7 s")


class Line(App[None]):
    """The event line and nothing else."""

    def compose(self):
        yield EventLine()


def text_of(line, width, height):
    return ["".join(text for text, _ in row) for row in line.lines(width, height)]


def texts_of(chart):
    return [chart.render_line(y).text for y in range(chart.size.height)]


async def test_the_newest_is_shown_and_an_earlier_one_can_be_chosen(home):
    async with running(home, a_snapshot(a_thermal_ramp(home), second=38), size=(140, 48)) as (app, pilot):
        assert "P  1 s before the end  GPU 0: at the power limit  4 of 4, < earlier" in app.text
        charts = [chart for chart in app.main.query(StripChart) if chart.display]
        before = [texts_of(chart) for chart in charts]
        await pilot.press("less_than_sign", "less_than_sign")
        for chart, old in zip(charts, before, strict=True):
            marked = [row for row, was in zip(texts_of(chart), old, strict=True) if row.count("│") > was.count("│")]
            assert marked, "the chosen event is marked on every chart"
            assert len({row.rindex("│") for row in marked}) == 1
        assert "t  5 s before the end  GPU 0: no longer: thermal slowdown (software), after 12 s" in app.text
        assert "The newest event is shown as it comes." in await pilot.press("greater_than_sign", "greater_than_sign")
        assert [texts_of(chart) for chart in charts] == before


async def test_signs_stand_under_their_time_and_the_weightiest_of_a_cell_wins():
    events = [
        DescribedEvent(START_NS + RAMP.start * S, "T", "error", "GPU 0: thermal slowdown"),
        DescribedEvent(START_NS + RAMP.stop * S, "t", "muted", "GPU 0: no longer: thermal slowdown"),
        DescribedEvent(START_NS + 36 * S, "P", "warning", "GPU 0: at the power limit"),
    ]
    app = Line()
    async with app.run_test():
        line = app.query_one(EventLine)
        line.show_events(events, TimeAxis(START_NS, START_NS + 40 * S, is_live=True))
        signs, _ = text_of(line, 11 + 80, 2)
        assert signs.startswith("   events ├")
        assert abs(signs.index("T") - 11 - 2 * RAMP.start) <= 1
        assert abs(signs.rindex("t") - 11 - 2 * RAMP.stop) <= 1
        narrow, _ = text_of(line, 11 + 10, 2)
        assert "T" in narrow
        assert text_of(line, 91, 1) == ["     P  4 s ago  GPU 0: at the power limit  3 of 3, < earlier"]


def test_the_axis_of_an_ended_run_without_a_sample_or_step_ends_at_its_last_event(home):
    directory = a_run(home, state="failed_to_start", steps=0)
    (directory / "telemetry.jsonl").write_bytes(b"")
    end = Event(t_ns=START_NS + 2 * S, kind="state", state="failed_to_start", reason="python is missing")
    write_lines(directory / "events.jsonl", [Event(t_ns=START_NS, kind="state", state="starting"), end])
    axis = time_axis(a_snapshot(directory), DEFAULT_WINDOW)
    assert (axis.end_ns, axis.is_live) == (end.t_ns, False)

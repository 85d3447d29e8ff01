"""The habits of the field: mouse, filters, ways back and out, keys typed ahead, exports and reports, the job badge."""

import itertools

import pytest
from recorded import a_run, a_search, answered
from still import FULL, SMALL, a_live_run, a_snapshot, has, lacks, running, screen_text, the_machine
from textual.events import Key, MouseScrollDown
from textual.widgets import OptionList

from trainfast_tui.panels.dialogs import ValueDialog, YesDialog
from trainfast_tui.panels.header_footer import Footer
from trainfast_tui.panels.knob_panel import KnobPanel
from trainfast_tui.panels.table_view import TableView
from trainfast_tui.screens.help import HelpScreen
from trainfast_tui.screens.monitor import ProcessTable
from trainfast_tui.screens.runs import RunsScreen, RunsTable

SECOND = "20261121-060000-tiny-llama-0001"


def row_of(app, widget, words):
    """The place of these words in the widget, in columns and rows."""
    region = widget.region
    for y, line in enumerate(screen_text(app).splitlines()[region.y : region.bottom]):
        if words in line:
            return line.index(words) - region.x, y
    raise AssertionError(f"{words!r} is not in the widget:\n{screen_text(app)}")


async def test_q_and_esc_go_back_from_every_screen(home):
    async with running(home, a_snapshot(a_run(home))) as (app, pilot):
        for opens, key in itertools.product(("b", "B", "h", "m", "T", "question_mark", "d"), ("q", "escape")):
            await pilot.press(opens)
            assert app.screen is not app.main, opens
            await pilot.press(key)
            assert app.screen is app.main, (opens, key)
            assert app.is_running


@pytest.mark.parametrize(("opens", "key"), [("", "q"), ("", "Q"), ("b", "Q"), ("m", "ctrl+q"), ("h", "ctrl+c")])
async def test_capital_q_leaves_from_every_screen_and_q_from_the_main_one(home, opens, key):
    async with running(home, a_snapshot(None)) as (app, pilot):
        await pilot.press(*opens, key)
        assert app.return_code == 0


async def test_a_colon_opens_the_palette(home):
    async with running(home, a_snapshot(None)) as (app, pilot):
        await pilot.press("colon")
        assert type(app.screen).__name__ == "CommandPalette"


async def test_a_click_chooses_a_knob_and_two_more_one_of_its_values(home):
    async with running(home, a_snapshot(None)) as (app, pilot):
        panel = app.screen.query_one(KnobPanel)
        place = row_of(app, panel, "grad_accum")
        await pilot.click(panel, offset=place)
        assert panel.current == "grad_accum"
        await pilot.click(panel, offset=place)
        assert isinstance(app.screen, ValueDialog)
        values = app.screen.query_one(OptionList)
        await pilot.click(values, offset=row_of(app, values, "16"))
        assert app.screen is app.main
        assert app.session.next_run.spec.knobs["grad_accum"] == 16


async def test_a_click_on_the_footer_is_its_key(home):
    async with running(home, a_snapshot(None), size=SMALL) as (app, pilot):
        footer = app.screen.query_one(Footer)
        await pilot.click(footer, offset=row_of(app, footer, "b batch"))
        assert app.screen is not app.main
        footer = app.screen.query_one(Footer)
        await pilot.click(footer, offset=row_of(app, footer, "Esc back"))
        assert app.screen is app.main


async def test_the_wheel_moves_through_the_knobs_and_back(home):
    async with running(home, a_snapshot(None)) as (app, pilot):
        panel = app.screen.query_one(KnobPanel)
        first = panel.current
        await pilot._post_mouse_events([MouseScrollDown], panel)
        assert panel.current == panel.listed[3]
        await pilot.press("g")
        assert panel.current == first
        await pilot.press("G")
        assert panel.current == panel.listed[-1]
        await pilot.press("slash", *"samples", "enter")
        assert panel.current == "samples", "the filter goes to the knob of this name"


async def test_a_click_orders_a_table_and_opens_a_run(home):
    a_run(home)
    a_run(home, SECOND)
    async with running(home, a_snapshot(None)) as (app, pilot):
        await pilot.press("h")
        await pilot.until("peak memory")
        assert isinstance(app.screen, RunsScreen)
        await pilot.until("2 runs")
        table = app.screen.query_one(RunsTable)
        await pilot.click(table, offset=row_of(app, table, "peak memory"))
        assert table.order.name == "peak memory"
        await pilot.click(table, offset=(5, 2))
        chosen = table.current
        await pilot.click(table, offset=(5, 2))
        assert app.screen is app.main
        assert app.session.reader.followed == home.directory(chosen.run_id)


async def test_a_click_answers_a_question(home, hold):
    async with running(home, a_snapshot(a_live_run(home, hold))) as (app, pilot):
        await pilot.press("r")
        assert isinstance(app.screen, YesDialog)
        await pilot.click(".n")
        assert app.screen is app.main
        await pilot.press("r")
        await pilot.click(offset=(2, 2))
        assert app.screen is app.main, "a click beside the question leaves it"


async def test_a_click_accepts_or_leaves_a_dialog(home):
    async with running(home, the_machine()) as (app, pilot):
        await pilot.press("enter", *"16")
        await pilot.click(".enter")
        assert app.screen is app.main
        assert app.session.next_run.text_of("batch_size") == "16"
        await pilot.press("enter", *"32")
        await pilot.click(".escape")
        await pilot.press("enter", *"64")
        await pilot.click(offset=(2, 2))
        assert app.session.next_run.text_of("batch_size") == "16"
        await pilot.press("p", *"bert-base")
        await pilot.click(".enter")
        assert app.session.next_run.spec.name == "bert-base"
        await pilot.press("p", *"gpt2")
        await pilot.click(".escape")
        assert app.screen is app.main
        assert app.session.next_run.spec.name == "bert-base"


async def test_a_click_chooses_an_answer_and_another_one_takes_it(home):
    async with running(home) as (app, pilot):
        await pilot.opened(a_search(home, answered()))
        view = app.screen.query_one(TableView)
        place = row_of(app, view, "largest     batch_size=42")
        await pilot.click(view, offset=place)
        has(app.text, "▸ largest     batch_size=42")
        await pilot.click(view, offset=place)
        assert app.screen is app.main
        assert app.knobs["batch_size"] == 42


async def test_every_list_is_narrowed_by_a_slash(home):
    async with running(home, the_machine(), size=FULL) as (app, pilot):
        text = await pilot.press("slash", *"grad_clip")
        panel = app.screen.query_one(KnobPanel)
        assert panel.listed == ("grad_clip",)
        has(text, "/grad_clip", "1 knob ")
        await pilot.press("enter")
        assert panel.listed == ("grad_clip",), "Enter keeps the filter"
        text = await pilot.press("escape")
        lacks(text, "/grad_clip")
        assert len(panel.listed) > 10
        await pilot.monitor(the_machine())
        table = app.screen.query_one(ProcessTable)
        everyone = len(table.listed)
        await pilot.press("slash", *"no such process")
        assert not table.listed
        await pilot.press("escape")
        assert len(table.listed) == everyone
        await pilot.press("q", "p", "slash", *"resnet")
        has(app.text, "/resnet▏")


async def test_keys_typed_ahead_reach_the_dialog_that_they_open(home, hold, monkeypatch):
    started = []
    async with running(home, a_snapshot(a_live_run(home, hold))) as (app, pilot):
        monkeypatch.setattr(app.session, "start_run", lambda *arguments, **options: started.append(arguments))
        for key in ("r", "y"):
            app.post_message(Key(key, key if len(key) == 1 else None))
        await pilot.pause()
        assert len(started) == 1, "a y that is typed before its question is there answers it"
        assert app.screen is app.main


async def test_esc_and_the_keys_after_it_keep_their_order(home):
    async with running(home, a_snapshot(None)) as (app, pilot):
        await pilot.press("question_mark")
        # As a terminal delivers `Esc h` in one piece, followed by another key.
        for key in ("alt+h", "question_mark"):
            app.post_message(Key(key, None))
        await pilot.pause()
        assert [type(screen) for screen in app.screen_stack[1:]] == [RunsScreen, HelpScreen]


async def test_a_search_is_named_on_every_screen_while_it_runs(home, live_best):
    async with running(home) as (app, pilot):
        await pilot.show_search(live_best)
        has(app.text.splitlines()[-1], "● best fit", "left")
        await pilot.press("h")
        await pilot.show_search(live_best)
        has(app.text.splitlines()[-1], "● best fit", "left")


async def test_e_exports_and_capital_e_reports_the_shown_run(home, tmp_path):
    async with running(home, a_snapshot(a_run(home))) as (app, pilot):
        app.session.cwd = str(tmp_path)
        await pilot.press("e", *"command", "enter")
        await pilot.until("Exported to")
        await pilot.press("E")
        await pilot.until("Reported in")
        names = sorted(path.suffix for path in tmp_path.iterdir() if path.is_file())
        assert ".html" in names
        assert len(names) >= 2

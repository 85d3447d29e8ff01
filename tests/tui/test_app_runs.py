"""The list of runs and the comparison of two."""

import pytest
from recorded import a_run, an_oom_run
from still import a_snapshot, has, running

from trainfast_runner.running.history import RunRow
from trainfast_tui.control.messages import RunStarted
from trainfast_tui.control.run_control import RunControl, compared_with_previous
from trainfast_tui.panels import sorted_table
from trainfast_tui.panels.sorted_table import sorted_rows
from trainfast_tui.screens import runs
from trainfast_tui.screens.runs import RunsListed, RunsTable, list_runs
from trainfast_tui.text.format import has_all_words

FIRST, SECOND = "20261121-054455-tiny-llama-7f3a", "20261121-055012-tiny-llama-91bc"


def two_runs(home):
    """The second with twice the batch, faster a sample and slower a step."""
    return [a_run(home, FIRST), a_run(home, SECOND, knobs={"batch_size": 16}, step_ms=700.0)]


async def test_the_runs_are_listed_newest_first_with_what_was_turned(home):
    two_runs(home)
    an_oom_run(home)
    a_run(home, "20261121-070000-bert-large-aaaa", preset="bert-large", synthetic=True)
    async with running(home, size=(160, 48)) as (app, pilot):
        await pilot.press("h")
        text = await pilot.until("4 runs")
        rows = text.splitlines()[1:5]
        assert "bert-large" in rows[0]
        assert "synthetic data" in rows[0]
        assert "out of memory" in rows[1]
        assert "batch_size=4096" in rows[1]
        assert "DefaultCPUAll" in rows[1]
        assert "batch_size=16" in rows[2]
        assert "✓ finished" in rows[3]
        assert "samples/s↓" in await pilot.press(*"ooo")
        assert "batch_size=16" in app.text.splitlines()[1]
        await pilot.press("slash", *"oom batch_size=4096", "enter")
        await pilot.until("1 of 4")
        assert app.screen.query_one(RunsTable).current is not None


async def test_two_marked_runs_are_compared_and_exchanged(home):
    two_runs(home)
    async with running(home, size=(120, 40)) as (_, pilot):
        await pilot.press("h")
        await pilot.until("2 runs")
        await pilot.press("space", "down", "space", "c")
        has(await pilot.until("compare ─"), f"A  {FIRST}", f"B  {SECOND}")
        assert f"A  {SECOND}" in await pilot.press("x")
        await pilot.press("escape")
        await pilot.until("2 runs")


async def test_an_opened_run_names_the_turned_knobs_that_it_replaces(home):
    two_runs(home)
    async with running(home, size=(160, 48)) as (app, pilot):
        await pilot.until("batch_size")
        app.session.set_knobs([("batch_size", "32")])
        await pilot.press("h")
        await pilot.until("2 runs")
        await pilot.press("enter")
        await pilot.until("before this run was opened, the next run was tiny-llama batch_size=32")


async def test_a_runs_both_settings_in_turn_and_shows_the_verdict(home, monkeypatch):
    directories, asked = two_runs(home), []

    def start(control, spec, run_to_stop):
        asked.append(spec.knobs["batch_size"])
        run_id = f"20261121-06000{len(asked)}-tiny-llama-aaaa"
        step_ms = {8: 480.0, 16: 500.0}[asked[-1]] + len(asked)
        return RunStarted(a_run(home, run_id, knobs={"batch_size": asked[-1]}, step_ms=step_ms))

    monkeypatch.setattr(RunControl, "_start", start)
    async with running(home, a_snapshot(directories[1]), size=(120, 40)) as (app, pilot):
        await pilot.press("c")
        assert "a run A B A B" in await pilot.until("compare ─")
        await pilot.press("a")
        text = await pilot.until(" and 20261121-060003-tiny-llama-aaaa")
        assert asked == [8, 16, 8, 16]
        has(text, "B has 91.7 %", "more throughput than A (95 % CI: +", "batch_size 8 -> 16")
        assert app.session.run_control.turn_words == ""
        await pilot.press("escape")
        app.session.compare_with_previous("20261121-060004-tiny-llama-aaaa")
        await pilot.until(" and 20261121-060003-tiny-llama-aaaa")


async def test_runs_in_turn_end_with_a_run_that_does_not_finish(home, monkeypatch):
    directories = two_runs(home)

    def start(control, spec, run_to_stop):
        return RunStarted(a_run(home, "20261121-060001-tiny-llama-aaaa", state="stopped"))

    monkeypatch.setattr(RunControl, "_start", start)
    async with running(home, a_snapshot(directories[1]), size=(120, 40)) as (_, pilot):
        await pilot.press("c")
        await pilot.until("compare ─")
        await pilot.press("a")
        await pilot.until("A B A B 1/4 stopped: the runs in turn end without a verdict")


async def test_a_second_and_a_late_comparison_cover_no_other_screen(home):
    two_runs(home)
    compared = compared_with_previous(home, SECOND)
    async with running(home, size=(120, 40)) as (app, pilot):
        app.post(compared)
        app.post(compared)
        await pilot.until("compare ─")
        assert len(app.screen_stack) == 2
        await pilot.press("escape", "question_mark")
        assert "compare ─" not in await pilot.post(compared)


async def test_a_listing_begun_before_a_run_was_deleted_does_not_bring_it_back(home):
    two_runs(home)
    async with running(home, size=(120, 40)) as (app, pilot):
        await pilot.press("h")
        await pilot.until("2 runs")
        screen = app.screen
        late = list_runs(home, [])
        await pilot.press("d")
        await pilot.until("y  delete it")
        await pilot.press("y")
        await pilot.until("1 runs")
        screen.post(late)
        await pilot.pause()
        assert "1 runs" in app.text


async def test_c_on_the_main_screen_compares_with_the_run_before_not_with_a_probe(home):
    directories = two_runs(home)
    a_run(home, "20261121-054800-tiny-llama-0001", role="probe", steps=0)
    async with running(home, a_snapshot(directories[1]), size=(80, 24)) as (_, pilot):
        await pilot.press("c")
        text = await pilot.until("compare ─")
        assert f"A  {FIRST}" in text
        await pilot.press("escape")
        await pilot.show(a_snapshot(directories[0]))
        await pilot.press("c")
        text = await pilot.until("compare ─")
        assert f"B  {SECOND}" in text, "where no run came before, the newest other one"
        await pilot.press("escape")
        home.remove(SECOND)
        await pilot.press("c")
        await pilot.until("There is no other finished run")


async def test_a_live_run_cannot_be_deleted_and_an_ended_one_can(home, hold):
    two_runs(home)
    live = a_run(home, "20261121-080000-tiny-llama-bbbb", with_result=False)
    hold(live)
    async with running(home, size=(120, 40)) as (app, pilot):
        await pilot.press("h")
        await pilot.until("3 runs")
        await pilot.press("d")
        text = await pilot.until("is still running: Enter opens it, s stops it")
        assert "y  delete it" not in text
        assert live.exists()
        await pilot.press("down", "d", "enter", "enter", "space")
        await pilot.until("y  delete it")
        assert "y  delete it" not in await pilot.press("escape")
        assert home.directory(SECOND).exists(), "only y answers"
        await pilot.press("d")
        await pilot.until("y  delete it")
        await pilot.press("y")
        await pilot.until(f"deleted {SECOND}")
        current = app.screen.query_one(RunsTable).current
        assert current.run_id == FIRST, "the cursor stays in its place"
        assert not home.directory(SECOND).exists()
        assert home.directory(FIRST).exists()


async def test_the_list_follows_the_home_by_itself(home, monkeypatch):
    monkeypatch.setattr(runs, "REFRESH_S", 0.05)
    two_runs(home)
    async with running(home, size=(120, 40)) as (app, pilot):
        await pilot.press("h")
        await pilot.until("2 runs")
        await pilot.press("down", "space")
        a_run(home, "20261121-060000-tiny-llama-0001", role="probe", steps=0)
        an_oom_run(home)
        text = await pilot.until("3 runs")
        assert "0001" not in text, "the search lists its probes"
        row = next(line for line in text.splitlines() if line.startswith("▸●"))
        assert "batch_size=16" not in row, "cursor and mark stay on their run"
        home.remove(SECOND)
        await pilot.until("2 runs")
        home.remove(FIRST)
        await pilot.until("1 runs")
        assert app.screen.query_one(RunsTable).marked == [], "a mark goes with its run"


async def test_ten_thousand_runs_do_not_hold_up_the_screen(home, monkeypatch):
    monkeypatch.setattr(runs, "REFRESH_S", 3600.0)
    rows = [
        RunRow(
            run_id=f"20260101-{number:06d}-tiny-llama-aaaa",
            preset="tiny-llama",
            state="finished",
            samples_per_s=float(number),
        )
        for number in range(10_000)
    ]
    async with running(home, size=(120, 40)) as (app, pilot):
        await pilot.press("h")
        screen = app.screen
        await pilot.until("No run yet; Esc")
        screen.post(RunsListed(rows))
        await pilot.until("10,000 runs")
        drawn = []
        sorted_lengths = []
        line, order = RunsTable.row_line, sorted_rows
        monkeypatch.setattr(RunsTable, "row_line", lambda table, at, *more: drawn.append(at) or line(table, at, *more))
        monkeypatch.setattr(
            sorted_table, "sorted_rows", lambda rows, *more: sorted_lengths.append(len(rows)) or order(rows, *more)
        )
        for key, sorts in (("down", 0), ("pagedown", 0), ("end", 0), ("home", 0), ("o", 1), ("O", 1), ("pagedown", 0)):
            drawn.clear()
            sorted_lengths.clear()
            await pilot.press(key)
            assert 0 < len(drawn) < 10 * 40, f"{key}: only rows in sight are drawn"
            assert sorted_lengths == [10_000] * sorts, key
        assert screen.query_one(RunsTable).current is not None


@pytest.mark.parametrize(("is_reversed", "names"), [(False, "cba"), (True, "bca")])
def test_runs_without_a_figure_come_last(is_reversed, names):
    rates = {"a": None, "b": 2.0, "c": 3.0}
    rows = [RunRow(run_id=name, preset="p", state="finished", samples_per_s=rate) for name, rate in rates.items()]
    by_rate = next(column for column in RunsTable.COLUMNS if column.name == "samples/s")
    assert "".join(row.run_id for row in sorted_rows(rows, by_rate, is_reversed)) == names


def test_a_filter_wants_every_word_and_takes_values_as_they_are_typed():
    knobs = {"batch_size": 64, "memory_limit": None, "devices": None}
    row = RunRow(run_id="20260101-000000-x", preset="bert-large", state="oom", knobs=knobs)
    assert has_all_words(RunsTable().text_of(row), "bert memory batch_size=64")
    assert not has_all_words(RunsTable().text_of(row), "bert finished")
    assert has_all_words(RunsTable().text_of(row), "")
    assert has_all_words(RunsTable().text_of(row), "memory_limit=none devices=auto")
    changed = {"model.num_hidden_layers": 1, "lr": 1.0}
    row = RunRow(run_id="20260101-000000-x", preset="vit-large", state="finished", overrides=changed)
    assert has_all_words(RunsTable().text_of(row), "num_hidden_layers=1")


async def test_the_presets_can_be_narrowed_by_typing(home):
    async with running(home, a_snapshot(None), size=(100, 40)) as (_, pilot):
        await pilot.press("p", *"zz")
        text = await pilot.until("/zz▏  0 of")
        await pilot.press("enter")
        assert "What to train" in text, "there is nothing to choose"
        await pilot.press("backspace", "backspace", *"moe")
        await pilot.until("/moe▏")
        await pilot.press("enter")
        await pilot.until("preset moe-small")

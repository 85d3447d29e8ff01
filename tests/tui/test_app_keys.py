"""Keys, their help and palette, themes and plain ASCII, of the whole app."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import msgspec
import pytest
from recorded import a_run, a_step, a_tick, write_lines
from still import FULL, SMALL, a_snapshot, running, screen_text, shown
from textual.widget import Widget

from trainfast_runner.records.home import Home
from trainfast_tui.control.messages import SnapshotTaken
from trainfast_tui.widgets.page import Page


async def test_every_theme_can_be_turned_to_and_back(home: Home) -> None:
    async with running(home, size=FULL) as (app, pilot):
        app.post(SnapshotTaken(a_snapshot(a_run(home))))
        await pilot.pause()
        for name in ("terminal-light", "textual-dark", "textual-light", "terminal-dark"):
            await pilot.press("f2")
            # At once, while the style sheet may still be the old theme's.
            assert "finished" in screen_text(app)
            await pilot.pause()
            assert f"theme: {name}" in screen_text(app)
        for name in ("textual-dark", "terminal-dark", "textual-light"):
            app.theme = name
            assert "finished" in screen_text(app)
            await pilot.pause()


async def test_ascii_is_only_ascii(home: Home) -> None:
    snapshot = a_snapshot(a_run(home, gpus=4), ticks=(a_tick(20, gpus=4),))
    for keys in ((), ("enter",), ("question_mark",), ("p",)):
        text, _ = await shown(home, snapshot, *keys, ascii=True, size=(100, 30))
        assert text.isascii(), {character for character in text if ord(character) > 127}


async def test_every_key_stands_in_the_help(home: Home) -> None:
    from trainfast_tui.screens.help import help_sections
    from trainfast_tui.text.keys import ACTIONS
    from trainfast_tui.text.lines import line_text

    text = "\n".join(line_text(line) for section in help_sections(100) for entry in section.entries for line in entry)
    for action in ACTIONS:
        assert action.help[:40] in text
    for name in ("batch_size", "watch", "grad_clip", "Ctrl-P"):
        assert name in text
    seen, _ = await shown(home, a_snapshot(None), "question_mark", size=SMALL)
    assert "keys on the main screen" in seen
    seen, _ = await shown(home, a_snapshot(None), "question_mark", "end", size=SMALL)
    assert line_text(help_sections(SMALL[0])[-1].entries[-1][-1]).strip() in seen
    seen, _ = await shown(home, a_snapshot(None), "question_mark", "end", "home", size=SMALL)
    assert "keys on the main screen" in seen
    titles = [section.title for section in help_sections(100, "monitor") if section.title.startswith("keys ")]
    assert "in the monitor" in titles[0], "the keys of where it was asked come first"


async def test_the_key_of_the_help_closes_it_again(home: Home) -> None:
    async with running(home, size=SMALL) as (app, pilot):
        app.post(SnapshotTaken(a_snapshot(None)))
        await pilot.pause()
        for key in ("question_mark", "f1"):
            await pilot.press(key)
            await pilot.pause()
            assert "keys on the main screen" in screen_text(app)
            await pilot.press(key)
            await pilot.pause()
            assert app.screen is app.main


@pytest.mark.parametrize("size", [FULL, (60, 16)])
async def test_a_page_down_skips_no_line_and_repeats_none(home: Home, size: tuple[int, int]) -> None:
    async with running(home, size=size) as (app, pilot):
        await pilot.press("question_mark")
        await pilot.pause()
        page = app.screen.query_one(Page).region
        last = screen_text(app).splitlines()[page.bottom - 1]
        await pilot.press("pagedown", "up")
        await pilot.pause()
        assert screen_text(app).splitlines()[page.y] == last


async def test_the_help_is_filtered_to_entries_with_their_sections(home: Home) -> None:
    keys = ("question_mark", "end", "slash", *"grad_clip norm", "enter")
    text, _ = await shown(home, a_snapshot(None), *keys, size=SMALL)
    lines = text.splitlines()
    assert "/ filter" in lines[-1]
    assert lines[0].startswith("help with “grad_clip norm” ─")
    assert [line.partition(" ")[0] for line in lines[1:-1] if line[:1].strip()] == ["knobs:", "grad_clip"]
    text, _ = await shown(home, a_snapshot(None), "question_mark", "slash", *"zebra", "enter", size=SMALL)
    assert "help nothing with “zebra”" in text
    text, _ = await shown(home, a_snapshot(None), *keys, "slash", "backspace", "enter", size=SMALL)
    assert "keys on the main screen" in text


def test_each_command_has_its_own_key_and_a_method() -> None:
    from trainfast_tui import charts, widgets
    from trainfast_tui.app import TrainfastApp
    from trainfast_tui.screens.batch import BatchScreen
    from trainfast_tui.screens.best import BestScreen
    from trainfast_tui.screens.compare import CompareScreen
    from trainfast_tui.screens.diagnosis import DiagnosisScreen
    from trainfast_tui.screens.help import HelpScreen
    from trainfast_tui.screens.main import MainScreen
    from trainfast_tui.screens.monitor import MonitorScreen
    from trainfast_tui.screens.runs import RunsScreen
    from trainfast_tui.screens.script import ScriptScreen
    from trainfast_tui.screens.topo import TopoScreen
    from trainfast_tui.text.keys import ACTIONS

    for package in (charts, widgets):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    screens = {
        "main": MainScreen,
        "script": ScriptScreen,
        "batch": BatchScreen,
        "best": BestScreen,
        "runs": RunsScreen,
        "compare": CompareScreen,
        "topo": TopoScreen,
        "help": HelpScreen,
        "diagnosis": DiagnosisScreen,
        "monitor": MonitorScreen,
        "everywhere": TrainfastApp,
    }
    assert {action.scope for action in ACTIONS} == set(screens)
    for scope, screen in screens.items():
        keys = [key for action in ACTIONS if action.scope in (scope, "everywhere") for key in action.keys]
        assert len(keys) == len(set(keys)), f"a key means two things: {scope}"
        for action in ACTIONS:
            if action.scope == scope:
                widget, dot, name = action.id.rpartition(".")
                owner = widget_classes()[widget] if dot else screen
                assert hasattr(owner, f"action_{name.partition('(')[0]}"), action.id


def test_each_key_that_a_text_names_exists() -> None:
    import trainfast_tui
    from trainfast_tui.live.search_kind import SearchKind
    from trainfast_tui.text.keys import key_of

    named = set()
    for path in Path(*trainfast_tui.__path__).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(ast.Name("key_of"), [ast.Constant(scope), ast.Constant(id)]):
                    named.add((scope, id))
                case ast.Call(ast.Name("key_of"), [_, ast.Constant(id)]):
                    # The scope is that of either search.
                    named |= {(kind.value, id) for kind in SearchKind}
    assert ("everywhere", "quit") in named
    for scope, id in named:
        assert key_of(scope, id), (scope, id)


def widget_classes() -> dict[str, type[Widget]]:
    """Every loaded widget class by its name, which the keys of a widget name."""
    classes, found = [Widget], {}
    while classes:
        cls = classes.pop()
        found[cls.__name__] = cls
        classes += cls.__subclasses__()
    return found


async def test_the_palette_knows_the_commands_of_the_screen(home: Home) -> None:
    async with running(home, size=FULL) as (app, pilot):
        await pilot.pause()
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {"run (r)", "stop (s)", "preset (p)", "help (?)", "quit (q)"} <= titles
        assert not any(title.startswith("mark") for title in titles)


async def test_zooming_says_what_the_charts_show(home: Home) -> None:
    snapshot = a_snapshot(a_run(home))
    text, _ = await shown(home, snapshot, "plus")
    assert "The charts show 22 s: there is nothing shorter to show." in text
    text, _ = await shown(home, a_snapshot(None), "minus")
    assert "The charts show 5 min." in text
    text, _ = await shown(home, snapshot, "g")
    assert "first reading: memory" in text


async def test_throughput_is_shown_in_tokens_and_back(home: Home) -> None:
    directory = a_run(home)

    async def top_chart(*keys: str) -> list[str]:
        async with running(home, size=FULL) as (app, pilot):
            app.post(SnapshotTaken(a_snapshot(directory)))
            await pilot.pause()
            for key in keys:
                await pilot.press(key)
                await pilot.pause()
            region = app.screen.query_one("#throughput").region
            return [row[region.x : region.right] for row in screen_text(app).splitlines()[region.y : region.bottom]]

    samples = await top_chart()
    tokens = await top_chart("t")
    rate = a_step(30).tokens / a_step(30).step_ms * 1e3
    assert f"tokens/s last {rate:,.0f}" in tokens[0], "the newest step's"
    assert await top_chart("t", "t") == samples, "on its own y axis again"


async def test_a_model_without_tokens_has_no_token_throughput(home: Home) -> None:
    directory = a_run(home)
    steps = [msgspec.structs.replace(a_step(number), tokens=0) for number in range(1, 31)]
    write_lines(directory / "steps.jsonl", steps)
    text, _ = await shown(home, a_snapshot(directory), "t")
    assert "This model has no tokens; t shows samples/s." in text


async def test_steps_without_samples_ask_for_the_number_of_samples(home: Home) -> None:
    directory = a_run(home)
    steps = [msgspec.structs.replace(a_step(number), samples=None, tokens=None) for number in range(1, 31)]
    write_lines(directory / "steps.jsonl", steps)
    text, _ = await shown(home, a_snapshot(directory))
    assert "The script shows no samples: start it with --samples-per-step N." in text


async def test_the_log_opens_closes_and_scrolls(home: Home) -> None:
    log = "".join(f"line {number}\n" for number in range(100)) + "10 %\r50 %\r100 %\n"
    snapshot = a_snapshot(a_run(home, log=log))
    text, _ = await shown(home, snapshot, "l")
    assert "log ──" in text
    assert "\n100 %" in text, "of a progress bar only the last state is kept"
    assert "line 99" in text
    back, _ = await shown(home, snapshot, "l", "pageup")
    assert "line 99" not in back
    assert "lines back" in back
    closed, _ = await shown(home, snapshot, "l", "l")
    assert "line 99" not in closed

"""Keys, typed ahead of their dialogs too, their help and palette, themes and plain ASCII, of the whole app."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest
from recorded import a_run, a_tick
from still import FULL, SMALL, a_snapshot, has, running, shown
from textual.events import Key
from textual.widget import Widget

import trainfast_tui
from trainfast_tui import charts, panels, screens
from trainfast_tui.app import TrainfastApp
from trainfast_tui.live.snapshot import SearchKind
from trainfast_tui.screens.base import AppScreen, Page
from trainfast_tui.screens.help import help_sections
from trainfast_tui.terminal.textual_app import KeyReader, after_escape
from trainfast_tui.text.format import line_text
from trainfast_tui.text.keys import ACTIONS, key_of


async def test_every_theme_can_be_turned_to_and_back(home):
    async with running(home, a_snapshot(a_run(home))) as (app, pilot):
        for name in ("terminal-light", "textual-dark", "textual-light", "terminal-dark"):
            await pilot.press("f2")
            # At once, while the style sheet may still be the old theme's.
            assert "finished" in app.text
            await pilot.pause()
            assert f"theme: {name}" in app.text
        for name in ("textual-dark", "terminal-dark", "textual-light"):
            app.theme = name
            assert "finished" in app.text
            await pilot.pause()


async def test_ascii_is_only_ascii(home):
    snapshot = a_snapshot(a_run(home, gpus=4), ticks=(a_tick(20, gpus=4),))
    async with running(home, snapshot, ascii=True, size=(100, 30)) as (_, pilot):
        for keys in ((), ("enter",), ("escape", "question_mark"), ("escape", "p")):
            text = await pilot.press(*keys)
            assert text.isascii(), {character for character in text if ord(character) > 127}


async def test_every_key_stands_in_the_help(home):
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


@pytest.mark.parametrize("size", [FULL, (60, 16)])
async def test_a_page_down_skips_no_line_and_repeats_none(home, size):
    async with running(home, size=size) as (app, pilot):
        await pilot.press("question_mark")
        page = app.screen.query_one(Page).region
        assert "more lines: " in app.text.splitlines()[page.bottom - 1]
        last = app.text.splitlines()[page.bottom - 2]
        await pilot.press("pagedown", "up")
        assert app.text.splitlines()[page.y] == last


def test_each_command_has_its_own_key_and_a_method():
    for package in (charts, screens, panels):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    classes = {cls.SCOPE: cls for cls in subclasses(AppScreen) if "SCOPE" in vars(cls)} | {"everywhere": TrainfastApp}
    assert {action.scope for action in ACTIONS} == set(classes)
    for scope, screen in classes.items():
        keys = [key for action in ACTIONS if action.scope in (scope, "everywhere") for key in action.keys.split()]
        assert len(keys) == len(set(keys)), f"a key means two things: {scope}"
        for action in ACTIONS:
            if action.scope == scope:
                widget, dot, name = action.id.rpartition(".")
                owner = {cls.__name__: cls for cls in subclasses(Widget)}[widget] if dot else screen
                assert hasattr(owner, f"action_{name.partition('(')[0]}"), action.id


def test_each_key_that_a_text_names_exists():
    named = set()
    for path in Path(*trainfast_tui.__path__).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(ast.Name("key_of"), [ast.Constant(scope), ast.Constant(id)]):
                    named.add((scope, id))
                case ast.Call(ast.Name("key_of"), [_, ast.Constant(id)]):
                    # The scope is that of either search.
                    named |= {(kind.value, id) for kind in SearchKind}
    assert ("main", "compare") in named
    for scope, id in named:
        assert key_of(scope, id), (scope, id)


def subclasses(parent):
    """Every loaded class below this one."""
    return [cls for child in parent.__subclasses__() for cls in (child, *subclasses(child))]


async def test_the_palette_knows_the_commands_of_the_screen(home):
    async with running(home) as (app, pilot):
        await pilot.pause()
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {"run (r)", "stop (s)", "preset (p)", "help (?)", "quit (q)"} <= titles
        assert not any(title.startswith("mark") for title in titles)


async def test_the_log_opens_closes_and_scrolls(home):
    log = "".join(f"line {number}\n" for number in range(100)) + "10 %\r50 %\r100 %\n"
    directory = a_run(home, log=log)
    async with running(home, a_snapshot(directory)) as (_, pilot):
        # Of a progress bar only the last state is kept.
        has(await pilot.press("l"), "log ──", "\n100 %", "line 99")
        back = await pilot.press("pageup")
        assert "lines back" in back
        assert "line 99" not in back
        (directory / "output.log").write_text(log + "more\n" * 9)
        assert await pilot.show(a_snapshot(directory)) == back, "the lines that a person reads stay where they are"
        assert "line 99" not in await pilot.press("l")


def keys_of(*reads):
    """The typed keys by name: an `alt+` key as the two it stands for."""
    reader = KeyReader()
    names = []
    for read in reads:
        for event in reader.feed(read):
            assert isinstance(event, Key)
            later = after_escape(event)
            names += [event.key] if later is None else ["escape", later.key]
    return names


@pytest.mark.parametrize(
    ("typed", "name"),
    [*zip("\r 1-=?/", ["enter", "space", "1", "minus", "equals_sign", "question_mark", "slash"], strict=True)],
)
def test_esc_is_kept_before_every_key(typed, name):
    assert keys_of(f"\x1b{typed}") == ["escape", name]
    assert keys_of("\x1b", typed) == ["escape", name], "in two reads of one moment"
    assert keys_of(f"j\x1b{typed}k") == ["j", "escape", name, "k"]


def test_a_key_typed_after_escape_has_its_character():
    for name, sign in (("alt+q", "q"), ("alt+shift+q", "Q"), ("alt+1", "1"), ("alt+space", " "), ("alt+slash", "/")):
        later = after_escape(Key(name, None))
        assert later.character == sign
    for name in ("alt+up", "alt+f1", "q", "ctrl+alt+q"):
        assert after_escape(Key(name, None)) is None


def test_sequences_of_the_terminal_stay_what_they_are():
    assert keys_of("\x1b[A", "\x1bOP", "\x1b[1;5C", "\x1b", "[B") == ["up", "f1", "ctrl+right", "down"]
    assert [type(event).__name__ for event in KeyReader().feed("\x1b[200~a b\x1b[201~x")] == ["Paste", "Key"]

"""The private parts of Textual that terminal/ relies on: each is there, in use, and named nowhere else."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from rich.console import Console
from textual import _compositor, _xterm_parser, app, dom, keys, message_pump, screen, widget
from textual.app import App
from textual.dom import DOMNode
from textual.drivers import _writer_thread, linux_driver
from textual.widget import Widget
from textual.widgets import Static

import trainfast_tui
from trainfast_tui.terminal import cells, textual_app
from trainfast_tui.terminal.textual_app import TerminalApp


class Words(TerminalApp):
    def compose(self):
        yield Static("before", id="words")


def test_every_private_part_is_there():
    for cls, fields in ((cells.ChopsUpdate, {"chops", "spans", "chop_ends"}), (cells.LayoutUpdate, {"strips"})):
        assert fields <= set(inspect.signature(cls).parameters)
        assert list(inspect.signature(cls.render_segments).parameters) == ["self", "console"]
    source = inspect.getsource(_compositor.Compositor)
    assert "ChopsUpdate(" in source, "the compositor looks the class up when it makes an update"
    assert "LayoutUpdate(" in source
    assert "XTermParser(" in inspect.getsource(linux_driver), "the driver looks its parser up when it makes one"
    assert hasattr(_xterm_parser.XTermParser(), "_timeout_time")
    assert keys._character_to_key("?") == "question_mark"
    assert callable(Widget._forward_event)
    assert callable(DOMNode._attach)
    assert "self._driver" in inspect.getsource(App)
    assert "self._writer_thread" in inspect.getsource(linux_driver.LinuxDriver)
    assert "self._queue" in inspect.getsource(_writer_thread.WriterThread)


@pytest.mark.parametrize(
    ("plain", "partial", "whole", "parser"),
    [
        (False, cells.TightUpdate, cells.WholeUpdate, textual_app.KeyReader),
        (True, cells.ChopsUpdate, cells.LayoutUpdate, _xterm_parser.XTermParser),
    ],
)
async def test_the_compositor_makes_our_updates_unless_output_is_plain(plain, partial, whole, parser):
    try:
        shown = Words(plain_output=plain)
        textual_app.install(linux_driver.LinuxDriver, plain=plain)
        assert linux_driver.XTermParser is parser
        async with shown.run_test(size=(40, 5)) as pilot:
            compositor = shown.screen._compositor
            assert type(compositor.render_full_update()) is whole
            words = shown.query_one("#words", Static)
            words.update("after")
            await pilot.pause()
            compositor._dirty_regions.add(words.region)
            update = compositor.render_partial_update()
            assert type(update) is partial
            assert "after" in update.render_segments(Console(force_terminal=True, color_system="truecolor"))
    finally:
        cells.install()
        textual_app.install(linux_driver.LinuxDriver)


OWN_OF_TEXTUAL = {
    name
    for module in (widget, dom, message_pump, screen, app)
    for name in re.findall(r"(?:self\.|def )(_[a-z]\w+)", inspect.getsource(module))
}
"""Private attributes and methods that Textual's own classes have on every widget, screen or app."""


def private_names(tree):
    """Private modules imported, private attributes of other objects, and those that a class has from Textual."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("textual"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (part for part in parts if part.startswith("_"))
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            whose = node.value
            is_own = isinstance(whose, ast.Name) and (whose.id in ("self", "cls") or node.attr in own)
            if not is_own or node.attr in OWN_OF_TEXTUAL:
                yield node.attr


def test_no_file_outside_terminal_names_a_private_part():
    package = Path(trainfast_tui.__file__).parent
    found = {
        f"{path.relative_to(package)}: {name}"
        for path in package.rglob("*.py")
        if path.parent.name != "terminal"
        for name in private_names(ast.parse(path.read_text()))
    }
    assert not found

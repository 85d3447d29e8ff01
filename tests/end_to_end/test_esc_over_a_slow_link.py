"""Esc and the key after it, as a slow link delivers them: in one piece or apart. Both reach the app, in order."""

import os
import pty
import subprocess
import sys
import threading
import time
from functools import partial

from cli.command import until

PROGRAM = """
import sys
from textual.events import Key
from trainfast_tui.terminal.textual_app import TerminalApp

class Keys(TerminalApp):
    def on_ready(self) -> None:
        self.note("ready")

    def on_key(self, event: Key) -> None:
        self.note(event.key)

    def note(self, word: str) -> None:
        with open(sys.argv[1], "a") as file:
            file.write(word + "\\n")

Keys(plain_output=sys.argv[2] == "plain").run(mouse=False)
"""
TYPED = {"\r": "enter", " ": "space", "1": "1", "-": "minus", "?": "question_mark", "j": "j", "Q": "Q"}
GAPS_S = (None, 0.0, 0.03, 0.08, 0.2)
"""Between the bytes of Esc and of the key; None: one write, as after a stall of the link. Textual waits for 0.1 s."""
PATIENCE_S = 60
"""Only an app that loses the key itself takes as long as this."""


def received(folder, mode, gaps_s=GAPS_S):
    """The keys that the app saw for each pair typed, up to the second of the pair: Esc is lost if it is not before."""
    notes = folder / f"{mode}.keys"
    notes.touch()
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "LINES": "24", "COLUMNS": "80"}
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(notes), mode], stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, env=environment,
    )  # fmt: skip
    os.close(theirs)
    threading.Thread(target=_drain, args=(ours,), daemon=True).start()
    try:
        until(lambda: notes.read_text(), "the app is ready", 60)
        found = {}
        for gap_s in gaps_s:
            for typed, name in TYPED.items():
                pair = partial(_noted, notes, len(notes.read_text().split()))
                _type(ours, typed, gap_s)
                found[name, gap_s] = until(pair, f"{name}, typed {gap_s} s after Esc", PATIENCE_S)
        return found
    finally:
        program.kill()
        program.wait()
        os.close(ours)


def _noted(notes, before):
    """The keys noted after so many others, once there is one that is not Esc; plain Textual has names of its own."""
    keys = notes.read_text().split()[before:]
    return keys if keys and keys[-1] != "escape" else []


def _type(terminal, typed, gap_s):
    if gap_s is None:
        os.write(terminal, f"\x1b{typed}".encode())
        return
    os.write(terminal, b"\x1b")
    time.sleep(gap_s)
    os.write(terminal, typed.encode())


def _drain(terminal):
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:
        pass


def test_neither_esc_nor_the_key_after_it_is_lost(tmp_path):
    for (name, gap_s), keys in received(tmp_path, "ours").items():
        assert keys == ["escape", name], (name, gap_s)


def test_textual_alone_loses_esc_before_all_but_letters(tmp_path):
    """The reason to keep a parser of our own: should this fail, Textual has learnt it and ours can go."""
    found = received(tmp_path, "plain", gaps_s=(None,))
    assert {name for (name, _), keys in found.items() if "escape" in keys} == {"j", "Q"}

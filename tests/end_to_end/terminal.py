"""A real terminal: tmux with a program in it, typed into and looked at."""

import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from cli.command import until

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Terminal:
    """One tmux server with one window; `close` ends it."""

    def __init__(self, folder: Path, columns: int, rows: int, environment: Mapping[str, str]) -> None:
        self._sockets = (folder / f"tmux{number}.socket" for number in itertools.count())
        self._tmux: list[str] = []
        self._environment = {**environment, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
        self._size = ["-x", str(columns), "-y", str(rows)]

    def open(self, command: list[str]) -> None:
        """Run `command`; the terminal stays when it ends, with what it left on the screen."""
        # A server that was told to end may still hold its socket for a moment: every one has its own.
        self._tmux = ["tmux", "-S", str(next(self._sockets)), "-f", "/dev/null"]
        line = f"{shlex.join(command)}; echo ended with $?; exec cat"
        self._call("new-session", "-d", *self._size, line)

    def press(self, *keys: str) -> None:
        """Type keys by tmux's names, or characters."""
        self._call("send-keys", *keys)

    def screen(self) -> str:
        """The text on the screen now."""
        return self._call("capture-pane", "-p")

    def colours(self) -> set[str]:
        """The SGR codes on the screen now: of colours, and of bold (1), dim (2), underline (4) and reverse (7)."""
        codes = re.findall(r"\x1b\[([\d;]*)m", self._call("capture-pane", "-p", "-e"))
        return {code for joined in codes for code in joined.split(";")} - {"0", "", "39", "49"}

    def until_shows(self, *words: str, seconds: float = 180.0) -> str:
        """Wait until all the words stand on the screen; gives the screen."""

        def shows() -> str | None:
            now = self.screen()
            return now if all(word in now for word in words) else None

        try:
            found: str = until(shows, f"{words} on the screen", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.screen()}") from None
        return found

    def scribble(self, text: str) -> None:
        """Write to the terminal as another program does, past the one that runs in it."""
        with open(self._call("display-message", "-p", "#{pane_tty}").strip(), "w") as tty:
            tty.write(text)

    def kill_program(self) -> None:
        """SIGKILL to the program in the terminal, and to nothing else."""
        shell = int(self._call("display-message", "-p", "#{pane_pid}"))
        children = subprocess.run(["pgrep", "-P", str(shell)], capture_output=True, text=True).stdout.split()
        for pid in children:
            os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        """End the terminal; whatever runs in it gets SIGHUP."""
        if self._tmux:
            subprocess.run([*self._tmux, "kill-server"], capture_output=True)

    def _call(self, *arguments: str) -> str:
        done = subprocess.run([*self._tmux, *arguments], capture_output=True, text=True, env=self._environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

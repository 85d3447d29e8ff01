"""Runs the real command line in a process and a home of its own."""

import functools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forking import Ended, Forks
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import read_all
from trainfast_runner.records.run_directory import is_alive, read_result
from trainfast_runner.records.run_lines import Step

SCRIPT = Path(sys.executable).with_name("trainfast-tui")
COMMAND = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "trainfast_tui.cli"]
PATIENCE_S = 300.0
PROGRAM = Path(__file__).with_name("warm_command.py")
SMALL = [
    *("--set", "data.kind=random", "--set", "model.hidden_size=32", "--set", "model.num_hidden_layers=1"),
    *("--set", "batch_size=2", "--set", "seq_len=16"),
]
"""Settings that make a step of tiny-llama take milliseconds."""


class Done(Ended):
    """How a command ended and what it said."""

    @property
    def json(self) -> Any:
        """The last line of stdout as JSON."""
        return json.loads(self.out.splitlines()[-1])

    def refused(self) -> str:
        """The one line of a refusal, which may follow the notice that a script is run; fails when it was none."""
        assert self.code == 2, f"exit code {self.code}\n{self.out}\n{self.err}"
        assert "Traceback" not in self.err
        lines = [line for line in self.err.strip().splitlines() if "up to its argument parser, to find" not in line]
        assert len(lines) == 1, f"a refusal is one line:\n{self.err}"
        assert lines[0].startswith("trainfast-tui: ")
        return lines[0]


@dataclass
class Cli:
    """The command line with `home` as TRAINFAST_HOME and configuration and cache beside it."""

    home: Path
    config: Path
    cache: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every command."""
        return {
            **os.environ, "TRAINFAST_HOME": str(self.home), "XDG_CONFIG_HOME": str(self.config),
            "XDG_CACHE_HOME": str(self.cache), "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    @property
    def presets(self) -> Path:
        """The folder of the user's own presets, made when it is missing."""
        folder = self.config / "trainfast-tui" / "presets"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def __call__(self, *arguments: str, **environment: str) -> Done:
        """Run a command to its end, in a fork of a process that has done its imports."""
        if "PYTHONPATH" in environment:
            return self.cold(*arguments, **environment)
        everything = {**self.environment, **environment}
        forked = forks(everything.get("LD_LIBRARY_PATH")).run(arguments, [everything], Path.cwd(), PATIENCE_S)
        return Done(**vars(forked))

    def cold(self, *arguments: str, command: Sequence[str] = tuple(COMMAND), **environment: str) -> Done:
        """Run the console script, or another command, to its end, as a shell does."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [*command, *arguments], env={**self.environment, **environment}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Done(done.returncode, done.stdout, done.stderr, cpu_s)

    def start(self, *arguments: str, **environment: str) -> "Started":
        """Start a command that is going to be signalled; its stderr goes to a file."""
        return Started(self, arguments, environment)


class Started:
    """A command that runs."""

    def __init__(self, cli: Cli, arguments: tuple[str, ...], environment: dict[str, str] | None = None) -> None:
        self._err = cli.config.parent / f"stderr-{time.monotonic_ns()}"
        with self._err.open("w") as err:
            self.process = subprocess.Popen(
                [*COMMAND, *arguments], env={**cli.environment, **(environment or {})}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=err, text=True,
            )  # fmt: skip

    @property
    def err(self) -> str:
        """The text on stderr so far."""
        return self._err.read_text()

    def until_printed(self, *words: str) -> None:
        """Wait until stderr holds one of the words."""
        until(lambda: any(word in self.err for word in words) or self.process.poll() is not None, " or ".join(words))
        assert any(word in self.err for word in words), f"it ended without saying {words}:\n{self.err}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command alone, not to what it started."""
        self.process.send_signal(number)

    def end(self) -> Done:
        """Wait for it."""
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        return Done(self.process.returncode, out, self.err)


@functools.cache
def forks(library_path: str | None) -> Forks:
    """The process that forks commands; the linker reads its path once, when a process starts."""
    return Forks(PROGRAM, {**os.environ, **({"LD_LIBRARY_PATH": library_path} if library_path else {})})


def until_measured(cli: Cli) -> None:
    """Wait until a run of the history has a measured step."""

    def measured() -> bool:
        files = cli.home.glob("runs/*/steps.jsonl")
        return any(not step.warmup for file in files for step in read_all(file, Step)[0])

    until(measured, "a measured step")


def directory_of(cli: Cli) -> Path:
    """The only search's."""
    (found,) = (cli.home / "searches").iterdir()
    return found


def live_runs(cli: Cli) -> list[Path]:
    """Those without a result, whose processes are alive."""
    home = Home(cli.home)
    return [path for id in home.run_ids() if is_alive(path := home.directory(id)) and read_result(path) is None]


def until(holds: Callable[[], Any], what: str, seconds: float = PATIENCE_S) -> Any:
    """Poll until something is true and return it."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for: {what}"
        time.sleep(0.02)
    return found

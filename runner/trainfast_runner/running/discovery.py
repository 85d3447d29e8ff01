"""Discovery: run a script to its argument parser in a sandbox and read the flags that it has.

`python -m trainfast_runner.running.discovery COMMAND...` runs a command and ends all that it leaves: a process that
leaves its session and clears its environment stays below its nearest subreaper, which is that program. SIGTERM, or the
end of the program that started it, ends the command.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine import training_python
from trainfast_runner.machine.processes import become_subreaper, collect_orphans, descendants, send
from trainfast_runner.records.capped_file import OUTPUT_FILE, last_line, read_log
from trainfast_runner.records.json_lines import read_regular
from trainfast_runner.records.run_file import DISCOVERED_FILE, Discovered
from trainfast_runner.running.command import ScriptCommand, read_command
from trainfast_runner.running.planning import HOOKS_FOLDER, RUN_VARIABLE, no_torch_message, sandbox
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.script_preset import KEPT_KNOBS, FlagMapping, ScriptPreset
from trainfast_runner.worker.shared.process import die_with_parent

LIMIT_S = 30.0
"""Time for a script to reach its parser; then the script is ended."""
POLL_S, POLL_COMMAND_S = 0.2, 0.02
"""Seconds between two looks at a cancel, and at the contained command."""
END_S = 5.0
"""Seconds after which a process that does not die of SIGKILL is left."""
READ_BYTES, MAX_SHOWN = 1 << 20, 300
"""Bytes at the output's end that are searched for its last line, and most characters of this line in an error."""
NO_TORCH = "No module named 'torch'"
"""The end of Python's error at an import of torch that is not installed."""
FIND_FLAGS = (
    f"import sys; own = sys.path.pop(0); sys.path.append({str(HOOKS_FOLDER)!r}); "
    "from trainfast_door.discovery import main; sys.path.insert(0, own); main()"
)
"""The program of a script's Python, which may have no PYTHONPATH of ours, and no module of the current folder."""
ONLY_RANK = {
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
}
"""A launcher's variables. The script is started without a launcher, as the only rank."""


def discover(
    typed: Sequence[str],
    python: str | None = None,
    limit_s: float = LIMIT_S,
    cancelled: threading.Event | None = None,
    on_start: Callable[[Sequence[str]], None] = lambda command: None,
) -> Discovered:
    """The flags of a command's script; setting `cancelled` ends the script as `limit_s` does.

    `on_start` is called with the command before the script runs: all that stands before its parser takes effect.

    Raises UserError if the script cannot be run, or fails before its parser.
    """
    command = read_command(typed, None if python is None else training_python.find_python(python))
    if command.interpreter is None or not command.script:
        raise UserError(
            f"no Python script found in {shlex.join(command.typed)}: discovery needs one",
            key="--",
            advice="python train.py",
            option="presets new NAME -- python train.py",
        )
    on_start(typed)
    with tempfile.TemporaryDirectory(prefix="trainfast-discovery-") as name:
        folder = Path(name)
        code = _run(command, command.interpreter, folder, limit_s, cancelled or threading.Event())
        try:
            discovered = msgspec.json.decode(read_regular(folder / DISCOVERED_FILE), type=Discovered)
        except FileNotFoundError:
            discovered = Discovered(stopped_at="")
        if code:
            lines = read_log(folder / OUTPUT_FILE, most_bytes=READ_BYTES)
            last = last_line(lines).strip()[:MAX_SHOWN] or f"exit status {code}"
            if last.endswith(NO_TORCH):
                raise UserError(f"{command.name} needs torch, and {no_torch_message(command.interpreter)}", key="--")
            raise UserError(f"{command.name} ended before its arguments were read: {last}", key="--")
    if discovered.stopped_at in ("", "a first parser"):
        return msgspec.structs.replace(discovered, stopped_at=f"{limit_s:g} s")
    return discovered


def _run(
    command: ScriptCommand, interpreter: str, folder: Path, limit_s: float, cancelled: threading.Event
) -> int | None:
    """Run the script until it stops by itself and return its exit code, None if it was ended; end all its processes."""
    environment = {**os.environ, **(ONLY_RANK if command.launched else {}), **sandbox(folder)}
    environment[RUN_VARIABLE] = str(folder)
    with (folder / OUTPUT_FILE).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, interpreter, "-c", FIND_FLAGS, folder, *command.script],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        deadline_s = time.monotonic() + limit_s
        try:
            while not cancelled.is_set() and (left_s := deadline_s - time.monotonic()) > 0:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(min(left_s, POLL_S))
            return None
        finally:
            process.terminate()
            process.wait()


def preset_of(
    typed: Sequence[str],
    discovered: Discovered,
    mappings: Iterable[FlagMapping],
    *,
    name: str,
    cwd: str,
    python: str | None = None,
) -> ScriptPreset:
    """The preset `name` of a command that starts in `cwd`; of its knobs, those that a search begins with have values.

    `python` replaces the command's interpreter.
    """
    mappings = list(mappings)
    knobs = {name: KNOBS_BY_NAME[name].read(value) for name, value in discovered.knobs.items() if name in KEPT_KNOBS}
    knobs |= {m.knob: m.value for m in mappings if m.knob in KEPT_KNOBS and m.value is not None}
    command = read_command(typed, None if python is None else training_python.find_python(python), cwd)
    return ScriptPreset(
        command=tuple(typed),
        flag_words={mapping.knob: mapping.flag_words for mapping in mappings},
        knobs=knobs,
        name=name,
        title=command.title,
        cwd=cwd,
        framework=discovered.framework or "",
    )


def contain(command: list[str]) -> int:
    """Run the command to its end and return its exit code, 128 and the signal's number after a signal."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    die_with_parent(signal.SIGTERM)
    become_subreaper()
    process = subprocess.Popen(command, start_new_session=True)
    while (code := process.poll()) is None and not asked:
        time.sleep(POLL_COMMAND_S)
    deadline_s = time.monotonic() + END_S
    while collect_orphans() and time.monotonic() < deadline_s:
        for leftover in descendants(os.getpid()):
            send(leftover, signal.SIGKILL)
        time.sleep(POLL_COMMAND_S)
    if code is None:
        return 128 + signal.SIGTERM
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(contain(sys.argv[1:]))

"""A typed command line of a training: its launcher, its script, its interpreter and its number of processes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainfast_runner.errors import UserError, nearest

PYTHON = re.compile(r"python(\d(\.\d+)*)?")
TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
ACCELERATE_MODULES = ("accelerate.commands.accelerate_cli", "accelerate.commands.launch")
CONTAINERS = ("docker", "podman", "apptainer", "singularity", "srun", "ssh")
WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
"""Options of Python that take the next word."""
DEEPSPEED_COUNT = ("--num_gpus", "--num_accelerators")


@dataclass(frozen=True)
class ScriptCommand:
    """A command of the user's own. `argv` is started in place of `words`; `interpreter` is None when it is unknown."""

    words: tuple[str, ...]
    argv: tuple[str, ...]
    name: str
    """The script's file name, or the module's, or the command's."""
    interpreter: str | None
    processes: int
    """Ranks that the launcher is asked for; 1 if it is not said."""
    isolated: bool = False
    """True if the interpreter ignores PYTHONPATH."""

    @property
    def door_closed(self) -> str | None:
        """Why the hooks cannot load in this command; None if they can."""
        if self.isolated:
            return "the interpreter ignores PYTHONPATH (-I or -E), by which the hooks load"
        launcher = Path(self.words[0]).name
        if launcher in CONTAINERS:
            return f"{launcher} starts the script where the hooks are not"
        if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
            return "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading the hooks"
        return None


def read_command(words: Sequence[str], python: str | None = None) -> ScriptCommand:
    """The command behind `--`; `python` replaces its interpreter. Raises UserError for one that cannot start."""
    if not words:
        raise UserError("run -- needs a command behind the dashes", key="--", advice="run -- python train.py")
    first = Path(words[0]).name
    if PYTHON.fullmatch(first):
        return _python(words, python)
    if first == "deepspeed":
        return _deepspeed(words, python)
    module = {"torchrun": TORCHRUN_MODULES[0], "accelerate": ACCELERATE_MODULES[0]}.get(first)
    if module is not None and python is not None:
        argv = (python, "-m", module, *words[1:])
    else:
        argv = (_found(words[0]), *words[1:])
    script = next((word for word in words[1:] if word.endswith(".py")), None)
    if module is not None and script is not None:
        _existing(script)
    count = _count(words, script, ("--nproc-per-node", "--nproc_per_node", "--num_processes", "--num-processes"))
    interpreter = python or _shebang(argv[0])
    return ScriptCommand(tuple(words), argv, Path(script or first).name, interpreter, count)


def _python(words: Sequence[str], python: str | None) -> ScriptCommand:
    interpreter = python or _found(words[0])
    flags, rest = _split_flags(words[1:])
    isolated = any(flag[1:].isalpha() and set(flag) & {"I", "E"} for flag in flags if flag[1] not in "WX-")
    if rest[:1] == ["-m"] and len(rest) > 1:
        name = rest[1]
    elif rest[:1] == ["-c"]:
        name = "-c"
    elif rest:
        name = Path(rest[0]).name
        _existing(rest[0])
    else:
        raise UserError(f"{words[0]} has no script to run", key="--", advice=f"run -- {words[0]} train.py")
    count = 1
    if name in (*TORCHRUN_MODULES, *ACCELERATE_MODULES):
        script = next((word for word in rest[2:] if word.endswith(".py")), None)
        count = _count(rest, script, ("--nproc-per-node", "--nproc_per_node", "--num_processes", "--num-processes"))
        name = Path(script or name).name
    return ScriptCommand(tuple(words), (interpreter, *words[1:]), name.replace("/", "-"), interpreter, count, isolated)


def _split_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The interpreter's options, and the rest from `-m`, `-c` or the script on."""
    flags: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
        flag = rest.pop(0)
        flags.append(flag)
        if flag in WITH_VALUE and rest:
            rest.pop(0)
    return flags, rest


def _deepspeed(words: Sequence[str], python: str | None) -> ScriptCommand:
    """The ranks of a `deepspeed` command, started by torchrun: its launcher needs pdsh or ssh."""
    rest, count = list(words[1:]), 1
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).partition("=")
        if option not in (*DEEPSPEED_COUNT, "--num_nodes", "--master_port", "--master_addr"):
            raise UserError(
                f"deepspeed {option}: ranks are started by torchrun, which has no such option",
                key=option,
                advice="torchrun --nproc-per-node N SCRIPT",
            )
        if not equals:
            value = rest.pop(0) if rest else ""
        if option in DEEPSPEED_COUNT:
            count = _whole(option, value)
        elif option == "--num_nodes" and value != "1":
            raise UserError(f"deepspeed --num_nodes {value}: a run is on one machine", key=option)
    if not rest:
        raise UserError("deepspeed has no script to run", key="--", advice="run -- deepspeed train.py")
    _existing(rest[0])
    interpreter = python or _shebang(_found(words[0])) or _found("python")
    torchrun = (interpreter, "-m", TORCHRUN_MODULES[0], "--standalone", f"--nproc-per-node={count}")
    return ScriptCommand(tuple(words), (*torchrun, *rest), Path(rest[0]).name, interpreter, count)


def _count(words: Sequence[str], script: str | None, options: tuple[str, ...]) -> int:
    """The number of processes that the launcher's own options ask for; 1 for `gpu`, `auto` and none."""
    own = words[: words.index(script)] if script is not None else words
    for place, word in enumerate(own):
        option, equals, value = word.partition("=")
        if option in options:
            value = value if equals else own[place + 1] if place + 1 < len(own) else ""
            return 1 if value in ("gpu", "cpu", "auto", "xpu") else _whole(option, value)
    return 1


def _whole(option: str, value: str) -> int:
    if not value.isdigit() or not 1 <= int(value) <= 1024:
        raise UserError(f"{option} {value!r} is not a number of processes", key=option, allowed=["1 to 1024"])
    return int(value)


def _found(word: str) -> str:
    """The command's path. Raises UserError with the nearest name beside it."""
    path = shutil.which(word)
    if path is not None:
        return os.path.abspath(path) if os.sep in word else path
    if word.endswith(".py") and os.path.exists(word):
        raise UserError(f"{word} cannot be executed", key=word, advice=f"run -- python {word}")
    raise UserError(f"there is no command {word!r}", key=word, nearest=_beside(word))


def _existing(script: str) -> None:
    """Raises UserError if there is no such script."""
    if script != "-" and not os.path.exists(script):
        raise UserError(f"there is no script {script}", key=script, nearest=_beside(script))


def _beside(path: str) -> str | None:
    """The file in that folder with the nearest name; None if none is near."""
    folder = os.path.dirname(path) or "."
    try:
        near = nearest(os.path.basename(path), os.listdir(folder))
    except OSError:
        return None
    return near and os.path.join(os.path.dirname(path), near)


def _shebang(path: str) -> str | None:
    """The Python in the first line of a script such as torchrun; None for a binary, or another interpreter."""
    try:
        with open(path, "rb") as file:
            first = file.readline(512)
    except OSError:
        return None
    words = first[2:].split() if first.startswith(b"#!") else []
    if not words:
        return None
    # `/usr/bin/env python`
    word = os.fsdecode(words[1] if words[0].endswith(b"/env") and len(words) > 1 else words[0])
    return shutil.which(word) if PYTHON.fullmatch(os.path.basename(word)) else None

"""A typed command line of a training: its launcher, its script, its interpreter and its number of processes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.records import run_file
from trainfast_runner.records.json_lines import open_regular, read_regular

DISTRIBUTED_OPTIONS = {"multi_gpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "tpu", "mpirun_hostfile"}
DISTRIBUTED_TYPES = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")
"""Values of `distributed_type` that start several ranks, beside those that begin with MULTI_ and name a GPU."""


class AccelerateLaunch(NamedTuple):
    """The ranks that `accelerate launch` is asked for."""

    process_count: int | None
    """None for one on each GPU."""
    is_distributed: bool | None
    """None if the ranks are launched distributed only on several GPUs."""


def _accelerate_launch(options: Sequence[str], cwd: str) -> AccelerateLaunch:
    """The ranks by the words before the script, and by accelerate's configuration file."""
    values = {}
    for word, next_word in zip(options, (*options[1:], ""), strict=False):
        # The next word is the value where the option takes one. accelerate reads - and _ alike.
        if word.startswith("--"):
            option, equals, value = word[2:].partition("=")
            values[option.replace("-", "_")] = value if equals else next_word
    process_count, is_on_cpu = _count(options, None), "cpu" in values
    is_distributed: bool | None = bool(DISTRIBUTED_OPTIONS & values.keys()) or None
    config = _accelerate_config(values.get("config_file"), cwd, is_on_cpu)
    if config is not None:
        kind = str(config.get("distributed_type", "NO"))
        if is_distributed is None:
            is_distributed = kind in DISTRIBUTED_TYPES or (kind.startswith("MULTI_") and kind != "MULTI_CPU")
        configured_processes = config.get("num_processes", 1)
        if process_count is None and isinstance(configured_processes, int):
            process_count = configured_processes
    if is_on_cpu and "mpirun_hostfile" not in values:
        is_distributed = False
    return AccelerateLaunch(process_count, is_distributed)


def _accelerate_config(path: str | None, cwd: str, is_on_cpu: bool) -> dict[str, Any] | None:
    """The configuration's table, with no `path` that of the default file, which --cpu ignores.

    None if the file cannot be read: accelerate itself refuses it.
    """
    if not path and is_on_cpu:
        return None
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.path.expanduser(os.environ.get("HF_HOME", os.path.join(cache, "huggingface")))
    default = os.path.join(home, "accelerate", "default_config.yaml")
    try:
        table = yaml.safe_load(read_regular(os.path.join(cwd, path) if path else default).decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    return table if isinstance(table, dict) else None


LAUNCHERS = {
    "torchrun": run_file.TORCHRUN_MODULES[0],
    "accelerate": run_file.ACCELERATE_MODULES[0],
    "accelerate-launch": run_file.ACCELERATE_MODULES[1],
}
"""Modules of the launchers' console scripts."""
ISOLATING_OPTION = re.compile(rf"-{run_file.PYTHON_LETTERS}[IE]")
"""The start of an option of Python that makes it ignore PYTHONPATH: `-I`, `-E`, also joined with others."""
CONTAINERS = ("docker", "podman", "apptainer", "singularity", "srun", "ssh")
EACH_DEVICE, EACH_CORE = ("gpu", "auto", "xpu"), "cpu"
"""Counts by which torchrun starts a process for each GPU, or each core where it has none; for each core in any case."""
COUNT_OPTIONS = ("--nproc-per-node", "--nproc_per_node", "--num_processes", "--num-processes")
DEEPSPEED = "deepspeed"
DEEPSPEED_COUNT = ("--num_gpus", "--num_accelerators")
TORCHRUN = ("-m", run_file.TORCHRUN_MODULES[0], "--standalone")
"""Words after the interpreter that start the ranks of a `deepspeed` command."""
MAX_PROCESSES = 1024
"""Chosen, not measured: more ranks than any one machine has."""
SHEBANG_BYTES = 512
"""More than the 256 bytes of a first line that Linux reads (BINPRM_BUF_SIZE in binfmts.h)."""


@dataclass(frozen=True, kw_only=True)
class ScriptCommand:
    """A command of the user's own."""

    typed: tuple[str, ...]
    """The words as typed."""
    argv: tuple[str, ...]
    """The words that start the script (`argv_on`); a `deepspeed` command's lack the number of ranks."""
    name: str
    """The script's file name, or the module's, or the command's."""
    interpreter: str | None
    """None when it is unknown."""
    process_count: int | None
    """Ranks that the launcher is asked for, 1 if it is asked for none; None for one on each device."""
    accelerate: AccelerateLaunch | None = None
    """The ranks that `accelerate launch` starts, in place of `process_count`; None for any other launcher."""
    is_deepspeed: bool = False
    """True for a `deepspeed` command, whose ranks torchrun starts."""
    isolated: bool = False
    """True if the interpreter ignores PYTHONPATH."""
    script: tuple[str, ...] = ()
    """The script, or `-m` and its module, and its arguments; empty if it is not seen in the command."""
    launched: bool = False
    """True if a launcher starts the script's ranks."""

    def ranks(self, gpus: int) -> int:
        """Return the number of ranks that start on a machine where the script sees `gpus` GPUs."""
        if self.accelerate is not None:
            count, is_distributed = self.accelerate
            count = gpus if count is None else count
            if is_distributed is None:
                is_distributed = count > 1 and gpus > 1
            return max(1, count) if is_distributed else 1
        if self.process_count is not None:
            return self.process_count
        return gpus or (1 if self.is_deepspeed else _cores())

    def argv_on(self, gpus: int) -> list[str]:
        """Return the words that start the script on a machine where it sees `gpus` GPUs."""
        if not self.is_deepspeed:
            return list(self.argv)
        options = 1 + len(TORCHRUN)
        return [*self.argv[:options], f"--nproc-per-node={self.ranks(gpus)}", *self.argv[options:]]

    @property
    def title(self) -> str:
        """The script's name and its own arguments, without interpreter, launcher and folders."""
        words = self.script[1:] if self.script[:1] == ("-m",) else self.script
        if words and Path(words[0]).name == self.name:
            return shlex.join((self.name, *words[1:]))
        return shlex.join(self.typed)

    @property
    def hooks_blocked(self) -> str | None:
        """The reason that the hooks cannot load in this command; None if they can."""
        if self.isolated:
            return "the interpreter ignores PYTHONPATH (-I or -E), by which the hooks load"
        launcher = Path(self.typed[0]).name
        if launcher in CONTAINERS:
            return f"{launcher} starts the script where the hooks are not"
        if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
            return "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading the hooks"
        return None


def read_command(typed: Sequence[str], python: str | None = None, cwd: str = "") -> ScriptCommand:
    """The command after `--`; `python` replaces its interpreter, `cwd` is the folder that it starts in.

    Raises UserError for one that cannot start.
    """
    if not typed:
        raise UserError("run -- needs a command after --", key="--", option="run -- python train.py")
    first = Path(typed[0]).name
    if first == DEEPSPEED:
        return _deepspeed_command(typed, python, cwd)
    if run_file.PYTHON.fullmatch(first):
        return _python_command(typed, python, cwd)
    module = LAUNCHERS.get(first)
    argv = (python, "-m", module) if python and module else (_command_path(typed[0], cwd),)
    command = ScriptCommand(
        typed=tuple(typed),
        argv=(*argv, *typed[1:]),
        name=first,
        interpreter=python or _shebang(argv[0]),
        process_count=None,
    )
    if module is not None:
        return _launched(command, module, typed[1:], cwd)
    # Neither a Python nor a known launcher, such as a console script, which is a Python file, or `srun`.
    index = _script_index_after(typed)
    return replace(
        command,
        name=Path(run_file.script_name(typed[index])).name,
        process_count=_count(typed[:index] if index else typed),
        script=command.argv if _shebang(argv[0]) is not None else (),
    )


def _script_index_after(typed: Sequence[str]) -> int:
    """The index of the script's file after a program, or of its module after a Python or launcher there; else 0.

    The program's own `-m` may mean anything: `srun -m cyclic`.
    """
    if file := next((index for index, word in enumerate(typed) if index and word.endswith(".py")), 0):
        return file
    names = [Path(word).name for word in typed]
    start = next(
        (index for index, name in enumerate(names) if run_file.PYTHON.fullmatch(name) or name in LAUNCHERS), None
    )
    index = None if start is None else run_file.script_index(typed[start:])
    return 0 if start is None or index is None else start + index


def _python_command(typed: Sequence[str], python: str | None, cwd: str) -> ScriptCommand:
    """A Python with a script, a module or `-c`; a module may be a launcher's."""
    interpreter = python or _command_path(typed[0], cwd)
    index = run_file.program_index(typed)
    words = list(typed[index:])
    if words and (option := run_file.PROGRAM_OPTION.fullmatch(words[0])) is not None:
        # `-umMODULE` is `-m MODULE`, and `-cTEXT` is `-c TEXT`.
        words[:1] = [f"-{option[1]}", *filter(None, [option[2]])]
    if not words or words in (["-m"], ["-c"]):
        raise UserError(f"{typed[0]} has no script to run", key="--", option=f"run -- {typed[0]} train.py")
    command = ScriptCommand(
        typed=tuple(typed),
        argv=(interpreter, *typed[1:]),
        name="-c" if words[0] == "-c" else _name_of(words),
        interpreter=interpreter,
        process_count=1,
        isolated=any(ISOLATING_OPTION.match(word) for word in typed[1 : index + 1]),
        script=() if words[0] == "-c" else tuple(words),
    )
    if words[0] == "-m" and words[1] in (*run_file.TORCHRUN_MODULES, *run_file.ACCELERATE_MODULES):
        return _launched(command, words[1], words[2:], cwd)
    if words[0] not in ("-m", "-c"):
        _refuse_missing(words[0], cwd)
    return command


def _launched(command: ScriptCommand, module: str, words: Sequence[str], cwd: str) -> ScriptCommand:
    """The command of a launcher with the script that it starts and the ranks that its options, in `words`, ask for."""
    script: tuple[str, ...] = ()
    if (index := run_file.script_index(words)) is not None:
        script = tuple(words[index:])
        if script[0].endswith(".py"):
            _refuse_missing(script[0], cwd)
        else:
            script = ("-m", run_file.script_name(script[0]), *script[1:])
    options = words[: len(words) - len(script)]
    command = replace(command, name=_name_of(script) or command.name, script=script, launched=True)
    if module in run_file.ACCELERATE_MODULES:
        return replace(command, process_count=None, accelerate=_accelerate_launch(options, cwd))
    return replace(command, process_count=_count(options))


def _name_of(script: Sequence[str]) -> str:
    """The name of a script or of a module; empty for neither."""
    if len(script) > 1 and script[0] == "-m":
        return script[1].replace("/", "-")
    return Path(script[0]).name if script else ""


def _deepspeed_command(typed: Sequence[str], python: str | None, cwd: str) -> ScriptCommand:
    """The ranks of a `deepspeed` command, started by torchrun: its launcher needs pdsh or ssh."""
    arguments = list(typed[1:])
    count: int | None = None
    while arguments and arguments[0].startswith("-"):
        option, equals, value = arguments.pop(0).partition("=")
        if option not in (*DEEPSPEED_COUNT, "--num_nodes", "--master_port", "--master_addr"):
            raise UserError(
                f"deepspeed {option}: ranks are started by torchrun, which has no such option",
                key=option,
                advice="torchrun --nproc-per-node N SCRIPT",
            )
        if not equals:
            value = arguments.pop(0) if arguments else ""
        if option in DEEPSPEED_COUNT:
            count = _process_count(option, value)
        elif option == "--num_nodes" and value != "1":
            raise UserError(f"deepspeed --num_nodes {value}: a run is on one machine", key=option)
    if not arguments:
        raise UserError("deepspeed has no script to run", key="--", option="run -- deepspeed train.py")
    _refuse_missing(arguments[0], cwd)
    interpreter = python or _shebang(_command_path(typed[0], cwd)) or _command_path("python", cwd)
    return ScriptCommand(
        typed=tuple(typed),
        argv=(interpreter, *TORCHRUN, *arguments),
        name=Path(arguments[0]).name,
        interpreter=interpreter,
        process_count=count,
        is_deepspeed=True,
        script=tuple(arguments),
        launched=True,
    )


def _cores() -> int:
    """Return the cores that this process may use, as torchrun counts them."""
    return len(os.sched_getaffinity(0))


def _count(options: Sequence[str], default: int | None = 1) -> int | None:
    """The processes that a launcher's options ask for; `default` if they name none, None for `gpu` and `auto`."""
    for index, word in enumerate(options):
        option, equals, value = word.partition("=")
        if option in COUNT_OPTIONS:
            if not equals:
                value = options[index + 1] if index + 1 < len(options) else ""
            if value == EACH_CORE:
                return _cores()
            return None if value in EACH_DEVICE else _process_count(option, value)
    return default


def _process_count(option: str, value: str) -> int:
    # Python converts no number of thousands of digits.
    count = int(value) if value.isdecimal() and len(value) < 10 else 0
    if not 1 <= count <= MAX_PROCESSES:
        raise UserError(
            f"{option} {value!r} is not a number of processes", key=option, allowed=[f"1 to {MAX_PROCESSES}"]
        )
    return count


def _command_path(word: str, cwd: str) -> str:
    """The command's path. Raises UserError with the nearest name beside it."""
    file = os.path.join(cwd, word) if os.sep in word else word
    path = shutil.which(file)
    if path is not None:
        return os.path.abspath(path) if os.sep in word else path
    if word.endswith(".py") and os.path.exists(file):
        raise UserError(f"{word} cannot be executed", key=word, advice=f"python {word}", option=f"run -- python {word}")
    commands = ("python", "deepspeed", *LAUNCHERS)
    message = f"there is no command {word!r}"
    if word in commands:
        raise UserError(message, key=word, option="--python PATH of the Python that has it")
    raise UserError(message, key=word, nearest=_nearest_file(word, cwd) or nearest(word, commands))


def _refuse_missing(script: str, cwd: str) -> None:
    """Raise UserError if the script does not exist."""
    if script != "-" and not os.path.exists(os.path.join(cwd, script)):
        folder = f" in {cwd}" if cwd else ""
        raise UserError(f"there is no script {script}{folder}", key=script, nearest=_nearest_file(script, cwd))


def _nearest_file(path: str, cwd: str) -> str | None:
    """The other file in that folder with the nearest name; None if none is near."""
    directory, name = os.path.split(path)
    try:
        names = os.listdir(os.path.join(cwd, directory) or ".")
    except OSError:
        return None
    near = nearest(name, [other for other in names if other != name])
    return near and os.path.join(directory, near)


def _shebang(path: str) -> str | None:
    """The Python in the first line of a script such as torchrun; None for a binary, or another interpreter."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            first = file.readline(SHEBANG_BYTES)
    except OSError:
        return None
    words = first[2:].split() if first.startswith(b"#!") else []
    if not words:
        return None
    # `/usr/bin/env python`
    word = os.fsdecode(words[1] if words[0].endswith(b"/env") and len(words) > 1 else words[0])
    return shutil.which(word) if run_file.PYTHON.fullmatch(os.path.basename(word)) else None

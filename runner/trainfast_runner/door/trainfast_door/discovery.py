"""Discovery: a script runs to its argument parser, its flags are written down, and the process ends there.

The end is the earliest of the parser's return, TrainingArguments, a Lightning Trainer, the first optimizer and the
first forward pass. The script's own clean-up does not run: until then the script has done no more than imports. Flags
are JSON objects, from argparse, Hydra or nanoGPT's `configurator.py`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from .notes import follow, hook_modules, never_raises

MAX_TEXT_CHARACTERS, MAX_ITEMS = 200, 200
"""Chosen, not measured: the most characters kept of a text, and the most items of a list."""
MAX_CHOICES = 100
"""Choices listed for a flag; `choices=range(...)` may have millions."""
REPORT_FILE = "discovered.json"
"""The file that discovery writes."""
TRAINER_MODULES = ("trainer", "trainer_seq2seq", "training_args", "training_args_seq2seq")
MODULES_OF_FRAMEWORK = {
    "HF Trainer": (*(f"transformers.{name}." for name in TRAINER_MODULES), "trl.trainer."),
    "accelerate": ("accelerate.",),
    "Lightning": ("lightning.", "pytorch_lightning."),
}
"""Each framework, and the modules or packages that a global of its script comes from."""


def main() -> None:
    """Run a script to its parser: `DIRECTORY SCRIPT WORDS...`, or `-m MODULE` for SCRIPT, in `sys.argv`.

    The report is in DIRECTORY. The hooks end the process unless the script ends first.
    """
    directory, *words = sys.argv[1:]
    is_module = words[0] == "-m"
    if sys.path and not sys.path[0]:
        # Python puts this folder first in sys.path for `-c`; the script expects its own.
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(words[0]))
    discovery = Discovery(directory)
    discovery.install()
    sys.argv = words[1:] if is_module else words
    try:
        if is_module:
            script_globals = runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            script_globals = runpy.run_path(words[0], run_name="__main__")
        discovery.report("its end", script_globals)
    except SystemExit as left:
        discovery.report("its end" if left.code in (0, None) else "an error", _globals_of_raiser(left))
        raise
    except BaseException as error:
        traceback.print_exc()
        discovery.report("an error", _globals_of_raiser(error))
        sys.exit(1)


def _globals_of_raiser(error: BaseException) -> dict[str, Any]:
    """Return the globals of the script that raised an error, from the traceback; empty if the script never ran."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((frame.f_globals for frame in frames if frame.f_globals.get("__name__") == "__main__"), {})


class Discovery:
    """The hooks of one process; `directory` takes the report."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, REPORT_FILE)
        self._pid = os.getpid()
        self._parsers: list[argparse.ArgumentParser] = []
        """The parsers called since the outermost call began: the script's own, then its subcommands'."""
        self._flags: list[dict[str, Any]] = []
        self._parser: str | None = None
        """The kind of the parser that has the flags."""

    def install(self) -> None:
        """Follow argparse now and the others when they are imported."""
        self._follow_argparse()
        before = {
            "transformers.training_args": ("TrainingArguments.__post_init__", self._stop_at_arguments),
            "lightning.pytorch.trainer.trainer": ("Trainer.__init__", self._stopping("a Lightning Trainer")),
            "pytorch_lightning.trainer.trainer": ("Trainer.__init__", self._stopping("a Lightning Trainer")),
            "torch.optim.optimizer": ("Optimizer.__init__", self._stopping("the first optimizer")),
        }
        hooks: dict[str, Callable[[Any], None]] = {
            module: functools.partial(_follow_method, method=method, before=stop)
            for module, (method, stop) in before.items()
        }
        hooks["torch.nn.modules.module"] = lambda module: module.register_module_forward_pre_hook(
            self._stopping("the first forward pass")
        )
        hooks["hydra._internal.hydra"] = lambda hydra: follow(hydra.Hydra, "compose_config", after=self._stop_at_config)
        hook_modules(hooks)

    @never_raises
    def report(self, stopped_at: str, names: dict[str, Any] | None = None, **details: Any) -> None:
        """Write the flags and frameworks found so far; a later report replaces an earlier one.

        `names` are the globals of a script that has ended; None reads the running `__main__`.
        """
        uses = frameworks_of(vars(sys.modules["__main__"]) if names is None else names) or []
        contents = {"stopped_at": stopped_at, "parser": self._parser, "flags": self._flags, "uses": uses, **details}
        with open(f"{self._path}.new", "w", encoding="utf-8") as file:
            json.dump(contents, file)
        os.replace(f"{self._path}.new", self._path)

    def _stop(self, stopped_at: str, **details: Any) -> None:
        """Report and end the process; a process that the script forked goes on."""
        if os.getpid() == self._pid:
            if not self._flags:
                self._flags = never_raises(configurator_flags)(vars(sys.modules["__main__"])) or []
                self._parser = "configurator.py" if self._flags else self._parser
            self.report(stopped_at, **details)
            os._exit(0)

    def _stopping(self, name: str) -> Callable[..., None]:
        """Return a function that takes any arguments and stops at `name`."""
        return lambda *_args, **_kwargs: self._stop(name)

    def _follow_argparse(self) -> None:
        parse = argparse.ArgumentParser.parse_known_args

        @functools.wraps(parse)
        def followed(parser: Any, *args: Any, **kwargs: Any) -> Any:
            outermost = not self._parsers
            self._parsers.append(parser)
            try:
                namespace, unparsed = parse(parser, *args, **kwargs)
                if outermost:
                    self._note_parser(parser, namespace, unparsed)
            finally:
                # A script may catch the error of its first parser, and try a second one.
                if outermost:
                    self._parsers.clear()
            return namespace, unparsed

        argparse.ArgumentParser.parse_known_args = followed  # type: ignore[method-assign, assignment]

    @never_raises
    def _note_parser(self, parser: Any, namespace: Any, unparsed: list[str]) -> None:
        """Note the options of a parser, and of the subcommands' parsers that ran in it; stop at the script's last."""
        actions = [action for each in self._parsers for action in each._actions]
        no_flags = (argparse._HelpAction, argparse._VersionAction)
        options = [action for action in actions if action.option_strings and not isinstance(action, no_flags)]
        own_flags = [_flag_of(action, namespace) for action in options]
        names = {name for flag in own_flags for name in flag["names"]}
        self._flags = own_flags + [flag for flag in self._flags if not names & set(flag["names"])]
        kinds = [ancestor.__name__ for ancestor in type(parser).__mro__]
        self._parser = "HfArgumentParser" if "HfArgumentParser" in kinds else "argparse"
        # The script refuses leftover words next, or hands them to a second parser. A parser without --help usually
        # reads only the name of a configuration file, and Hydra's only its own options.
        if unparsed or not parser.add_help:
            self.report("a first parser")
        else:
            self._stop("the parser")

    def _stop_at_config(self, config: Any, *_args: Any, **_kwargs: Any) -> None:
        values = sys.modules["omegaconf"].OmegaConf.to_container(config, resolve=False)
        self._flags = config_flags({key: value for key, value in values.items() if key != "hydra"})
        self._parser = "Hydra"
        self._stop("the parser")

    def _stop_at_arguments(self, arguments: Any) -> None:
        from .frameworks import knobs_of_arguments

        batch_size = arguments.per_device_train_batch_size
        self._stop("TrainingArguments", knobs={"batch_size": batch_size, **knobs_of_arguments(arguments)})


def _follow_method(module: Any, method: str, before: Callable[..., None]) -> None:
    """Call `before` before `method` of a module, as CLASS.NAME."""
    owner, _, name = method.partition(".")
    follow(getattr(module, owner), name, before=before)


@never_raises
def frameworks_of(names: dict[str, Any]) -> list[str] | None:
    """The frameworks that a script's globals come from; None after an error."""
    values = list(names.values())
    modules = [f"{getattr(value, '__module__', None) or getattr(value, '__name__', '')}." for value in values]
    frameworks = MODULES_OF_FRAMEWORK.items()
    return [framework for framework, starts in frameworks if any(module.startswith(starts) for module in modules)]


def config_flags(values: Mapping[str, Any], prefix: str = "") -> list[dict[str, Any]]:
    """The leaves of nested values by their dotted names after `prefix`, as the command line assigns them."""
    flags: list[dict[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flags += config_flags(value, f"{name}.")
        else:
            shown = plain(value)
            flags.append({"names": [name], "type": _type_of(value), "default": shown, "value": shown, "assigned": True})
    return flags


def configurator_flags(names: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The globals that nanoGPT's `configurator.py` takes from the command line, listed in `config_keys`; else empty."""
    keys = names.get("config_keys")
    return config_flags({f"--{key}": names.get(key) for key in keys}) if isinstance(keys, list) else []


def _flag_of(action: argparse.Action, namespace: Any) -> dict[str, Any]:
    """The flag of an action; its value is that in `namespace`."""
    default = None if action.default is argparse.SUPPRESS else action.default
    choices = itertools.islice(action.choices or (), MAX_CHOICES)
    return {
        "names": list(action.option_strings),
        "type": _action_type(action, default),
        "default": plain(default),
        "value": plain(getattr(namespace, action.dest, default)),
        "choices": [str(plain(choice)) for choice in choices],
        # `argparse.BooleanOptionalAction` of Python 3.9 adds this name.
        "off": next((name for name in action.option_strings if name.startswith("--no-") and action.nargs == 0), None),
        "help": plain(action.help) if isinstance(action.help, str) and action.help is not argparse.SUPPRESS else "",
    }


def _action_type(action: argparse.Action, default: Any) -> str:
    if action.nargs == 0:
        return "off switch" if action.const is False else "switch"
    if isinstance(action.nargs, int) or action.nargs in ("*", "+"):
        return "list"
    if action.type in (int, float, str):
        return str(action.type.__name__)
    # transformers reads a boolean by `string_to_bool`, others by a `str2bool` of their own.
    return "bool" if "bool" in getattr(action.type, "__name__", "") else _type_of(default)


def _type_of(value: Any) -> str:
    return next((kind.__name__ for kind in (bool, int, float, list) if isinstance(value, kind)), "str")


def plain(value: Any) -> Any:
    """Return a JSON value: plain values unchanged, None for a missing-value placeholder, str(value) for others.

    Of a text its beginning; bytes of a file's name that are not UTF-8 (lone surrogates) become question marks.
    """
    if isinstance(value, str):
        return value[:MAX_TEXT_CHARACTERS].encode(errors="replace").decode()
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value[:MAX_ITEMS]]
    if callable(value):
        return None
    return plain(value.value if hasattr(value, "value") else str(value))

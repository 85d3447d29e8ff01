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
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .import_hooks import hook_modules
from .notes import follow, never_raises

MAX_TEXT_CHARACTERS = 200
"""Chosen, not measured: the most characters kept of a text."""
MAX_ITEMS = 200
"""Chosen, not measured: the most items kept of a list."""
MAX_CHOICES = 100
"""Choices listed for a flag; `choices=range(...)` may have millions."""


def argparse_flags(parsers: Iterable[argparse.ArgumentParser], namespace: Any) -> list[dict[str, Any]]:
    """The options of a parser and of the subcommands' parsers that ran in it, with their values in `namespace`."""
    return [_of_action(action, namespace) for parser in parsers for action in parser._actions if _is_option(action)]


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


def plain(value: Any) -> Any:
    """Return a JSON value: plain values unchanged, None for a missing-value placeholder, str(value) for others."""
    if value is None or isinstance(value, (bool, int, str)):
        return _cut(value) if isinstance(value, str) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value[:MAX_ITEMS]]
    if callable(value) or value is argparse.SUPPRESS:
        return None
    return plain(getattr(value, "value", None)) if hasattr(value, "value") else _cut(str(value))


def _is_option(action: argparse.Action) -> bool:
    return bool(action.option_strings) and not isinstance(action, (argparse._HelpAction, argparse._VersionAction))


def _of_action(action: argparse.Action, namespace: Any) -> dict[str, Any]:
    default = None if action.default is argparse.SUPPRESS else action.default
    return {
        "names": list(action.option_strings),
        "type": _action_type(action, default),
        "default": plain(default),
        "value": plain(getattr(namespace, action.dest, default)),
        "choices": _choices(action.choices or ()),
        # `argparse.BooleanOptionalAction` of Python 3.9 adds this name.
        "off": next((name for name in action.option_strings if name.startswith("--no-") and action.nargs == 0), None),
        "help": _text(action.help),
    }


def _action_type(action: argparse.Action, default: Any) -> str:
    if action.nargs == 0:
        return "off switch" if action.const is False else "switch"
    if isinstance(action.nargs, int) or action.nargs in ("*", "+"):
        return "list"
    if action.type in (int, float):
        return "int" if action.type is int else "float"
    # transformers reads a boolean by `string_to_bool`, others by a `str2bool` of their own.
    if "bool" in getattr(action.type, "__name__", ""):
        return "bool"
    return "str" if action.type is str else _type_of(default)


def _choices(choices: Iterable[Any]) -> list[str]:
    """The first choices as text, at most `MAX_CHOICES`."""
    return [str(plain(choice)) for choice in itertools.islice(choices, MAX_CHOICES)]


def _type_of(value: Any) -> str:
    for kind in (bool, int, float, list):
        if isinstance(value, kind):
            return kind.__name__
    return "str"


def _text(help: Any) -> str:
    return _cut(help) if isinstance(help, str) and help is not argparse.SUPPRESS else ""


def _cut(text: str) -> str:
    """The text's beginning; bytes of a file's name that are not UTF-8 (lone surrogates) become question marks."""
    return text[:MAX_TEXT_CHARACTERS].encode(errors="replace").decode()


REPORT_FILE = "discovered.json"
"""The file that discovery writes."""
FRAMEWORK_OF_MODULE = (
    ("transformers.trainer", "HF Trainer"),
    ("transformers.trainer_seq2seq", "HF Trainer"),
    ("transformers.training_args", "HF Trainer"),
    ("transformers.training_args_seq2seq", "HF Trainer"),
    ("trl.trainer", "HF Trainer"),
    ("accelerate", "accelerate"),
    ("lightning", "Lightning"),
    ("pytorch_lightning", "Lightning"),
)
"""The module or package that a global of the script comes from, and its framework."""


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
        hooks: dict[str, Callable[[Any], None]] = {
            module: functools.partial(_stop_before, method=method, stop=stop)
            for module, method, stop in (
                ("transformers.training_args", "TrainingArguments.__post_init__", self._stop_at_arguments),
                ("lightning.pytorch.trainer.trainer", "Trainer.__init__", self._stopping("a Lightning Trainer")),
                ("pytorch_lightning.trainer.trainer", "Trainer.__init__", self._stopping("a Lightning Trainer")),
                ("torch.optim.optimizer", "Optimizer.__init__", self._stopping("the first optimizer")),
            )
        }
        hooks["torch.nn.modules.module"] = self._follow_forward
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

    def _follow_argparse(self) -> None:
        parse = argparse.ArgumentParser.parse_known_args

        @functools.wraps(parse)
        def followed(parser: Any, *args: Any, **kwargs: Any) -> Any:
            outermost = not self._parsers
            self._parsers.append(parser)
            try:
                namespace, unparsed = parse(parser, *args, **kwargs)
                if outermost:
                    report_parser(parser, namespace, unparsed)
            finally:
                # A script may catch the error of its first parser, and try a second one.
                if outermost:
                    self._parsers.clear()
            return namespace, unparsed

        @never_raises
        def report_parser(parser: Any, namespace: Any, unparsed: list[str]) -> None:
            own_flags = argparse_flags(self._parsers, namespace)
            names = {name for flag in own_flags for name in flag["names"]}
            self._flags = own_flags + [flag for flag in self._flags if not names & set(flag["names"])]
            self._parser = next(
                (ancestor.__name__ for ancestor in type(parser).__mro__ if ancestor.__name__ == "HfArgumentParser"),
                "argparse",
            )
            # The script refuses leftover words next, or hands them to a second parser. A parser without --help usually
            # reads only the name of a configuration file, and Hydra's only its own options.
            if unparsed or not parser.add_help:
                self.report("a first parser")
            else:
                self._stop("the parser")

        argparse.ArgumentParser.parse_known_args = followed  # type: ignore[method-assign, assignment]

    def _stop_at_config(self, config: Any, *_args: Any, **_kwargs: Any) -> None:
        values = sys.modules["omegaconf"].OmegaConf.to_container(config, resolve=False)
        self._flags = config_flags({key: value for key, value in values.items() if key != "hydra"})
        self._parser = "Hydra"
        self._stop("the parser")

    def _stop_at_arguments(self, arguments: Any) -> None:
        fields = {name: plain(getattr(arguments, name, None)) for name in arguments.__dataclass_fields__}
        self._stop("TrainingArguments", fields=fields)

    def _follow_forward(self, module: Any) -> None:
        module.register_module_forward_pre_hook(self._stopping("the first forward pass"))

    def _stopping(self, name: str) -> Callable[..., None]:
        """Return a function that takes any arguments and stops at `name`."""
        return lambda *_args, **_kwargs: self._stop(name)


def _stop_before(module: Any, method: str, stop: Callable[..., None]) -> None:
    """Call `stop` before `method` of a module, as CLASS.NAME."""
    owner, _, name = method.partition(".")
    follow(getattr(module, owner), name, before=stop)


@never_raises
def frameworks_of(names: dict[str, Any]) -> list[str] | None:
    """The frameworks that a script's globals come from; None after an error."""
    modules = [
        f"{getattr(value, '__module__', None) or getattr(value, '__name__', '')}." for value in list(names.values())
    ]
    used_frameworks = [
        framework
        for prefix, framework in FRAMEWORK_OF_MODULE
        if any(module.startswith(f"{prefix}.") for module in modules)
    ]
    return list(dict.fromkeys(used_frameworks))

"""The flags of a script's own argument parser, as JSON objects: argparse, click and Hydra."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MAX_TEXT_CHARACTERS = 200
"""Chosen, not measured: the most characters kept of a text."""
MAX_ITEMS = 200
"""Chosen, not measured: the most items kept of a list."""
MAX_CHOICES = 100
"""Choices listed for a flag; `choices=range(...)` may have millions."""
CLICK_TYPES = {"integer": "int", "float": "float", "boolean": "bool"}
"""Types of click's parameters by the first word of their names; all others are read as text."""


def argparse_flags(parsers: Iterable[argparse.ArgumentParser], namespace: Any) -> list[dict[str, Any]]:
    """The options of a parser and of the subcommands' parsers that ran in it, with their values in `namespace`."""
    return [_of_action(action, namespace) for parser in parsers for action in parser._actions if _is_option(action)]


def click_flags(command: Any, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The options of a `click.Command`, with the values of its context."""
    return [
        {
            "names": [*parameter.opts, *parameter.secondary_opts],
            "type": _click_type(parameter),
            "default": plain(parameter.default),
            "value": plain(values.get(parameter.name)),
            "choices": _choices(getattr(parameter.type, "choices", ())),
            "off": next((name for name in parameter.secondary_opts if name.startswith("--")), None),
            "help": _text(getattr(parameter, "help", None)),
        }
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.name != "help"
    ]


def config_flags(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The leaves of a Hydra configuration by their dotted names, as the command line overrides them."""
    return [
        {"names": [name], "type": _type_of(value), "default": plain(value), "value": plain(value), "assigned": True}
        for name, value in _leaves(config, "")
    ]


def configurator_flags(names: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The globals that nanoGPT's `configurator.py` takes from the command line, listed in `config_keys`; else empty."""
    keys = names.get("config_keys")
    values = {f"--{key}": names.get(key) for key in keys} if isinstance(keys, list) else {}
    return [
        {"names": [flag], "type": _type_of(value), "default": plain(value), "value": plain(value), "assigned": True}
        for flag, value in values.items()
    ]


def plain(value: Any) -> Any:
    """Return a JSON value: plain values unchanged, None for a missing-value placeholder, str(value) for others."""
    if value is None or isinstance(value, (bool, int, str)):
        return _cut(value) if isinstance(value, str) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value[:MAX_ITEMS]]
    if callable(value) or type(value).__name__ == "Sentinel" or value is argparse.SUPPRESS:
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


def _click_type(option: Any) -> str:
    if option.is_flag:
        return "switch"
    if option.multiple or option.nargs != 1:
        return "list"
    return CLICK_TYPES.get(option.type.name.partition(" ")[0], "str")


def _type_of(value: Any) -> str:
    for kind in (bool, int, float, list):
        if isinstance(value, kind):
            return kind.__name__
    return "str"


def _leaves(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(help: Any) -> str:
    return _cut(help) if isinstance(help, str) and help is not argparse.SUPPRESS else ""


def _cut(text: str) -> str:
    """The text's beginning; bytes of a file's name that are not UTF-8 (lone surrogates) become question marks."""
    return text[:MAX_TEXT_CHARACTERS].encode(errors="replace").decode()

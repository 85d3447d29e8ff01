"""`presets new NAME -- COMMAND`: find a script's flags, map knobs to them, and write a preset."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from trainfast_runner.records.discovered import Discovered, Flag
from trainfast_runner.running.scripts.discovered_preset import preset_of
from trainfast_runner.running.scripts.discovery import discover
from trainfast_runner.settings.saving import new_preset_path
from trainfast_runner.settings.scripts.saving_script import save_script_preset
from trainfast_runner.settings.scripts.script_mapping import FlagMapping
from trainfast_runner.settings.scripts.script_preset import flag_tokens
from trainfast_runner.settings.scripts.script_reach import ways_without_flag
from trainfast_runner.settings.scripts.typed_mapping import flag_mappings
from trainfast_runner.settings.typed_settings import setting_of
from trainfast_runner.units import counted
from trainfast_tui.cli.printing.output import print_json, print_line, print_lines, print_notice
from trainfast_tui.cli.printing.progress import progress_when_slow
from trainfast_tui.text.discovery_words import default_words, discovery_words, warning_words
from trainfast_tui.text.tables import pair_lines, table

FEW_FLAGS = 20
"""Up to this many flags are all listed; of a Trainer's 150 only those that a knob takes."""


def presets_new_of_script(arguments: argparse.Namespace) -> int:
    """Discover the flags, write the preset, and print both."""
    new_preset_path(arguments.name, overwrite=arguments.overwrite)
    with progress_when_slow("running the script up to its argument parser…"):
        discovered = discover(
            arguments.script, arguments.python, on_start=lambda command: print_notice(warning_words(command))
        )
    mapping = flag_mappings(discovered.flags, arguments.mapping)
    preset = preset_of(
        arguments.script, discovered, mapping, name=arguments.name, cwd=os.getcwd(), python=arguments.python
    )
    preset = replace(preset, knobs=preset.knobs | dict(setting_of(setting) for setting in arguments.settings))
    path = save_script_preset(
        preset, {flag_mapping.knob: flag_mapping.reason for flag_mapping in mapping}, overwrite=arguments.overwrite
    )
    ways = ways_without_flag(preset.framework, preset.flag_words)
    if arguments.json:
        print_json(
            {
                "name": preset.name,
                "path": str(path),
                **msgspec.to_builtins(discovered),
                "framework": discovered.framework,
                "mapping": [
                    {
                        "knob": flag_mapping.knob,
                        "flag": flag_mapping.flag_words,
                        "value": flag_mapping.value,
                        "reason": flag_mapping.reason,
                    }
                    for flag_mapping in mapping
                ],
                "without_flag": ways,
            }
        )
        return 0
    print_lines(_flag_lines(discovered, mapping, arguments.all))
    print_lines(pair_lines((f"  {flag_mapping.knob}", flag_mapping.reason) for flag_mapping in mapping))
    for way, knobs in ways.items():
        print_line(f"without a flag, through {way}: {', '.join(knobs)}")
    print_line(str(path), f"run it with: trainfast-tui run {arguments.name}")
    return 0


def _flag_lines(discovered: Discovered, mapping: list[FlagMapping], shows_all: bool) -> Iterator[str]:
    """Yield where the script was stopped and a table of its flags, those of knobs first.

    Of a long list the flags of no knob are left out, unless `shows_all`.
    """
    yield discovery_words(discovered)
    words = {word for flag_mapping in mapping for word in flag_tokens(flag_mapping.flag_words)}
    flags = sorted(discovered.flags, key=lambda flag: words.isdisjoint(flag.names))
    hidden = [] if shows_all or len(flags) <= FEW_FLAGS else [flag for flag in flags if words.isdisjoint(flag.names)]
    shown_flags = flags[: len(flags) - len(hidden)]
    if shown_flags:
        yield from table(["  FLAG", "TYPE", "DEFAULT"], [_cells(flag) for flag in shown_flags])
    if hidden:
        yield f"  and {counted(len(hidden), 'flag')} without a knob; --all lists them"


def _cells(flag: Flag) -> list[str]:
    return [f"  {', '.join(flag.names)}", flag.type, default_words(flag)]

"""`presets new NAME -- COMMAND`: the flags of a script, the knobs that they seem to take, and a preset of both."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator

import msgspec

from trainfast_runner.records.discovered import Discovered, Flag
from trainfast_runner.running.scripts.discovery import discover
from trainfast_runner.running.scripts.knob_places import ways_without_flag
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knobs import setting_of
from trainfast_runner.settings.saving import new_preset_path
from trainfast_runner.settings.saving_script import save_script_preset
from trainfast_runner.settings.script_mapping import BASE, Proposal, knobs_of_fields, mapping_of
from trainfast_runner.settings.script_preset import Place, ScriptPreset
from trainfast_tui.cli.output import print_json, print_line, print_lines
from trainfast_tui.cli.progress import progress_when_slow
from trainfast_tui.text.format import count, plain
from trainfast_tui.text.tables import pairs, table

FEW_FLAGS = 20
"""So many flags are all listed; of a Trainer's 150 only those that a knob takes."""


def run(arguments: argparse.Namespace) -> int:
    """Discover the flags, write the preset, and print both."""
    new_preset_path(arguments.name, arguments.overwrite)
    with progress_when_slow("running the script to its arguments…"):
        found = discover(arguments.script, arguments.python)
    mapping = mapping_of(found.flags, arguments.mapping)
    preset = ScriptPreset(
        command=tuple(arguments.script),
        places={one.knob: one.place for one in mapping},
        knobs=_knobs(found, mapping, arguments.settings),
        name=arguments.name,
        title=shlex.join(arguments.script),
        cwd=os.getcwd(),
        framework=found.framework or "",
    )
    path = save_script_preset(preset, {one.knob: one.reason for one in mapping}, arguments.overwrite)
    ways = ways_without_flag(found, preset.places)
    if arguments.json:
        print_json(
            {
                "name": preset.name,
                "path": str(path),
                **msgspec.to_builtins(found),
                "framework": found.framework,
                "mapping": [
                    {"knob": one.knob, "flag": one.place, "value": one.value, "reason": one.reason} for one in mapping
                ],
                "without_flag": ways,
            }
        )
        return 0
    print_lines(_flag_lines(found, mapping, arguments.all))
    print_lines(pairs((f"  {one.knob}", plain(one.reason)) for one in mapping))
    for way, knobs in ways.items():
        print_line(f"without a flag, through {way}: {', '.join(knobs)}")
    print_line(f"{path}\nrun it with: trainfast-tui run {arguments.name}")
    return 0


def _knobs(found: Discovered, mapping: list[Proposal], settings: list[str]) -> KnobValues:
    """The knobs of the preset: the values that the script runs with now, and every `--set`."""
    knobs = knobs_of_fields(found.fields)
    knobs |= {one.knob: one.value for one in mapping if one.knob in BASE and one.value is not None}
    return knobs | dict(setting_of(setting) for setting in settings)


def _flag_lines(found: Discovered, mapping: list[Proposal], whole: bool) -> Iterator[str]:
    """Return where the script was stopped and a table of its flags, those of knobs first; the `whole` list if asked."""
    kind = f"{found.parser}, " if found.parser else ""
    yield f"stopped at {found.stopped_at}: {kind}{count(len(found.flags))} flags"
    words = {word for one in mapping for word in _names(one.place)}
    flags = sorted(found.flags, key=lambda flag: words.isdisjoint(flag.names))
    rest = [] if whole or len(flags) <= FEW_FLAGS else [flag for flag in flags if words.isdisjoint(flag.names)]
    shown = flags[: len(flags) - len(rest)]
    if shown:
        yield from table(["  FLAG", "TYPE", "DEFAULT"], [_cells(flag) for flag in shown])
    if rest:
        yield f"  and {count(len(rest))} flags that no knob takes; --all lists them"


def _names(place: Place) -> set[str]:
    """Return the flags in a knob's words."""
    texts = [place] if isinstance(place, str) else place.values()
    return {word.partition("=")[0] for text in texts for word in text.split()}


def _cells(flag: Flag) -> list[str]:
    default = "" if flag.default is None else str(flag.default)
    return [f"  {plain(', '.join(flag.names))}", flag.type, plain(default)]

"""`presets new NAME -- COMMAND`: the flags of a script, the knobs that they seem to take, and a preset of both."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator

import msgspec

from trainfast_runner.records.discovered import Discovered
from trainfast_runner.running.scripts.discovery import discover
from trainfast_runner.running.scripts.knob_places import ways_without_flag
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knobs import setting_of
from trainfast_runner.settings.saving import new_preset_path
from trainfast_runner.settings.saving_script import save_script_preset
from trainfast_runner.settings.script_mapping import BASE, Proposal, knobs_of_fields, mapping_of
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_tui.cli.output import print_json, print_line, print_lines
from trainfast_tui.cli.progress import progress_when_slow
from trainfast_tui.text.format import count, plain
from trainfast_tui.text.tables import pairs, table


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
    )
    path = save_script_preset(preset, {one.knob: one.reason for one in mapping}, arguments.overwrite)
    ways = ways_without_flag(found, preset.places)
    if arguments.json:
        print_json(
            {
                "name": preset.name,
                "path": str(path),
                **msgspec.to_builtins(found),
                "mapping": [
                    {"knob": one.knob, "flag": one.place, "value": one.value, "reason": one.reason} for one in mapping
                ],
                "without_flag": ways,
            }
        )
        return 0
    print_lines(_flag_lines(found))
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


def _flag_lines(found: Discovered) -> Iterator[str]:
    """Return a table of the flags, and where the script was stopped."""
    kind = f"{found.parser}, " if found.parser else ""
    yield f"stopped at {found.stopped_at}: {kind}{count(len(found.flags))} flags"
    rows = [
        [f"  {plain(', '.join(flag.names))}", flag.type, plain("" if flag.default is None else str(flag.default))]
        for flag in found.flags
    ]
    if rows:
        yield from table(["  FLAG", "TYPE", "DEFAULT"], rows)

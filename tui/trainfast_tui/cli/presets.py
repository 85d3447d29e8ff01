"""`presets` and `knobs`: list, make and show presets, and show the knobs they set."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import detect_machine
from trainfast_runner.machine.training_python import find_python
from trainfast_runner.machine.warm_python import torch_build
from trainfast_runner.records.run_file import SCHEMA, Discovered
from trainfast_runner.running.discovery import discover, preset_of
from trainfast_runner.search.advice import Advice, advise, gather, model_advice
from trainfast_runner.settings import presets, script_preset
from trainfast_runner.settings.knob_values import Knob
from trainfast_runner.settings.knobs import KNOBS, KNOBS_BY_NAME, knob, setting_of
from trainfast_runner.settings.presets import PLAIN_PRESET, Preset, Variant
from trainfast_runner.settings.saving import new_preset_path, save_preset, save_script_preset
from trainfast_runner.settings.script_preset import FlagMapping, flag_mappings, flag_tokens
from trainfast_runner.settings.script_reach import ways_without_flag
from trainfast_runner.settings.spec import RunSpec, from_preset, resolve
from trainfast_runner.units import counted
from trainfast_tui.cli.arguments import add_repeated, add_settings
from trainfast_tui.cli.printing import print_json, print_line, print_lines, print_notice, print_table
from trainfast_tui.cli.progress import progress_when_slow
from trainfast_tui.text.format import FigureHeading, pair_lines, table
from trainfast_tui.text.next_run_words import default_words, discovery_words, field_text, typed_overrides, warning_words


def presets_list_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print {presets[...]}")


def presets_list(arguments: argparse.Namespace) -> int:
    """Print the presets by name."""
    rows = [_row(name, path) for name, path in sorted(presets.preset_files().items())]
    if arguments.json:
        print_json({"schema": SCHEMA, "presets": rows})
        return 0
    cells = []
    for row in rows:
        title = f"broken: {row['error']}" if row["error"] else row["title"]
        cells.append((row["name"], "shipped" if row["shipped"] else "yours", str(row["variants"] or ""), title))
    print_table(("PRESET", "FROM", FigureHeading("VARIANTS"), "TITLE"), cells)
    return 0


def _row(name: str, path: Path) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": name,
        "title": None,
        "shipped": path.parent == presets.shipped_directory(),
        "variants": 0,
        "path": str(path),
        "error": None,
    }
    try:
        if script_preset.path_of(name) is not None:
            return {**row, "title": script_preset.load(path).title or name}
        preset, _ = presets.load(name)
    except UserError as error:
        return {**row, "error": error.line()}
    return {**row, "title": preset.title, "variants": len(preset.variants)}


def presets_new_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Make a preset of your own from another one, whole. With a command after -- of a script of your"
        " own: the script is run to its argument parser and no further (argparse, HfArgumentParser, click, Hydra), its"
        " flags are listed, and the preset maps knobs to them."
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        help="name of the preset and of its file; add -- COMMAND to make it from a script's flags",
    )
    parser.add_argument("--from", metavar="PRESET", dest="source", help=f"the preset to start from ({PLAIN_PRESET})")
    add_settings(parser)
    words = "the flag of the script that takes a knob, such as 'batch_size=--bs'; empty for none; may be given again"
    add_repeated(parser, "--map", "KNOB=FLAG", words, dest="mapping")
    parser.add_argument("--python", metavar="PATH", help="run the script with this Python")
    parser.add_argument("--all", action="store_true", help="list every flag of the script, not only those of knobs")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a preset of yours of that name, or hide a shipped one"
    )
    parser.add_argument(
        "--json", action="store_true", help="print {name, path}; for a script also its flags and mapping"
    )


def presets_new(arguments: argparse.Namespace) -> int:
    """Write the file and print its path."""
    if arguments.script is not None:
        if arguments.source is not None:
            raise UserError("--from is for a preset without a command after --", key="--from")
        return presets_new_of_script(arguments)
    for option, name in (("mapping", "--map"), ("python", "--python"), ("all", "--all")):
        if getattr(arguments, option):
            raise UserError(f"{name} is for a command after --", key=name)
    source = arguments.source or PLAIN_PRESET
    spec = resolve(source, arguments.settings)
    path = save_preset(arguments.name, spec, overwrite=arguments.overwrite, source=source)
    if arguments.json:
        print_json({"name": arguments.name, "path": str(path)})
    else:
        print_line(str(path), f"run it with: trainfast-tui run {arguments.name}")
    return 0


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
                    {"knob": one.knob, "flag": one.flag_words, "value": one.value, "reason": one.reason}
                    for one in mapping
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
        rows = [[f"  {', '.join(flag.names)}", flag.type, default_words(flag)] for flag in shown_flags]
        yield from table(["  FLAG", "TYPE", "DEFAULT"], rows)
    if hidden:
        yield f"  and {counted(len(hidden), 'flag')} without a knob; --all lists them"


def presets_show_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("preset", metavar="PRESET", help="a name, NAME/VARIANT, or a path ending in .toml")
    parser.add_argument("--json", action="store_true", help="print it as one JSON object")


def presets_show(arguments: argparse.Namespace) -> int:
    """Print model, data, knobs and variants; for a script preset its command and the flags of its knobs."""
    if (script := script_preset.path_of(arguments.preset)) is not None:
        _print_script(script, arguments.json)
        return 0
    preset, variant = presets.load(arguments.preset)
    spec = from_preset(preset, variant)
    advice = _advice(spec)
    if arguments.json:
        print_json(
            {
                "name": spec.name,
                "title": preset.title,
                "shipped": preset.shipped,
                "files": [str(path) for path in preset.files],
                "model": spec.model,
                "data": spec.data,
                "knobs": spec.knobs,
                "baseline": preset.baseline,
                "variants": preset.variants,
                "advice": advice,
            }
        )
    else:
        _print_preset(preset, variant, spec, advice)
    return 0


def _print_preset(preset: Preset, variant: Variant | None, spec: RunSpec, advice: list[Advice]) -> None:
    set_by_preset = {**preset.knobs, **(variant.knobs if variant else {})}
    knob_words = [
        (name, KNOBS_BY_NAME[name].text_of(value) + ("" if name in set_by_preset else "  (default)"))
        for name, value in spec.knobs.items()
    ]
    print_line(f"{spec.name}: {preset.title}", *(f"from {path}" for path in preset.files))
    for heading, fields in (("model", spec.model), ("data", spec.data)):
        _print_section(heading, [(key, field_text(value, ", ")) for key, value in fields.items()])
    _print_section("knobs", knob_words)
    if preset.variants and variant is None:
        title = f"variants (run one with: trainfast-tui run {preset.name}/ID)"
        remarks = {preset.baseline: " (baseline)"}
        _print_section(title, [(row.id + remarks.get(row.id, ""), _variant_words(row)) for row in preset.variants])
    _print_section("advice for this machine", [(entry.knob, entry.text) for entry in advice])


def _print_section(heading: str, rows: Iterable[tuple[str, str]]) -> None:
    print_line("", heading)
    print_lines(pair_lines((f"  {label}", words) for label, words in rows))


def _variant_words(row: Variant) -> str:
    """Return a variant's settings as they are typed, and its published figures."""
    fields = {f"model.{name}": value for name, value in row.model.items()}
    fields |= {f"data.{name}": value for name, value in row.data.items()}
    words = " ".join(typed_overrides({**fields, **row.knobs}))
    published = ", ".join(f"{name} {field_text(value, ', ')}" for name, value in row.published.items())
    return f"{words}  (published: {published})" if published else words


def _print_script(path: Path, as_json: bool) -> None:
    preset = script_preset.load(path)
    if as_json:
        script = {"command": preset.command, "cwd": preset.cwd, "knobs": preset.flag_words}
        print_json(
            {"name": preset.name, "title": preset.title, "files": [str(path)], "script": script, "knobs": preset.knobs}
        )
        return
    print_line(f"{preset.name}: {preset.title}", f"from {path}", "", "command", f"  {shlex.join(preset.command)}")
    if preset.cwd:
        print_line(f"in {preset.cwd}")
    flag_words = preset.flag_words.items()
    _print_section("flags of its knobs", [(name, script_preset.flag_words_text(place)) for name, place in flag_words])
    _print_section("knobs", [(name, KNOBS_BY_NAME[name].text_of(value)) for name, value in preset.knobs.items()])


def _advice(spec: RunSpec) -> list[Advice]:
    """Return the advisor's lines on the preset and on the model's shapes."""
    machine = detect_machine(torch_build(find_python(None)))
    situation = gather(spec, machine)
    advice = advise(spec, spec.knobs, machine, situation)
    # Shapes cost nothing on a CPU, but the preset is read for other machines as well.
    shapes = model_advice(situation)
    return [entry for entry in advice if entry.knob != "model"] + ([shapes] if shapes else [])


def knobs_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("knob", metavar="NAME", nargs="?", help="one knob, with its whole help")
    parser.add_argument("--json", action="store_true", help="print {knobs[...]}")


def knobs(arguments: argparse.Namespace) -> int:
    """Print a table of all knobs, or the help of one."""
    entries = KNOBS if arguments.knob is None else (knob(arguments.knob),)
    if arguments.json:
        print_json({"schema": SCHEMA, "knobs": [_fields(entry) for entry in entries]})
    elif arguments.knob is None:
        rows = [(entry.name, entry.group, entry.text_of(entry.default), entry.values.describe()) for entry in entries]
        print_table(("KNOB", "GROUP", "DEFAULT", "TAKES"), rows)
    else:
        _print_help(entries[0])
    return 0


def _print_help(entry: Knob) -> None:
    print_line(f"{entry.name}: {entry.what}")
    rows = [("speed", entry.speed), ("memory", entry.memory), ("training", entry.training)]
    rows += [("takes", entry.values.describe()), ("default", entry.text_of(entry.default))]
    rows += [("only with", f"{entry.obeyed_by} {', '.join(entry.only_with)}")] if entry.only_with else []
    rows += [(tool.replace("_", "-"), name) for tool, name in asdict(entry.same_as).items()]
    print_lines(pair_lines((f"  {label}", text) for label, text in rows if text))


JSON_FIELDS = ("name", "group", "default", "takes", "what", "speed", "memory", "training", "only_with", "same_as")


def _fields(entry: Knob) -> dict[str, Any]:
    return {name: entry.values.describe() if name == "takes" else getattr(entry, name) for name in JSON_FIELDS}

"""`presets show`: print a preset, merged with those it extends, and the published figures of its variants."""

from __future__ import annotations

import argparse
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

from trainfast_runner.machine.devices import detect_machine
from trainfast_runner.machine.training_python import find_python, torch_build
from trainfast_runner.records.home import Home
from trainfast_runner.search.advice.advisor import advise, model_advice
from trainfast_runner.search.advice.facts import Advice
from trainfast_runner.search.advice.gather_situation import gather
from trainfast_runner.settings import presets
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.presets import Preset, Variant
from trainfast_runner.settings.scripts import script_preset
from trainfast_runner.settings.spec import RunSpec, from_preset
from trainfast_tui.cli.printing.output import print_json, print_line, print_lines, terminal_width
from trainfast_tui.text.overrides import field_text, typed_overrides
from trainfast_tui.text.tables import figure_headings, pair_lines, table


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
    print_line(f"{spec.name}: {preset.title}")
    for path in preset.files:
        print_line(f"from {path}")
    for heading, fields in (("model", spec.model), ("data", spec.data)):
        print_line("", heading)
        print_lines(pair_lines((f"  {key}", field_text(value, ", ")) for key, value in fields.items()))
    print_line("", "knobs")
    print_lines(pair_lines(_knob_rows(spec.knobs, {**preset.knobs, **(variant.knobs if variant else {})})))
    if preset.variants and variant is None:
        print_line("", f"variants (run one with: trainfast-tui run {preset.name}/ID)")
        print_lines(_variant_lines(preset, terminal_width()))
    print_line("", "advice for this machine")
    print_lines(pair_lines((f"  {entry.knob}", entry.text) for entry in advice))


def _print_script(path: Path, as_json: bool) -> None:
    preset = script_preset.load(path)
    if as_json:
        script = {"command": preset.command, "cwd": preset.cwd, "knobs": preset.flag_words}
        print_json(
            {"name": preset.name, "title": preset.title, "files": [str(path)], "script": script, "knobs": preset.knobs}
        )
        return
    print_line(f"{preset.name}: {preset.title}", f"from {path}")
    folder_line = [f"in {preset.cwd}"] if preset.cwd else []
    print_line("", "command", f"  {shlex.join(preset.command)}", *folder_line)
    print_line("", "flags of its knobs")
    print_lines(
        pair_lines((f"  {name}", script_preset.flag_words_text(place)) for name, place in preset.flag_words.items())
    )
    print_line("", "knobs")
    print_lines(pair_lines((f"  {name}", KNOBS_BY_NAME[name].text_of(value)) for name, value in preset.knobs.items()))


def _advice(spec: RunSpec) -> list[Advice]:
    """Return the advisor's lines on the preset and on the model's shapes."""
    machine = detect_machine(torch_build(find_python(None)))
    situation = gather(spec, machine, Home())
    advice = advise(spec, spec.knobs, machine, situation)
    # Shapes cost nothing on a CPU, but the preset is read for other machines as well.
    shapes = model_advice(situation)
    return [entry for entry in advice if entry.knob != "model"] + ([shapes] if shapes else [])


def _knob_rows(knobs: KnobValues, set_by_preset: KnobValues) -> Iterator[tuple[str, str]]:
    """Yield each knob with its value, marked as a default unless the preset sets it."""
    for name, value in knobs.items():
        yield f"  {name}", KNOBS_BY_NAME[name].text_of(value) + ("" if name in set_by_preset else "  (default)")


def _variant_lines(preset: Preset, width: int | None) -> list[str]:
    """Return a table of the variants, figures and knobs; if it is wider than `width`, knobs go on their own lines."""
    published = list(dict.fromkeys(key for row in preset.variants for key in row.published))
    header = ("  ID", *figure_headings(*(f"published {key}" for key in published)), "KNOBS")
    rows = [
        [
            f"  {row.id}" + (" (baseline)" if row.id == preset.baseline else ""),
            *(field_text(row.published.get(key, ""), ", ") for key in published),
        ]
        for row in preset.variants
    ]
    knobs = [_settings(row) for row in preset.variants]
    wide_lines = table(header, [[*row, settings] for row, settings in zip(rows, knobs, strict=True)])
    if width is None or max(map(len, wide_lines)) <= width:
        return wide_lines
    narrow = table((header[0], *figure_headings(*published)), rows)
    lines = [f"  published: {', '.join(published)}"] if published else []
    for line, settings in zip(narrow, ["", *knobs], strict=True):
        lines += [line, *textwrap.wrap(settings, width, initial_indent=" " * 6, subsequent_indent=" " * 6)]
    return lines


def _settings(row: Variant) -> str:
    """Return a variant's settings as they are typed."""
    fields = {f"model.{name}": value for name, value in row.model.items()}
    fields |= {f"data.{name}": value for name, value in row.data.items()}
    return " ".join(typed_overrides({**fields, **row.knobs}))

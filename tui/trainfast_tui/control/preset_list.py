"""Every preset and variant that can be chosen, with its title."""

from __future__ import annotations

from trainfast_runner.errors import UserError
from trainfast_runner.settings import presets


def choices() -> list[tuple[str, str]]:
    """(name, title) of each preset, its variants below it; a broken preset says what is wrong with it."""
    found: list[tuple[str, str]] = []
    for name in presets.names():
        try:
            preset, _ = presets.load(name)
        except UserError as problem:
            found.append((name, f"cannot be used: {problem.line()}"))
            continue
        found.append((name, preset.title))
        for variant in preset.variants:
            knobs = ", ".join(f"{knob}={value}" for knob, value in variant.knobs.items())
            found.append((f"{name}/{variant.id}", knobs or "as the preset"))
    return found

"""An export as its form writes it: the text, its file, and the comment lines at its head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainfast_runner.records.run_file import RunFile


@dataclass(frozen=True)
class Written:
    """The text of a form; `-o` writes it as `file`, and the texts in `beside` under their names."""

    text: str
    left_out: list[str]
    """Overridden knobs that the form cannot express."""
    file: str
    beside: dict[str, str] = field(default_factory=dict)


def heading(run: RunFile, packages: Sequence[str], left_out: Sequence[str]) -> list[str]:
    """Comment lines: the run, the versions of these packages that it ran with, and the settings left out."""
    versions = ", ".join(f"{name} {version}" for name in packages if (version := run.versions.get(name)))
    lines = [f"# The settings of {run.run_id} ({run.preset}){f', with {versions}' if versions else ''}."]
    return [*lines, f"# Cannot be expressed in this format: {', '.join(left_out)}."] if left_out else lines

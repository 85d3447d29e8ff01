"""The hooks in a user's own script load in any Python from 3.8."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

RUNNER = Path(__file__).parents[2] / "runner" / "trainfast_runner"
HOOKS = [*(RUNNER / "door" / "trainfast_door").glob("*.py"), RUNNER / "worker" / "shared" / "process.py"]


@pytest.mark.parametrize("path", sorted(HOOKS), ids=lambda path: path.name)
def test_a_module_of_the_hooks_has_the_syntax_of_python_3_8(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 8))
    assert "from __future__ import annotations" in source, "X | Y in an annotation is evaluated without it"

"""The catalog names only what exists, and works under both names that the worker's folder is loaded by."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from trainfast_runner.memory.sharding import MEMORY_RULES
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.worker import catalog
from trainfast_runner.worker.catalog import (
    ENGINES,
    OPTIMIZERS,
    PARAMETER_FORMS,
    STRATEGIES,
    nearest_optimizer,
    nearest_strategy,
)

CATALOG = Path(catalog.__file__).parent
WORKER = CATALOG.parent


@pytest.mark.parametrize(("folder", "entries"), [("strategies", STRATEGIES), ("engines", ENGINES)])
def test_every_class_stands_in_its_file(folder: str, entries: dict[str, object]) -> None:
    for name, entry in entries.items():
        module, _, wanted = entry.path.partition(":")  # type: ignore[attr-defined]
        tree = ast.parse((WORKER / folder / f"{module}.py").read_text())
        assert wanted in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}, name


def test_entries_name_what_exists() -> None:
    for strategy in STRATEGIES.values():
        assert strategy.fallback in STRATEGIES
        assert strategy.memory_rule in {*MEMORY_RULES, "Staged", None}
        assert set(strategy.axes) <= {"dp", "tp", "pp", "mp"}
        assert set(strategy.shards) <= {"weights", "gradients", "states"}
        assert strategy.parameter_form in PARAMETER_FORMS
        assert set(strategy.knobs) <= set(KNOBS_BY_NAME)
    for optimizer in OPTIMIZERS.values():
        assert optimizer.fallback in OPTIMIZERS
        assert {given for given, _ in optimizer.refuses} <= set(PARAMETER_FORMS)
    for engine in ENGINES.values():
        assert engine.fallback in ENGINES
        assert set(engine.strategies) <= set(STRATEGIES)


def test_the_way_out_of_a_refusal_is_one() -> None:
    for strategy in STRATEGIES.values():
        assert STRATEGIES[nearest_strategy(strategy, lambda entry: entry.compiles)].compiles
        for optimizer in OPTIMIZERS.values():
            assert OPTIMIZERS[nearest_optimizer(optimizer, strategy)].refusal(strategy) is None


def test_it_loads_by_path_as_the_worker_does_with_the_standard_library_alone() -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import bootstrap; from trainfast_worker import catalog;"
        "print(len(catalog.STRATEGIES), sorted({m.partition('.')[0] for m in sys.modules} - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program, WORKER], capture_output=True, text=True, check=True)
    count, _, others = done.stdout.partition(" ")
    assert int(count) == len(STRATEGIES)
    assert "torch" not in others
    assert "msgspec" not in others
    for file in CATALOG.glob("*.py"):
        imports = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom)]
        others = {str(node.module).partition(".")[0] for node in imports} - sys.stdlib_module_names
        assert others <= {"strategies", "optimizers", "engines"}
    body = ast.parse((WORKER / "__init__.py").read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr), "worker/__init__.py is a docstring"

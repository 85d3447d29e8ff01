"""The catalog names only what exists, and each half of the product loads only what it needs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from trainfast_runner.memory.sharding import MEMORY_RULES
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.worker import catalog
from trainfast_runner.worker.catalog import ENGINES, OPTIMIZERS, PARAMETER_FORMS, STRATEGIES, nearest_strategy

CATALOG = Path(catalog.__file__).parent
WORKER = CATALOG.parent


@pytest.mark.parametrize(("folder", "entries"), [("strategies", STRATEGIES), ("engines", ENGINES)])
def test_every_class_stands_in_its_file(folder, entries):
    for name, entry in entries.items():
        module, _, wanted = entry.path.partition(":")  # type: ignore[attr-defined]
        tree = ast.parse((WORKER / folder / f"{module}.py").read_text())
        assert wanted in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}, name


def test_entries_name_what_exists_and_the_way_out_of_a_refusal_is_one():
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
    for strategy in STRATEGIES.values():
        assert STRATEGIES[nearest_strategy(strategy, lambda entry: entry.compiles)].compiles
        for optimizer in OPTIMIZERS.values():
            assert OPTIMIZERS[catalog.nearest_optimizer(optimizer, strategy)].refusal(strategy) is None


def test_it_loads_by_path_as_the_worker_does_with_the_standard_library_alone():
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
        assert others <= {"strategies", "optimizers", "levers"}
    body = ast.parse((WORKER / "__init__.py").read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr), "worker/__init__.py is a docstring"


STACK = {"torch", "transformers", "accelerate", "deepspeed", "bitsandbytes", "numpy"}


def loaded(statement):
    """The top-level modules a fresh interpreter has after `statement`."""
    program = f"{statement}; import sys; print(' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


HEADLESS = ["running.launch", "running.supervisor", "settings.presets", "running.follower", "running.history"]
HEADLESS += ["machine.telemetry.sampler"]
SCREEN = {"textual", "rich", "trainfast_tui"}


@pytest.mark.parametrize(
    ("module", "unneeded"),
    [
        *((f"trainfast_runner.{name}", {*SCREEN, *STACK}) for name in HEADLESS),
        ("trainfast_runner.worker.main", STACK),
        ("trainfast_tui.app", STACK),
        ("trainfast_tui.screens.best", STACK),
        ("trainfast_tui.session", {"textual"}),
        ("trainfast_tui.cli", {"textual", "rich", "msgspec", "psutil", "pynvml", "tomlkit", *STACK}),
    ],
)
def test_each_half_loads_only_what_it_needs(module, unneeded):
    assert not loaded(f"import {module}") & unneeded

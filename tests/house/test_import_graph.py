"""No module imports itself through others: the graph is drawn from the source, with imports for type checkers and
imports inside functions."""

import ast
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"trainfast_runner": ROOT / "runner" / "trainfast_runner", "trainfast_tui": ROOT / "tui" / "trainfast_tui"}


def modules(package):
    """The files of a package by the names that they are imported by."""
    folder = PACKAGES[package]
    parts = {path: path.relative_to(folder).with_suffix("").parts for path in folder.rglob("*.py")}
    return {".".join((package, *names)).removesuffix(".__init__"): path for path, names in parts.items()}


def imported(module, path, known):
    """The modules among the known ones that a file imports anywhere."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                name = f"{source}.{alias.name}"
                if name in known or source in known:
                    yield name if name in known else source


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_through_others(package):
    known = modules(package)
    graph = {name: set(imported(name, path, known)) for name, path in known.items()}
    assert sum(map(len, graph.values())) > len(graph), "the imports are found"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(reversed(error.args[1]))}")

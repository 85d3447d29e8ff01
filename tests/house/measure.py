"""`make house`: the size and the shape of this repository beside its budgets, a line for each figure.

Lines are all lines of the Python files. An import edge is one module that imports another one of ours, anywhere in the
file, for type checkers too. Fails if a figure is over its budget.
"""

import ast
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from test_import_graph import PACKAGES, ROOT, imported, modules

ROOMS: dict[str, tuple[int, int]] = {
    "runner/trainfast_runner/search": (20, 6_000),
    "runner/trainfast_runner/running": (16, 3_600),
    "runner/trainfast_runner/export": (5, 800),
    "runner/trainfast_runner/results": (10, 2_900),
    "runner/trainfast_runner/memory": (10, 2_600),
    "runner/trainfast_runner/settings": (14, 3_000),
    "runner/trainfast_runner/machine": (18, 3_900),
    "runner/trainfast_runner/records": (10, 2_400),
    "runner/trainfast_runner/worker": (62, 8_000),
    "runner/trainfast_runner/door": (14, 1_900),
    "tui/trainfast_tui": (90, 16_500),
}
"""Files and lines that each room may have, by its folder."""
PRODUCT = (300, 54_000 + 2_200 + 2_500)
"""Files and lines: of one machine, what several add (2,200), and the levers (2,500)."""
LINES = {"tests": 31_000, "benchmarks": 3_300}
DOCUMENTATION_BYTES = 66_000
EDGES = 2_200
SMALL_LINES = 60
"""Below it, a file with one importer is a private half of that importer."""
CLOSURES = {"trainfast_runner.running.supervisor": 95}
"""The most modules of ours that importing this one may load."""
SHOWN_CLOSURES = ("trainfast_tui.app", "trainfast_tui.screens.monitor", "trainfast_runner.worker.main")
READER, CHARTS, CELLS = "trainfast_tui.live.reader", "trainfast_tui.charts.chart_column", "trainfast_tui.terminal.cells"
BETWEEN = ("trainfast_tui.app", "trainfast_tui.session", "trainfast_tui.screens.main")
CARRIERS = 14
"""The most modules of the screen that a snapshot passes from the reader to a chart's cell."""


def main() -> int:
    """Print the figures; return 1 if one is over its budget."""
    product = [path for folder in PACKAGES.values() for path in python_files(folder)]
    lines = {path: len(path.read_text().splitlines()) for path in product}
    over = 0
    for room, budget in ROOMS.items():
        files = [path for path in product if path.is_relative_to(ROOT / room)]
        over += row(room.rpartition("/")[2], len(files), budget[0], "files")
        over += row("", sum(lines[path] for path in files), budget[1], "lines")
    over += row("product", len(product), PRODUCT[0], "files")
    over += row("", sum(lines.values()), PRODUCT[1], "lines")
    for folder, budget in LINES.items():
        over += row(
            folder, sum(len(path.read_text().splitlines()) for path in python_files(ROOT / folder)), budget, "lines"
        )
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    over += row("documentation", sum(path.stat().st_size for path in pages), DOCUMENTATION_BYTES, "bytes")
    row("comments and docstrings", round(100 * words_share(product)), None, "% of lines")
    graph = edges()
    over += row("import edges", sum(map(len, graph.values())), EDGES, "")
    importers = Counter(target for targets in graph.values() for target in targets)
    paths = {name: path for package in PACKAGES for name, path in modules(package).items()}
    halves = [
        name
        for name, path in paths.items()
        if path.name not in ("__init__.py", "__main__.py") and lines[path] < SMALL_LINES and importers[name] == 1
    ]
    over += row(f"files under {SMALL_LINES} lines with one importer", len(halves), 0, "")
    print("".join(f"    {name}\n" for name in halves), end="")
    for name, budget in {**CLOSURES, **dict.fromkeys(SHOWN_CLOSURES)}.items():
        over += row(f"modules that {name} loads", loaded(name), budget, "")
    way = carriers(graph)
    over += row("modules from the reader to a chart's cell", len(way), CARRIERS, "")
    print("".join(f"    {name}\n" for name in way), end="")
    return int(over > 0)


def row(name: str, figure: int, budget: int | None, unit: str) -> bool:
    """Print one figure beside its budget; True if it is over."""
    is_over = budget is not None and figure > budget
    of = "" if budget is None else f" of {budget:,}"
    print(f"{name:60} {figure:>7,}{of:>11} {unit:10} {'over' if is_over else ''}".rstrip())
    return is_over


def python_files(folder: Path) -> list[Path]:
    """Return the Python files below a folder."""
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def words_share(files: Iterable[Path]) -> float:
    """Return the share of the lines that hold a comment or a docstring."""
    worded = total = 0
    for path in files:
        total += len(path.read_text().splitlines())
        rows: set[int] = set()
        for node in ast.walk(ast.parse(path.read_bytes())):
            match node:
                case ast.Expr(value=ast.Constant(value=str())):
                    rows.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        with tokenize.open(path) as file:
            rows.update(
                token.start[0] for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.COMMENT
            )
        worded += len(rows)
    return worded / total


def edges() -> dict[str, set[str]]:
    """Return the modules of ours that each module imports."""
    known = {name: path for package in PACKAGES for name, path in modules(package).items()}
    return {name: set(imported(name, path, known)) - {name} for name, path in known.items()}


def loaded(name: str) -> int:
    """Return how many modules of ours a fresh interpreter loads with one."""
    count = f"import sys, {name}; print(sum(name.startswith('trainfast_') for name in sys.modules))"
    return int(subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, check=True).stdout)


def carriers(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of the screen that carry a snapshot from the reader to a chart's cell.

    They are all that the reader and the column of charts need of the screen's half, words apart, and the three between.
    """
    known, todo = set(BETWEEN), [READER, CHARTS, CELLS]
    while todo:
        name = todo.pop()
        if name not in known and name.startswith("trainfast_tui") and not name.startswith("trainfast_tui.text"):
            known.add(name)
            todo += graph[name]
    return sorted(known)


if __name__ == "__main__":
    sys.exit(main())

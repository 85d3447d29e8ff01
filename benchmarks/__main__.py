"""Every budget of the tool, measured on this machine and printed as one table: `python -m benchmarks`.

What an attached app costs a training takes minutes of pairs: `python -m benchmarks.attached`. Exits 1 when a budget
is not held.
"""

import os
import platform
import sys

from benchmarks import app, engines, monitor, step_records


def main() -> int:
    """Measure, print, say whether all budgets held."""
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    table = [*app.rows(), *monitor.rows(), *step_records.rows(step_records.measure()), *engines.rows(engines.measure())]
    texts = [row[:3] for row in table]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for what, measured, budget, held in table:
        cells = (what.ljust(widths[0]), measured.ljust(widths[1]), budget.ljust(widths[2]))
        print("  ".join([*cells, "held" if held else "NOT HELD"]))
    return 0 if all(row[3] for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())

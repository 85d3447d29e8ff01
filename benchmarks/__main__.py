"""Measure every budget of the tool on this machine, and print one table: `python -m benchmarks`.

The cost of an attached app to a training has a command of its own, as it takes minutes: `python -m
benchmarks.attached`. Exits 1 when a budget is not held.
"""

import argparse
import os
import platform
import sys

from benchmarks import app, engines, monitor, step_records
from benchmarks.budget import print_table


def main() -> int:
    """Measure and print; return 1 unless all budgets held."""
    argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    table = [*app.rows(), *monitor.rows(), *step_records.rows(step_records.measure()), *engines.rows(engines.measure())]
    return print_table(table)


if __name__ == "__main__":
    sys.exit(main())

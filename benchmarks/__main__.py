"""Measure every budget of the tool on this machine, and print one table: `python -m benchmarks`.

The cost of an attached app to a training has a command of its own, as it takes minutes: `python -m
benchmarks.attached`. Exits 1 when a budget is not held.
"""

import os
import platform
import sys

from benchmarks import app, monitor, sampler_cost, step_records
from benchmarks.meter import options, print_table

if __name__ == "__main__":
    options(__doc__).parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    sys.exit(print_table([*app.rows(), *monitor.rows(), *sampler_cost.rows(), *step_records.rows()]))

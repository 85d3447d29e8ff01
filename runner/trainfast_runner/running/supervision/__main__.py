"""`python -P -m trainfast_runner.running.supervision RUN_DIR`: supervise the run whose `run.json` is there.

The process outlives the screen.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trainfast_runner.running.supervision.supervisor import SupervisorBounds, supervise

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="trainfast_runner.running.supervision", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    supervise(parser.parse_args().run_dir.resolve(), SupervisorBounds())

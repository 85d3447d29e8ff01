"""A live search on a recorded grid's question: its answer beside the grid's best, and its time beside the grid's.

The search keeps `run`'s thread policy, which a grid of one thread a rank does not have. So an answer that the grid
calls slower than its best is run beside that best in fresh processes, A B B A.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.best_fit_record import RECIPES, Recipe
from benchmarks.best_fit_spaces import Recorded, cold_grid_s, regret
from benchmarks.budget import Row, print_table

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.running import launch
from trainfast_runner.running.planning import plan_run
from trainfast_runner.search.candidate_spec import candidate_spec
from trainfast_runner.search.conducting.run_ends import wait_for_result
from trainfast_runner.settings.spec import resolve

COMMAND = [sys.executable, "-m", "trainfast_tui.cli"]
CLOSE = 0.02
RUN_STEPS = 60


def live(grids: Sequence[Recorded], budget: str) -> int:
    """Search each grid's question for real; print the figures; the exit status, 1 when an answer is not held."""
    rows: list[Row] = []
    for grid in grids:
        with tempfile.TemporaryDirectory() as folder:
            rows += _searched(grid, RECIPES[grid.name], Path(folder), budget)
    return print_table(rows)


def _searched(grid: Recorded, recipe: Recipe, home: Path, budget: str) -> list[Row]:
    """The rows of one grid."""
    candidates = grid.space.candidates
    best = max(grid.truth, key=lambda number: grid.truth[number])
    began = time.monotonic()
    answer = _search(grid, recipe, home, budget)
    seconds, whole = time.monotonic() - began, cold_grid_s(grid)
    took = (f"{grid.name}: time, of the cold grid's {whole:.0f} s", f"{seconds:.0f} s", "", True)
    knobs = answer["best"]["knobs"]
    number = next((place for place in grid.truth if candidates[place].knobs == knobs), None)
    if number is not None and regret(grid, number) <= CLOSE:
        off = f"{100 * regret(grid, number):.2f} % off the recorded best"
        return [(f"{grid.name}: live answer", off, "<= 2 %", True), took]
    noise = (answer["within_percent"] or 0.0) / 100
    gap, half = _beside(recipe, knobs, candidates[best].knobs, home)
    off = f"{100 * math.expm1(-gap):+.2f} % beside the recorded best, A B B A, +-{100 * half:.1f} %"
    return [(f"{grid.name}: live answer", off, ">= -2 % or the noise", gap <= max(CLOSE, noise, half)), took]


def _search(grid: Recorded, recipe: Recipe, home: Path, budget: str) -> dict[str, Any]:
    """The answer of `search best --json` to the grid's question. Raises CalledProcessError when it fails."""
    settings = [word for setting in recipe.settings for word in ("--set", setting)]
    vary = [word for name, values in recipe.vary.items() for word in ("--vary", f"{name}={','.join(map(str, values))}")]
    size = grid.space.candidates[grid.space.baseline_number].samples_per_step
    words = ["search", "best", recipe.preset, *settings, *vary, "--global-batch", str(size)]
    done = subprocess.run(
        [*COMMAND, *words, "--budget", budget, "--json"],
        env={**os.environ, "TRAINFAST_HOME": str(home)},
        stdout=subprocess.PIPE,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _beside(recipe: Recipe, answer: Mapping[str, Any], best: Mapping[str, Any], folder: Path) -> tuple[float, float]:
    """The ln rate of the recorded best less the answer's by runs as A B B A, and half of the spread of repeats."""
    spec, home = resolve(recipe.preset, recipe.settings), Home(folder).create()
    rates: dict[bool, list[float]] = {True: [], False: []}
    for is_best in (False, True, True, False):
        candidate = candidate_spec(spec, {**(best if is_best else answer), "steps": RUN_STEPS})
        result = wait_for_result(launch.start(plan_run(candidate), home), lambda: None)
        if result.throughput.samples_per_s.median is None:
            raise UserError(f"{result.run_id}: {result.reason}")
        rates[is_best].append(math.log(result.throughput.samples_per_s.median))
    half = max(abs(candidate - second) for candidate, second in rates.values()) / 2
    return statistics.fmean(rates[True]) - statistics.fmean(rates[False]), half

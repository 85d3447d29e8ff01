"""Judge the best-fit search by replaying it, once a seed, over recorded grids and synthetic spaces.

    python -m benchmarks.best_fit [--seeds 200]

The real decision code runs under a fake clock. Grids are those of `benchmarks/grids`. Synthetic spaces are labelled as
such: they judge the code, not a machine. Exits 1 when a budget is not held.
"""

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from benchmarks.best_fit_replay import FakeConductor, leader_within, question, replay
from benchmarks.best_fit_spaces import COMPILED, LaunchBound, Synthetic, Terrain, cold_grid_s, recorded, regret
from benchmarks.meter import Row, at_most, options, print_table

from trainfast_runner.search.best.decide import BestDecision
from trainfast_runner.search.best_journal import BestStep, ColdRun, ProcessReady

SEEDS = 200
CLOSE, MIN_CLOSE = 0.02, 0.96
MANY = 200
"""From so many settings up the time counts, below that the process starts."""
DECISION_TRIALS, DECISIONS = 60, 9
"""A decision is timed as the median of the last ones of so many trials."""
LAUNCH_BOUND_SEEDS = 20
LAUNCH_BOUND_S, LAUNCH_BOUND_GAIN, MIN_LAUNCH_BOUND = 90.0, 2, 0.95
"""Seconds in which the leader on the simulated GPU is to be so many times as fast, in this share of the seeds."""


def replay_all(name: str, terrain_of: Callable[[int], Terrain], seeds: int, *, in_stages: bool = False) -> list[Row]:
    """Replay a seed each, print the mean times, and return the budgets."""
    terrains = [terrain_of(seed) for seed in range(seeds)]
    replays = [replay(terrain, seed, in_stages=in_stages) for seed, terrain in enumerate(terrains)]
    sizes = [len(terrain.truth) for terrain in terrains]
    shares = [one.leader_s / cold_grid_s(terrain) for one, terrain in zip(replays, terrains, strict=True)]
    # A search that found nothing has lost everything.
    answers = [(terrain, one.answer) for one, terrain in zip(replays, terrains, strict=True)]
    regrets = [1.0 if answer is None else regret(terrain, answer) for terrain, answer in answers]
    leader_s, answer_s = (statistics.fmean(getattr(one, of) for one in replays) for of in ("leader_s", "seconds"))
    means = {role: statistics.fmean(one.cold[role] for one in replays) for role in replays[0].cold}
    runs = ", ".join(f"{role} {mean:.1f}" for role, mean in means.items() if mean)
    print(f"{name}: {min(sizes)} to {max(sizes)} settings that fit, {seeds} seeds, worst {max(regrets):.2%}")
    print(f"  mean: leader after {leader_s:.0f} s, answer after {answer_s:.0f} s; in fresh processes: {runs}")
    close, needed = sum(value <= CLOSE for value in regrets), math.ceil(MIN_CLOSE * seeds)
    rows: list[Row] = [
        (f"{name}: within 2 % of the best", f"{close} of {seeds}", f">= {needed}", close >= needed),
        at_most(f"{name}: p95 regret", 100 * percentile(regrets, 0.95), 2, "%", digits=2),
        at_most(f"{name}: runs in fresh processes, most", max(sum(one.cold.values()) for one in replays), 12, ""),
    ]
    if large := [share for share, size in zip(shares, sizes, strict=True) if size >= MANY]:
        share = 100 * percentile(large, 0.95)
        rows.append(at_most(f"{name}: p95 time of the leader, of the cold grid's", share, 10, "%", digits=1))
    if small := [one.starts for one, size in zip(replays, sizes, strict=True) if size < MANY]:
        rows.append(at_most(f"{name}: p95 process starts of the leader", percentile(small, 0.95), 12, ""))
    return rows


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of all values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def decision_row() -> Row:
    """The budget of a decision towards the end of `DECISION_TRIALS` trials of a large space of one process."""
    terrain = LaunchBound(0)
    count, draw = len(terrain.truth), random.Random(0)
    conductor = FakeConductor(terrain, question(terrain.name, terrain.space), 0)
    times_s = []
    for number in (0, *draw.sample(range(1, count), DECISION_TRIALS - 1)):
        step = BestStep(action="trial", why="drawn", candidate_number=number)
        conductor.trial(BestDecision(step, needs_new_process=number == 0))
        began_s = time.perf_counter()
        conductor.next()
        times_s.append(time.perf_counter() - began_s)
    what = f"decision for {count:,} candidates, {DECISION_TRIALS} trials"
    return at_most(what, 1000 * statistics.median(times_s[-DECISIONS:]), 50, "ms", digits=1)


def launch_bound_rows(seeds: int) -> list[Row]:
    """The budgets of the simulated GPU whose host is too slow: what is found in 90 s, and the price of starts."""
    close = first = 0
    for seed in range(seeds):
        terrain = LaunchBound(seed)
        leader, conductor = leader_within(terrain, seed, LAUNCH_BOUND_S)
        compiled = [
            line.process_knobs["compile"] != "off" for line in conductor.lines if isinstance(line, ProcessReady)
        ]
        close += leader is not None and math.exp(terrain.truth[leader] - terrain.truth[0]) >= LAUNCH_BOUND_GAIN
        first += any(compiled[:3])
    needed = math.ceil(MIN_LAUNCH_BOUND * seeds)
    cold_s, standby_s = (process_starts_s(LaunchBound(0, start_s)) for start_s in (13.0, 3.0))
    share = 100 * standby_s / cold_s
    counts = {f"{LAUNCH_BOUND_GAIN} x in {LAUNCH_BOUND_S:.0f} s": close, "compile among three processes": first}
    return [
        *((f"launch-bound GPU: {of}", f"{n} of {seeds}", f">= {needed}", n >= needed) for of, n in counts.items()),
        at_most("six processes from a standby, of their cold start-up", share, 35, "%"),
    ]


def process_starts_s(terrain: LaunchBound, count: int = 6) -> float:
    """Seconds that the first processes of a search take to start, without compiling."""
    lines = [line for line in replay(terrain, 0).lines if isinstance(line, ProcessReady | ColdRun)][:count]
    compiled = [
        terrain.space.candidates[line.candidate_number].knobs if isinstance(line, ColdRun) else line.process_knobs
        for line in lines
    ]
    return sum(line.start_s - COMPILED[str(knobs["compile"])][2] for line, knobs in zip(lines, compiled, strict=True))


def main() -> int:
    """Replay every grid and the synthetic spaces; print the tables and budgets; the exit status."""
    seeds = options(__doc__, seeds=SEEDS).parse_args().seeds
    rows: list[Row] = []
    for grid in recorded():
        rows += replay_all(grid.name, lambda seed, grid=grid: grid, seeds)  # type: ignore[misc]
    rows += replay_all("synthetic spaces (no machine)", Synthetic, seeds)
    rows += replay_all("synthetic spaces in stages", Synthetic, seeds, in_stages=True)
    rows += launch_bound_rows(min(seeds, LAUNCH_BOUND_SEEDS))
    print()
    return print_table([*rows, decision_row()])


if __name__ == "__main__":
    sys.exit(main())

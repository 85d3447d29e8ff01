"""Judge the best-fit search by replaying it, once a seed, over recorded grids and synthetic spaces.

    python -m benchmarks.best_fit [--seeds 200]

The real decision code runs under a fake clock. Grids are those of `benchmarks/grids`. Synthetic spaces are labelled as
such: they judge the code, not a machine. Exits 1 when a budget is not held.
"""

import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from benchmarks.best_fit_replay import question, replay
from benchmarks.best_fit_spaces import Synthetic, Terrain, cold_grid_s, recorded, regret
from benchmarks.meter import Row, at_most, options, print_columns, print_table

from trainfast_runner.search.best.decide import BestState, decide
from trainfast_runner.search.best_journal import BestLine, Candidate, ProcessReady, Space, Trial

SEEDS = 200
CLOSE, MIN_CLOSE = 0.02, 0.96
MANY = 200
"""From so many settings up the time counts, below that the process starts."""
DECISION_CANDIDATES, DECISION_TRIALS, DECISIONS = 2000, 60, 9
"""A decision is timed as the median of the last ones of a search of this size."""


def replay_all(name: str, terrain_of: Callable[[int], Terrain], seeds: int) -> list[Row]:
    """Replay a seed each, print the figures, and return the budgets."""
    terrains = [terrain_of(seed) for seed in range(seeds)]
    replays = [replay(terrain, seed) for seed, terrain in enumerate(terrains)]
    sizes = [len(terrain.truth) for terrain in terrains]
    whole_s = [cold_grid_s(terrain) for terrain in terrains]
    shares = [one.leader_s / whole for one, whole in zip(replays, whole_s, strict=True)]
    answer_shares = [one.seconds / whole for one, whole in zip(replays, whole_s, strict=True)]
    leaders = [_regret(terrain, one.leader) for terrain, one in zip(terrains, replays, strict=True)]
    answers = [_regret(terrain, one.answer) for terrain, one in zip(terrains, replays, strict=True)]
    print(f"\n{name}: {min(sizes)} to {max(sizes)} settings that fit, {seeds} seeds")
    lines = [("", "within 2 %", "p95 regret", "worst", "of the cold grid's time (p95)")]
    for what, each, times in (
        ("leader after the trials", leaders, shares),
        ("answer after the race", answers, answer_shares),
    ):
        spread = f"{statistics.median(times):.1%} ({percentile(times, 0.95):.1%})"
        lines.append((what, f"{_close(each)} of {seeds}", f"{percentile(each, 0.95):.2%}", f"{max(each):.2%}", spread))
    print_columns(lines)
    means = {role: statistics.fmean(one.cold[role] for one in replays) for role in replays[0].cold}
    runs = ", ".join(f"{role} {mean:.1f}" for role, mean in means.items() if mean)
    trials = statistics.median(sum(isinstance(line, Trial) for line in one.lines) for one in replays)
    print(f"trials: median {trials:g}; runs in fresh processes: mean {runs}")
    close, needed = _close(answers), math.ceil(MIN_CLOSE * seeds)
    p95 = 100 * percentile(answers, 0.95)
    rows: list[Row] = [
        (f"{name}: within 2 % of the best", f"{close} of {seeds}", f">= {needed}", close >= needed),
        at_most(f"{name}: p95 regret", p95, 2, "%", digits=2),
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


def _regret(terrain: Terrain, number: int | None) -> float:
    """A search that found nothing has lost everything."""
    return 1.0 if number is None else regret(terrain, number)


def _close(regrets: Sequence[float]) -> int:
    return sum(value <= CLOSE for value in regrets)


def decision_row() -> Row:
    """The budget of a decision towards the end of `DECISION_TRIALS` trials of a large space of one process."""
    space, truth = large_space(DECISION_CANDIDATES)
    lines: list[BestLine] = [question("large", space), space]
    lines.append(ProcessReady(run_id="one", process_knobs={}, start_s=5.0))
    draw = random.Random(0)
    times_s = []
    for number in (0, *filter(None, draw.sample(range(DECISION_CANDIDATES), DECISION_TRIALS - 1))):
        lines.append(
            Trial(
                candidate_number=number,
                run_id="one",
                outcome="measured",
                warm=True,
                samples_per_step=space.candidates[number].samples_per_step,
                step_ms=[100 * math.exp(draw.gauss(-truth[number], 0.01)) for _ in range(5)],
                seconds=1.0,
            )
        )
        began_s = time.perf_counter()
        decide(BestState(lines, 0.0, "one"))
        times_s.append(time.perf_counter() - began_s)
    what = f"decision for {DECISION_CANDIDATES:,} candidates, {DECISION_TRIALS} trials"
    return at_most(what, 1000 * statistics.median(times_s[-DECISIONS:]), 50, "ms", digits=1)


def large_space(count: int) -> tuple[Space, list[float]]:
    """So many candidates of seven knobs, with an effect for each value, and the ln rate of each."""
    draw = random.Random(1)
    vary = {
        "batch_size": [2**power for power in range(7)],
        "precision": ["fp32", "tf32", "bf16"],
        "optimizer": ["adamw", "adamw-foreach", "adamw-fused"],
        "attention": ["auto", "eager", "flash"],
        "checkpointing": ["off", "full"],
        "workers": [0, 1, 2, 4],
        "prefetch": [1, 2, 4],
    }
    effects = {(name, value): draw.gauss(0, 0.15) for name, values in vary.items() for value in values}
    settings = [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())][:count]
    candidates = [Candidate(knobs=knobs, samples_per_step=8) for knobs in settings]
    truth = [sum(effects[item] for item in knobs.items()) for knobs in settings]
    return Space(candidates=candidates, baseline_number=0), truth


def main() -> int:
    """Replay every grid and the synthetic spaces; print the tables and budgets; the exit status."""
    seeds = options(__doc__, seeds=SEEDS).parse_args().seeds
    rows: list[Row] = []
    for grid in recorded():
        rows += replay_all(grid.name, lambda seed, grid=grid: grid, seeds)  # type: ignore[misc]
    rows += replay_all("synthetic spaces (no machine)", Synthetic, seeds)
    print()
    return print_table([*rows, decision_row()])


if __name__ == "__main__":
    sys.exit(main())

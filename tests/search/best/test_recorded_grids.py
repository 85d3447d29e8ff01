"""Recorded grids as the replay reads them: their passes, their own noise, and a search over them."""

import itertools
import json
import math

import pytest
from benchmarks.best_fit import CLOSE
from benchmarks.best_fit_replay import replay
from benchmarks.best_fit_spaces import Recorded, cold_grid_s, recorded, regret

SIZES = (1, 2, 4, 8)
PRECISIONS = ("fp32", "bf16")


def grid(folder, factors=(1.0, 1.0, 1.0)):
    """A grid of a pass for each factor, which slows the larger batches of that pass. Each pass drifts further."""
    candidates = []
    for precision in PRECISIONS:
        for size in SIZES:
            knobs = {"batch_size": size, "precision": precision, "grad_accum": 8 // size}
            candidates.append({"knobs": knobs, "process": {}, "samples_per_step": 8, "ruled_out": None, "reason": ""})
    visits = []
    for number, factor in enumerate(factors):
        trials = []
        for place, one in enumerate(candidates):
            size = one["knobs"]["batch_size"]
            ms = (60 + 80 / size) * (0.8 if one["knobs"]["precision"] == "bf16" else 1.0) * (factor if size > 4 else 1)
            for round_ in range(2):
                drift = 1 + 0.3 * number + 0.02 * len(trials)
                steps = [ms * drift * (1 + 0.002 * (step % 3)) for step in range(6)]
                switch_s = 0.0 if round_ else 0.2
                trials.append({"candidate": place, "step_ms": steps, "anchor_ms": 100 * drift, "switch_s": switch_s})
        visits.append({"pass": number, "process": {}, "start_s": 4.0, "trials": trials})
    path = folder / "small.json"
    path.write_text(json.dumps({"candidates": candidates, "baseline": 0, "visits": visits}))
    return Recorded(path)


def noise_of(grid):
    """The share by which the winner of one pass was slower than the best in another."""
    worst = 0.0
    for mine, other in itertools.permutations(range(grid.passes), 2):
        winner = max(grid.rates, key=lambda number: grid.rates[number][mine])
        best = max(rates[other] for rates in grid.rates.values())
        worst = max(worst, 1 - math.exp(grid.rates[winner][other] - best))
    return worst


def test_a_search_finds_the_best_of_a_recorded_grid(tmp_path):
    small = grid(tmp_path)
    assert small.passes == 3
    assert noise_of(small) == pytest.approx(0.0)
    result = replay(small, 0)
    assert result.answer is not None
    assert regret(small, result.answer) <= 0.02
    assert result.starts == 1
    assert 0 < result.leader_s < cold_grid_s(small)


def test_the_anchor_takes_the_drift_of_the_machine_out_of_the_figures(tmp_path):
    for rates in grid(tmp_path).rates.values():
        assert rates == pytest.approx([rates[0]] * 3)


GRIDS = recorded()
SEEDS, MIN_CLOSE_ANSWERS = 20, 18


def test_a_recorded_grid_can_judge():
    for one in GRIDS:
        assert noise_of(one) <= CLOSE / 2
        assert one.passes >= 3
        assert len(one.truth) >= 60


@pytest.mark.parametrize("judge", GRIDS, ids=[one.name for one in GRIDS])
def test_a_search_finds_the_best_of_a_grid_of_a_real_machine(judge):
    answers = [replay(judge, seed).answer for seed in range(SEEDS)]
    close = [answer for answer in answers if answer is not None and regret(judge, answer) <= CLOSE]
    assert len(close) >= MIN_CLOSE_ANSWERS

"""Recorded grids as the replay reads them: their passes, their own noise, and a search over them."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.best_fit import CLOSE, MAX_NOISE
from benchmarks.best_fit_replay import replay
from benchmarks.best_fit_spaces import RECIPES, Recorded, cold_grid_s, groups, recorded, regret, space_of

from trainfast_runner.settings.spec import resolve

SIZES = (1, 2, 4, 8)
PRECISIONS = ("fp32", "bf16")


def grid(folder: Path, factors: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Recorded:
    """A grid of a pass for each factor, which slows the larger batches of that pass. Each pass drifts further."""
    candidates: list[dict[str, Any]] = []
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


def test_a_search_finds_the_best_of_a_recorded_grid(tmp_path):
    small = grid(tmp_path)
    assert small.passes == 3
    assert small.worst_winner == pytest.approx(0.0)
    result = replay(small, 0)
    assert result.answer is not None
    assert regret(small, result.answer) <= 0.02
    assert result.starts == 1
    assert 0 < result.leader_s < cold_grid_s(small)


def test_the_anchor_takes_the_drift_of_the_machine_out_of_the_figures(tmp_path):
    for rates in grid(tmp_path).rates.values():
        assert rates == pytest.approx([rates[0]] * 3)


def test_a_grid_says_how_far_the_winner_of_one_pass_is_off_in_another(tmp_path):
    assert grid(tmp_path, (1.0, 1.5, 1.0)).worst_winner > 0.1


QUIET = [one for one in recorded() if one.worst_winner <= MAX_NOISE]
SEEDS, MIN_CLOSE_ANSWERS = 20, 18


def test_a_recorded_grid_can_judge():
    assert QUIET
    for one in QUIET:
        assert one.passes >= 3
        assert len(one.truth) >= 60
        assert len(groups(one.space)) >= 12


@pytest.mark.parametrize("judge", QUIET, ids=[one.name for one in QUIET])
def test_a_search_finds_the_best_of_a_grid_of_a_real_machine(judge):
    answers = [replay(judge, seed).answer for seed in range(SEEDS)]
    close = [answer for answer in answers if answer is not None and regret(judge, answer) <= CLOSE]
    assert len(close) >= MIN_CLOSE_ANSWERS


def test_the_quick_grid_has_settings_and_processes_enough(monkeypatch, cache):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    recipe = RECIPES["bert"]
    space = space_of(resolve(recipe.preset, recipe.settings), recipe)
    assert sum(one.excluded_as is None for one in space.candidates) >= 60
    assert len(groups(space)) >= 12
    assert space.candidates[space.baseline_number].knobs["strategy"] == "ddp"
    grid = next(one for one in recorded() if one.name == "bert")
    assert grid.space.candidates[grid.space.baseline_number].knobs == space.candidates[space.baseline_number].knobs
    assert {str(sorted(one.knobs.items())) for one in grid.space.candidates} == {
        str(sorted(one.knobs.items())) for one in space.candidates
    }

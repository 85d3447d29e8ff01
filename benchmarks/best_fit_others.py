"""Other ways to search a space, with the same trials at the same cost: the figures beside the search's own.

Each is given a budget in seconds of the fake clock and returns the setting it holds for the best. None of them knows
the memory prediction's or the catalog's structure beyond the list of settings.
"""

from __future__ import annotations

import importlib.util
import math
import random
import statistics
from collections.abc import Callable

from benchmarks.best_fit_spaces import UNTIMED, Process, Terrain

from trainfast_runner.search.best.step_rule import StepRule
from trainfast_runner.search.speed.process_starts import knobs_key

MAX_ASKED = 300
"""Settings that TPE proposes at most, those that it proposes again among them."""
Searching = Callable[[Terrain, float, int], int | None]


class OutOfTime(Exception):
    """The budget is spent."""


class Tries:
    """Trials of a terrain on a budget: a process that waits is used again, any other setting starts one."""

    def __init__(self, terrain: Terrain, budget_s: float, seed: int) -> None:
        self.terrain, self.seed = terrain, random.Random(seed)
        self.left_s = budget_s
        self.rates: dict[int, float] = {}
        self._process: Process | None = None
        self._key: object = None

    def rate(self, candidate: int, steps: int | None = None) -> float:
        """The ln samples/s of a setting, by so many steps or by the search's own rule. Raises OutOfTime."""
        chosen = self.terrain.space.candidates[candidate]
        key = knobs_key(chosen.process_knobs)
        if self._process is None or key != self._key:
            self._process, self._key = self.terrain.process(candidate, self.seed), key
            self._spend(self._process.start_s)
        else:
            self._spend(self._process.switch_s(candidate))
        drawn = self._process.steps(candidate)
        rule = StepRule() if steps is None else StepRule(min_steps=steps, max_steps=steps)
        self._spend(sum(next(drawn) for _ in range(UNTIMED)) / 1000)
        taken: list[float] = []
        while rule.judge(taken) == "more":
            taken.append(next(drawn))
            self._spend(taken[-1] / 1000)
        self.rates[candidate] = math.log(1000 * chosen.samples_per_step / statistics.median(taken))
        return self.rates[candidate]

    @property
    def best(self) -> int | None:
        """The fastest setting so far."""
        return max(self.rates, key=lambda number: self.rates[number], default=None)

    def _spend(self, seconds: float) -> None:
        self.left_s -= seconds
        if self.left_s < 0:
            raise OutOfTime


def random_order(terrain: Terrain, budget_s: float, seed: int) -> int | None:
    """Settings in random order."""
    tries = Tries(terrain, budget_s, seed)
    numbers = list(terrain.truth)
    tries.seed.shuffle(numbers)
    try:
        for number in numbers:
            tries.rate(number)
    except OutOfTime:
        pass
    return tries.best


def coordinate_descent(terrain: Terrain, budget_s: float, seed: int) -> int | None:
    """From the baseline one knob after the other, each value of it, until none helps."""
    tries = Tries(terrain, budget_s, seed)
    candidates = terrain.space.candidates
    at = terrain.space.baseline_number
    names = [name for name in candidates[0].knobs if name != "grad_accum"]
    try:
        tries.rate(at)
        while True:
            before = at
            tries.seed.shuffle(names)
            for name in names:
                rest = {key: value for key, value in candidates[at].knobs.items() if key not in (name, "grad_accum")}
                for number in terrain.truth:
                    same = all(candidates[number].knobs[key] == value for key, value in rest.items())
                    if same and number not in tries.rates:
                        tries.rate(number)
                at = tries.best if tries.best is not None else at
            if at == before:
                break
    except OutOfTime:
        pass
    return tries.best


def successive_halving(terrain: Terrain, budget_s: float, seed: int) -> int | None:
    """All settings with 2 steps, the best third with 4, and so on; a process tries its settings one after the other."""
    tries = Tries(terrain, budget_s, seed)
    left, steps = list(terrain.truth), 2
    try:
        while len(left) > 1:
            tries.seed.shuffle(left)
            left.sort(key=lambda number: str(knobs_key(terrain.space.candidates[number].process_knobs)))
            for number in left:
                tries.rate(number, steps)
            left = sorted(left, key=lambda number: -tries.rates[number])[: math.ceil(len(left) / 3)]
            steps *= 2
    except OutOfTime:
        return tries.best
    return left[0] if left else None


def tree_parzen(terrain: Terrain, budget_s: float, seed: int) -> int | None:
    """TPE as Optuna has it, each knob a categorical parameter; a combination that is no setting costs nothing."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    tries = Tries(terrain, budget_s, seed)
    candidates = terrain.space.candidates
    names = [name for name in candidates[0].knobs if name != "grad_accum"]
    values = {name: list(dict.fromkeys(candidate.knobs[name] for candidate in candidates)) for name in names}
    numbers = {tuple(candidate.knobs[name] for name in names): number for number, candidate in enumerate(candidates)}
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    first = candidates[terrain.space.baseline_number].knobs
    study.enqueue_trial({name: first[name] for name in names})
    try:
        for _ in range(MAX_ASKED):
            trial = study.ask()
            chosen = tuple(trial.suggest_categorical(name, values[name]) for name in names)
            number = numbers.get(chosen)
            if number is None or number not in terrain.truth:
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            else:
                # A setting that was tried costs nothing the second time.
                study.tell(trial, tries.rates[number] if number in tries.rates else tries.rate(number))
    except OutOfTime:
        pass
    return tries.best


def why_no_optuna() -> str | None:
    """The reason why TPE is left out; None when optuna is installed."""
    if importlib.util.find_spec("optuna") is None:
        return "optuna is not installed: pip install 'trainfast-tui[bench]'"
    return None


OTHERS: dict[str, Searching] = {
    "random": random_order,
    "coordinate descent": coordinate_descent,
    "successive halving": successive_halving,
    "TPE": tree_parzen,
}

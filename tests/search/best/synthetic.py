"""Lines of a best-fit search over a synthetic space, written by hand."""

from benchmarks.best_fit_replay import question
from benchmarks.best_fit_spaces import Synthetic

from trainfast_runner.search.best.decide import BestState
from trainfast_runner.search.best_journal import BestLine, BestQuestion, ColdRun, ProcessReady, Trial


def asking(terrain: Synthetic, *words: object, **fields: object) -> BestQuestion:
    """The question that a synthetic space is searched for."""
    return question(terrain.name, terrain.space, *words, **fields)  # type: ignore[arg-type]


def trial(candidate: int, run_id: str = "one", ms: float = 100.0, **fields: object) -> Trial:
    """A trial of ten equal steps."""
    given: dict[str, object] = {"outcome": "measured", "warm": True, "step_ms": [ms * 1.001, ms * 0.999] * 5, **fields}
    return Trial(candidate_number=candidate, run_id=run_id, samples_per_step=8, **{"seconds": ms / 100, **given})  # type: ignore[arg-type]


def process_ready(terrain: Synthetic, candidate: int, run_id: str = "one") -> list[BestLine]:
    """The lines of a process that was started for a candidate."""
    process = terrain.space.candidates[candidate].process_knobs
    return [ProcessReady(run_id=run_id, process_knobs=process, start_s=5.0)]


def state_of(terrain: Synthetic, *lines: BestLine, warm: str | None = None, spent_s: float = 0.0) -> BestState:
    return BestState([asking(terrain), terrain.space, *lines], spent_s, warm)


def cold(candidate: int, role: str = "confirm", outcome: str = "measured", **fields: object) -> ColdRun:
    """A run in a fresh process."""
    given: dict[str, object] = {"run_id": f"{role}-{candidate}", "seconds": 1.0, **fields}
    return ColdRun(candidate_number=candidate, role=role, outcome=outcome, **given)  # type: ignore[arg-type]


def confirmed(candidate: int, rates: tuple[float, ...], role: str = "confirm") -> list[BestLine]:
    """Runs in fresh processes with these samples/s."""
    return [cold(candidate, role, run_id=f"{role}-{candidate}-{n}", samples_per_s=rate) for n, rate in enumerate(rates)]

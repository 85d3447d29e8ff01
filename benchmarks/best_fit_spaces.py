"""Spaces that a best-fit search is replayed over: recorded grids of this machine, and synthetic ones.

A recorded grid is a JSON file of `benchmarks/grids`: every setting of a small space that is legal and fits, trained on
one machine with one thread a rank, in random order, three passes, each setting between two looks at an anchor: a second
process that held the baseline. A synthetic space is a model of a training step with random parts: it judges the
decision code where no grid was recorded, and says nothing of a machine.
"""

import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
from benchmarks.meter import Json
from msgspec.structs import replace

from trainfast_runner.search.best_journal import Candidate, Space, StepProfile
from trainfast_runner.settings.knobs import KNOBS_BY_NAME

GRIDS = Path(__file__).parent / "grids"
UNTIMED = 2
COLD_STEPS = 10
"""Timed steps of each setting where the whole grid is run cold, for the time that takes."""


@dataclass
class Process:
    """A training process of a space: its start in seconds, the seconds of each switch, and the steps of a setting."""

    start_s: float
    steps: Callable[[int], Iterator[float]]
    """The timed steps of a candidate in ms, without end."""
    switches_s: Mapping[int, float] = field(default_factory=dict)


class Terrain(Protocol):
    """A space whose figures are known: `truth` is the ln samples/s of each candidate that can be the answer."""

    name: str
    space: Space
    truth: dict[int, float]

    def process(self, candidate: int, seed: random.Random, cold: bool = False) -> Process:
        """A process for the settings of a candidate's group; `cold` for a run in a fresh process."""

    def profile(self, candidate: int) -> StepProfile | None:
        """The phases that a trial of the candidate measures; None where they were not recorded."""


def regret(terrain: Terrain, candidate: int) -> float:
    """The share by which a candidate is slower than the best of the space."""
    return 1 - math.exp(terrain.truth[candidate] - max(terrain.truth.values()))


def cold_grid_s(terrain: Terrain) -> float:
    """Seconds that every setting takes in a process of its own, with `COLD_STEPS` timed steps."""
    seed, total = random.Random(0), 0.0
    for number, candidate in enumerate(terrain.space.candidates):
        if number in terrain.truth:
            step_s = candidate.samples_per_step / math.exp(terrain.truth[number])
            total += terrain.process(number, seed).start_s + (UNTIMED + COLD_STEPS) * step_s
    return total


def candidate_of(knobs: Mapping[str, Any], global_batch: int, traced_s: Sequence[float]) -> Candidate:
    """A candidate with its calls, device work and optimizer; a compiled step of other settings is another program."""
    host_s, device_s, optimizer_s = traced_s
    names = [name for name in knobs if knobs["compile"] != "off" or name in ("pin_memory", "compile")]
    return Candidate(
        knobs=dict(knobs),
        process_knobs={name: knobs[name] for name in names},
        samples_per_step=global_batch,
        host_s=host_s,
        device_s=device_s,
        optimizer_s=optimizer_s,
    )


class Synthetic:
    """A random space of some hundred settings: the time of a sample as a sum of its parts.

    compute x precision x attention x checkpointing x compile x (1 + launch cost / batch) x cache pressure
    + optimizer / global batch + loading that is not hidden; then pairwise terms of 1 % and a residual of 0.5 %.
    """

    def __init__(self, number: int) -> None:
        self.name = f"synthetic {number}"
        draw = random.Random(f"space {number}")
        self._draw_parts(draw)
        vary: dict[str, list[Any]] = {
            "batch_size": [2**power for power in range(draw.choice((5, 6, 7)))],
            "precision": ["fp32", "bf16"],
            "optimizer": ["adamw", "adamw-foreach", "adamw-fused"][: draw.choice((2, 3))],
            "checkpointing": ["off", "full"],
            "compile": ["off", "default"],
        }
        more: dict[str, list[Any]] = {"attention": ["auto", "eager"], "workers": [0, 2], "pin_memory": ["off", "on"]}
        vary |= {name: more[name] for name in sorted(draw.sample(sorted(more), draw.choice((1, 2))))}
        self._global_batch = int(max(vary["batch_size"]))
        self._pairs: dict[tuple[object, ...], float] = {}
        candidates: list[Candidate] = []
        truth: list[float] = []
        for values in itertools.product(*vary.values()):
            knobs: dict[str, Any] = dict(zip(vary, values, strict=True))
            knobs["grad_accum"] = self._global_batch // knobs["batch_size"]
            truth.append(-math.log(sum(self._sample_parts_s(knobs))) + self._small_terms(knobs, draw))
            candidates.append(candidate_of(knobs, self._global_batch, self._traced_s(knobs)))
        needed = []
        for candidate in candidates:
            batch_size: Any = candidate.knobs["batch_size"]
            per_sample = 0.3 if candidate.knobs["checkpointing"] == "full" else 1.0
            per_sample *= 0.6 if candidate.knobs["precision"] == "bf16" else 1.0
            needed.append(int(2**20 * (500 + 40 * batch_size * per_sample)))
        limit = sorted(needed)[int(draw.uniform(0.75, 1.0) * (len(needed) - 1))]
        for place, size in enumerate(needed):
            out = "too_large" if size > limit else None
            candidates[place] = replace(candidates[place], predicted_bytes=size, excluded_as=out)
        self.truth: dict[int, float] = {
            number: rate for number, rate in enumerate(truth) if candidates[number].excluded_as is None
        }
        preset = {name: values[0] for name, values in vary.items()} | {"batch_size": min(8, self._global_batch)}
        baseline = next(place for place, one in enumerate(candidates) if preset.items() <= one.knobs.items())
        baseline = baseline if baseline in self.truth else next(iter(self.truth))
        self.space = Space(candidates=candidates, baseline_number=baseline)

    def process(self, candidate: int, seed: random.Random, cold: bool = False) -> Process:
        """A process with its own visit effect; a fresh one is a little off its warm figures, too."""
        chosen = self.space.candidates[candidate]
        start = self._start_s + (self._compile_s if chosen.knobs["compile"] != "off" else 0.0)
        shift = seed.gauss(0, self._visit) + (self._cold_gap + seed.gauss(0, 0.003) if cold else 0.0)

        def steps(number: int) -> Iterator[float]:
            # Mostly near the true one, now and then a much longer one.
            while True:
                noise = seed.gauss(0, self._noise) + (seed.uniform(0.1, 0.6) if seed.random() < 0.03 else 0.0)
                yield 1000 * self._global_batch * math.exp(noise - shift - self.truth[number])

        return Process(start * seed.uniform(0.9, 1.1), steps)

    def _draw_parts(self, draw: random.Random) -> None:
        self._compute = draw.uniform(0.002, 0.02)
        self._factors: dict[Any, float] = {
            "bf16": draw.choice((draw.uniform(0.35, 0.7), draw.uniform(0.9, 1.5))),
            "eager": draw.uniform(0.98, 1.4),
            "full": draw.uniform(1.2, 1.35),
            "default": draw.uniform(0.65, 1.05),
        }
        self._launch, self._pressure = draw.uniform(0.1, 3.0), draw.uniform(0.0, 0.2)
        self._pressure_from = draw.choice((2, 4, 8, 64))
        within = {"adamw": (0.01, 0.25), "adamw-foreach": (0.01, 0.25), "adamw-fused": (0.005, 0.1)}
        self._optimizer = {name: draw.uniform(*bounds) for name, bounds in within.items()}
        self._load = draw.choice((0.02, draw.uniform(0.1, 1.2))) * self._compute
        self._start_s, self._compile_s = draw.uniform(3, 15), draw.uniform(15, 60)
        self._visit, self._noise = draw.uniform(0.002, 0.01), draw.uniform(0.005, 0.03)
        self._cold_gap = draw.gauss(0, 0.01)
        calibration = random.Random(self.name)
        self._calls_error, self._half_error = (math.exp(calibration.gauss(0, 0.3)) for _ in range(2))

    def _sample_parts_s(self, knobs: Mapping[str, Any]) -> tuple[float, float, float]:
        """Seconds a sample of forward and backward, of the optimizer, and of the wait for data."""
        batch = knobs["batch_size"]
        work: float = self._compute * self._factors.get(knobs["precision"], 1.0)
        work *= self._factors.get(knobs.get("attention"), 1.0) * self._factors.get(knobs["checkpointing"], 1.0)
        launch = self._launch * (0.5 if knobs["compile"] != "off" else 1.0)
        work *= self._factors.get(knobs["compile"], 1.0) * (1 + launch / batch)
        work *= max(1.0, batch / self._pressure_from) ** self._pressure
        optimizer = self._optimizer[knobs["optimizer"]] * self._compute * 8 / self._global_batch
        workers = knobs.get("workers", 0)
        loading = self._load * (0.6 if knobs.get("pin_memory") == "on" else 1.0)
        wait = max(0.0, loading / workers - work) + 0.01 * self._compute if workers else loading
        return work, optimizer, wait

    def _traced_s(self, knobs: Mapping[str, Any]) -> tuple[float, float, float]:
        """Calls and device work of a step by a trace and a calibration, which are a third off and know no kernel."""
        work = self._compute * self._global_batch * (4 / 3 if knobs["checkpointing"] == "full" else 1.0)
        half = self._half_error * self._factors["bf16"]
        device = work * (half if knobs["precision"] == "bf16" else 1.0)
        device *= 1.15 if knobs.get("attention") == "eager" else 1.0
        optimizer = 8 * self._compute * (0.05 if knobs["optimizer"] == "adamw-fused" else 0.1)
        return self._calls_error * work * self._launch / knobs["batch_size"], device, optimizer

    def profile(self, candidate: int) -> StepProfile:
        """The phases of a trial."""
        _, *parts_s = self._sample_parts_s(self.space.candidates[candidate].knobs)
        optimizer_ms, data_ms = (1000 * self._global_batch * part_s for part_s in parts_s)
        return StepProfile(data_ms=data_ms, optimizer_ms=optimizer_ms)

    def _small_terms(self, knobs: Mapping[str, Any], draw: random.Random) -> float:
        total: float = draw.gauss(0, 0.005)
        for pair in itertools.combinations(sorted(set(knobs) - {"grad_accum"}), 2):
            key = tuple((name, knobs[name]) for name in pair)
            if key not in self._pairs:
                self._pairs[key] = draw.gauss(0, 0.01 / math.sqrt(5))
            total += self._pairs[key]
        return total


GPU_MS = {"bf16": 15.0, "fp32": 45.0, "tf32": 24.0}
COMPILED = {"off": (1, 1, 0), "default": (1 / 3, 0.9, 42), "blocks": (1 / 3, 1, 12), "reduce-overhead": (0, 0.9, 55)}
"""Shares of the launches and of the GPU's time that each value leaves, and the seconds that it takes to compile."""


class LaunchBound:
    """A GPU that waits for its host: BERT large at batch 8 x 128, a step of 62 ms with 15 ms of kernels in bf16.

    The constants were fixed before any search of it: 11 us a launch; 1.15 times the launches in bf16, for autocast's
    casts; 6 ms less with a fused optimizer; loading is 0.1 % of the step; noise of 2 % a step and 3 % a process; a
    process takes 13 s cold, 3 s from a standby. The search knows calls and work a third off, and the share of the
    time in which NVML calls the GPU busy, about twice that of its kernels. Of `COMPILED`, the knob's values are varied.
    """

    name = "launch-bound GPU (simulated)"

    def __init__(self, number: int, start_s: float = 3.0) -> None:
        self._start_s, calibration = start_s, random.Random(number)
        errors = [math.exp(calibration.gauss(0, 0.3)) for _ in range(3)]
        vary: dict[str, Sequence[Any]] = {
            "precision": [*GPU_MS],
            "batch_size": (8, 4, 2, 1),
            "checkpointing": ("off", "full"),
            "optimizer": ("adamw", "adamw-foreach", "adamw-fused"),
            "attention": ("auto", "eager"),
            "compile": [name for name in COMPILED if name in KNOBS_BY_NAME["compile"].values.describe()],
            "workers": (2, 0, 8),
            "pin_memory": ("on", "off"),
        }
        candidates: list[Candidate] = []
        for values in itertools.product(*vary.values()):
            knobs: dict[str, Any] = dict(zip(vary, values, strict=True))
            knobs["grad_accum"] = 8 // knobs["batch_size"]
            traced_s = [part_ms * error / 1000 for part_ms, error in zip(self._parts_ms(knobs), errors, strict=True)]
            candidates.append(candidate_of(knobs, 8, traced_s))
        self.space = Space(candidates=candidates, baseline_number=0)
        self.truth = {number: math.log(8000 / self._ms(number)[0]) for number in range(len(candidates))}

    def _parts_ms(self, knobs: Mapping[str, Any]) -> tuple[float, float, float]:
        """Host and GPU time of forward and backward without a compiler, and host time of the optimizer."""
        more = (4 / 3 if knobs["checkpointing"] == "full" else 1) * (1.2 if knobs["attention"] == "eager" else 1)
        casts_ms = 62 * (1 - 1 / 1.15) if knobs["precision"] == "bf16" else 0
        host_ms = (62 / 1.15 - 8 + casts_ms) * more * knobs["grad_accum"]
        return host_ms, GPU_MS[knobs["precision"]] * more, 2 if knobs["optimizer"] == "adamw-fused" else 8

    def _ms(self, number: int) -> tuple[float, float]:
        """The step and the kernels of a candidate."""
        knobs = self.space.candidates[number].knobs
        host_ms, gpu_ms, optimizer_ms = self._parts_ms(knobs)
        launches, kernels, _ = COMPILED[str(knobs["compile"])]
        return 1.001 * max(launches * (host_ms + 8) + optimizer_ms - 8, kernels * gpu_ms), kernels * gpu_ms

    def process(self, candidate: int, seed: random.Random, cold: bool = False) -> Process:
        """A process with its own speed; it starts from a standby, for a run in a fresh process too."""
        shift = seed.gauss(0, 0.03)

        def steps(number: int) -> Iterator[float]:
            while True:
                yield self._ms(number)[0] * math.exp(seed.gauss(0, 0.02) - shift)

        return Process(self._start_s + COMPILED[str(self.space.candidates[candidate].knobs["compile"])][2], steps)

    def profile(self, candidate: int) -> StepProfile:
        """The phases of a trial."""
        step_ms, gpu_ms = self._ms(candidate)
        optimizer_ms = self._parts_ms(self.space.candidates[candidate].knobs)[2]
        return StepProfile(data_ms=step_ms / 1000, optimizer_ms=optimizer_ms, gpu_busy=math.sqrt(gpu_ms / step_ms))


class Recorded:
    """A grid of this machine: `passes` over every setting, each a visit of each process with its steps.

    Steps are those of a machine that does not drift: each is scaled by the grid's median anchor over its own anchor.
    """

    def __init__(self, path: Path) -> None:
        stored = json.loads(path.read_text())
        self.name = path.stem
        candidates = msgspec.convert(stored["candidates"], list[Candidate])
        self.space = Space(candidates=candidates, baseline_number=stored["baseline"])
        self._visits: list[Json] = stored["visits"]
        anchors = [trial["anchor_ms"] for visit in self._visits for trial in visit["trials"]]
        self.anchor_ms: float = statistics.median(anchors)
        by_setting: dict[int, list[float]] = {}
        for visit in self._visits:
            for number, steps in self._steps_of(visit).items():
                rate = math.log(1000 * candidates[number].samples_per_step / statistics.median(steps))
                by_setting.setdefault(number, []).append(rate)
        self.rates: Mapping[int, Sequence[float]] = by_setting
        self.truth: dict[int, float] = {number: statistics.median(rates) for number, rates in by_setting.items()}

    @property
    def passes(self) -> int:
        """Passes over the whole grid."""
        return min(map(len, self.rates.values()))

    def process(self, candidate: int, seed: random.Random, cold: bool = False) -> Process:
        """One of the recorded visits of the candidate's process that tried it."""
        visits = [visit for visit in self._visits if any(trial["candidate"] == candidate for trial in visit["trials"])]
        visit = seed.choice(visits)
        recorded_steps = self._steps_of(visit)

        def steps(number: int) -> Iterator[float]:
            setting = self.space.candidates[number]
            known = recorded_steps.get(number) or [1000 * setting.samples_per_step / math.exp(self.truth[number])]
            begin = seed.randrange(len(known))
            # From a random one on and in their order, because a machine's slow moments follow each other.
            yield from itertools.chain(known[begin:], itertools.cycle(known))

        # The first round of a setting holds the switch to it.
        switches_s = {trial["candidate"]: float(trial["switch_s"]) for trial in reversed(visit["trials"])}
        return Process(float(visit["start_s"]), steps, switches_s)

    def profile(self, candidate: int) -> None:
        """Phases were not recorded."""

    def _steps_of(self, visit: Json) -> dict[int, list[float]]:
        """The scaled steps in ms of each setting that a visit tried."""
        steps: dict[int, list[float]] = {}
        for trial in visit["trials"]:
            scale = self.anchor_ms / trial["anchor_ms"]
            steps.setdefault(trial["candidate"], []).extend(scale * step for step in trial["step_ms"])
        return steps


def recorded() -> list[Recorded]:
    """Every recorded grid."""
    return [Recorded(path) for path in sorted(GRIDS.glob("*.json"))]

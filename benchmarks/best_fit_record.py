"""Record a grid: every setting of a small space that is legal and fits, trained on this machine, pass after pass.

    python -m benchmarks.best_fit_record [--grids bert] [--passes 3]        (up to 3 hours each)

A pass visits each process of the space once, in random order, and tries its settings there in random order. The speed
of a machine drifts, so a second process holds the baseline: its steps stand before and after every few steps of a
setting, as their anchor. A setting is tried again when others took more than 2 % of the CPU meanwhile. The grid is
written after each visit; the same command goes on with the visit that was cut off, from its start. Every rank has one
thread: two that compete for two cores run ten times slower, at random.
"""

import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.best_fit_spaces import GRIDS, groups
from benchmarks.meter import Json, options

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cpu import CpuWindow
from trainfast_runner.machine.devices import detect_machine
from trainfast_runner.records.home import Home, conductor_lock
from trainfast_runner.running import launch
from trainfast_runner.running.planning import plan_run
from trainfast_runner.search.best.candidates import default_global_batch, enumerate_space
from trainfast_runner.search.best.question import vary_of
from trainfast_runner.search.best_journal import Candidate, Space
from trainfast_runner.search.conductor import WarmProcess
from trainfast_runner.search.searches import candidate_spec, new_search
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.spec import RunSpec, resolve

UNTIMED, ROUNDS = 2, 5
ROUND_S, MIN_STEPS = 0.6, 3
"""Seconds of a round of a setting or of the anchor, so that a fast setting has more steps; the first has the least."""
MAX_COMPANY = 0.02
"""Others may take this share of the CPU."""
MAX_TRIES = 40
"""A setting that had company so often ends the recording: the machine is in use."""


@dataclass(frozen=True)
class Recipe:
    """One grid: a preset with settings, and the values of each varied knob.

    A setting has `ROUNDS` rounds a visit, each between two of the anchor.
    """

    name: str
    preset: str
    settings: tuple[str, ...]
    vary: Mapping[str, tuple[Any, ...]]

    def records(self, candidate: Candidate) -> bool:
        """True if the grid has this setting: fsdp, each setting of which takes a process, varies only `COMMON`."""
        extra = {name: values[0] for name, values in self.vary.items() if name not in COMMON}
        return candidate.knobs.get("strategy") != "fsdp" or extra.items() <= candidate.knobs.items()


COMMON: Mapping[str, tuple[Any, ...]] = {
    "batch_size": (1, 2, 4, 8),
    "optimizer": ("adamw", "adamw-foreach", "adamw-fused"),
    "strategy": ("single", "ddp", "fsdp"),
}
# The baseline. No bf16 beside it: a processor without instructions for it takes ten times as long for half of the grid.
TWO_RANKS = (
    *("devices=cpu:2", "strategy=ddp", "precision=fp32", "workers=0", "pin_memory=off", "optimizer=adamw"),
    *("batch_size=8", "grad_accum=1"),
)
CHECKPOINTED: Mapping[str, tuple[Any, ...]] = {**COMMON, "checkpointing": ("off", "full")}
SMALL_BERT = (
    *("model.num_hidden_layers=2", "model.hidden_size=256", "model.num_attention_heads=4"),
    *("model.intermediate_size=1024", "model.vocab_size=4096", "data.kind=random", "seq_len=16"),
)
SMALL_VIT = (
    *("model.num_hidden_layers=2", "model.hidden_size=192", "model.num_attention_heads=4"),
    *("model.intermediate_size=768", "model.image_size=64"),
)
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("causal-lm", "tiny-llama", (*TWO_RANKS, "data.kind=random", "seq_len=16"), CHECKPOINTED),
        Recipe("bert", "bert-base", (*SMALL_BERT, *TWO_RANKS), CHECKPOINTED),
        Recipe("vit", "vit-large", (*SMALL_VIT, *TWO_RANKS), {**COMMON, "attention": ("auto", "eager")}),
    )
}


class InUse(Exception):
    """Others use the machine: nothing can be recorded now."""


def space_of(spec: RunSpec, recipe: Recipe) -> Space:
    """The candidates of a grid. Raises UserError for a recipe that cannot run here."""
    plan = plan_run(spec)
    machine = detect_machine(plan.versions, plan.python)

    def refuse(candidate: RunSpec) -> UserError | None:
        try:
            plan_run(candidate)
        except UserError as problem:
            return problem
        return None

    size = default_global_batch(spec, machine)
    vary, _ = vary_of(spec, recipe.vary, machine, size, refuse)
    space = enumerate_space(spec, machine, vary, size, refuse)
    baseline, candidates = space.candidates[space.baseline_number], list(filter(recipe.records, space.candidates))
    return Space(candidates=candidates, baseline_number=candidates.index(baseline), dropped=space.dropped)


class Recorder:
    """Records one grid into a file, trial by trial beside an anchor: a process that holds the baseline.

    Raises InUse, and UserError for a recipe that cannot run here.
    """

    def __init__(self, recipe: Recipe, path: Path, folder: Path) -> None:
        self._path, self._name, self._spec = path, recipe.name, resolve(recipe.preset, recipe.settings)
        self._space = space_of(self._spec, recipe)
        machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, one thread a rank"
        head: Json = {"schema": 1, "preset": recipe.preset, "settings": list(recipe.settings), "machine": machine}
        head |= {"baseline": self._space.baseline_number, "candidates": msgspec.to_builtins(self._space.candidates)}
        self._grid: Json = json.loads(path.read_text()) if path.exists() else {**head, "visits": []}
        # In homes of their own: one home gives a device to one run at a time.
        self._homes = [Home(folder / name).create() for name in ("anchor", "visits")]

    def record(self, passes: int) -> None:
        """Visit each process of the space once a pass; the visits of an earlier recording stand."""
        done = [(visit["pass"], visit["process"]) for visit in self._grid["visits"]]
        with _warm_process(self._spec_of(self._space.baseline_number), self._homes[0]) as self._anchor:
            first = self._trial(self._anchor, self._space.baseline_number, 4 * MIN_STEPS)
            self._anchor_steps = _steps_of_a_round(first)
            for number in range(passes):
                order = random.Random(f"{self._name} {number}")
                visits = list(groups(self._space).items())
                order.shuffle(visits)
                for place, (key, members) in enumerate(visits):
                    settings = [each for each in members if self._space.candidates[each].excluded_as is None]
                    order.shuffle(settings)
                    if not settings or (number, dict(key)) in done:
                        continue
                    print(f"{self._name}, pass {number + 1}, process {place + 1} of {len(visits)}", file=sys.stderr)
                    self._grid["visits"].append({"pass": number, "process": dict(key), **self._visit(settings)})
                    new = self._path.with_suffix(".new")
                    new.write_text(json.dumps(self._grid))
                    new.replace(self._path)

    def _visit(self, settings: Sequence[int]) -> Json:
        """One process that tries every setting."""
        began_s, load = time.monotonic(), os.getloadavg()[0]
        with _warm_process(self._spec_of(settings[0]), self._homes[1]) as process:
            start_s = time.monotonic() - began_s
            trials = [trial for number in settings for trial in self._alone(process, number)]
        return {"start_s": start_s, "load": load, "seconds": time.monotonic() - began_s, "trials": trials}

    def _alone(self, process: WarmProcess, number: int) -> list[Json]:
        """The rounds of a setting in which others left the CPU to it. Raises InUse after `MAX_TRIES`."""
        for tries in range(MAX_TRIES):
            window = CpuWindow()
            trials = self._rounds(process, number, again=tries > 0)
            others = window.others_cores()
            share = None if others is None else others / (os.cpu_count() or 1)
            if share is not None and share <= MAX_COMPANY:
                return [{**trial, "others_share": round(share, 4)} for trial in trials]
        raise InUse(f"others took more than {100 * MAX_COMPANY:g} % of the CPU in each of {MAX_TRIES} tries")

    def _rounds(self, process: WarmProcess, number: int, again: bool) -> list[Json]:
        """The rounds of a setting, each between two looks at the anchor; `again` if it is the process's last one."""
        trials, steps, before = list[Json](), MIN_STEPS, self._anchor_ms()
        for place in range(ROUNDS):
            trial = self._trial(process, number, steps, more=again or place > 0)
            steps, after = _steps_of_a_round(trial), self._anchor_ms()
            trials.append({**trial, "anchor_ms": round((before + after) / 2, 3)})
            before = after
        return trials

    def _anchor_ms(self) -> float:
        """Median of the anchor's next steps."""
        trial = self._trial(self._anchor, self._space.baseline_number, self._anchor_steps, more=True)
        return float(statistics.median(trial["step_ms"]))

    def _trial(self, process: WarmProcess, number: int, steps: int, more: bool = False) -> Json:
        """The steps of one setting, by the slowest rank; `more` takes further steps of the process's last setting."""
        knobs = self._spec_of(number).knobs
        warm = {name: value for name, value in knobs.items() if KNOBS_BY_NAME[name].changes_in_warm_process}
        answers = process.trial(warm, 0 if more else UNTIMED, steps, more=more)
        if answers is None:
            raise UserError(f"the process of setting {number} ended: {process.result and process.result.reason}")
        if bad := next((line for line in answers.values() if line.outcome != "measured"), None):
            raise UserError(f"setting {number}: {bad.outcome}: {bad.message}")
        slowest = max(answers.values(), key=lambda line: sum(line.step_ms))
        step_ms = [round(step, 3) for step in slowest.step_ms]
        return {"candidate": number, "step_ms": step_ms, "switch_s": slowest.switch_s}

    def _spec_of(self, number: int) -> RunSpec:
        return candidate_spec(self._spec, self._space.candidates[number].knobs)


@contextmanager
def _warm_process(spec: RunSpec, home: Home) -> Iterator[WarmProcess]:
    """A process of one thread a rank that is ready for its first trial, ended with the context."""
    search, plan = new_search(home, "grid"), plan_run(spec)
    plan = replace(plan, role="trial", search_id=search.name, env={**plan.env, "OMP_NUM_THREADS": "1"})
    with conductor_lock(search):
        process = WarmProcess(launch.start(plan, home), plan.world_size, lambda: None)
        try:
            process.ready()
            yield process
        finally:
            process.end()


def _steps_of_a_round(trial: Json) -> int:
    """The steps of this setting that take about `ROUND_S`."""
    return max(MIN_STEPS, round(1000 * ROUND_S / float(statistics.median(trial["step_ms"]))))


def main() -> int:
    """Record grids, or go on with them; the exit status, 1 when the machine is in use."""
    asked = options(__doc__, grids=[], passes=3, into=str(GRIDS)).parse_args()
    for name in asked.grids or RECIPES:
        try:
            with tempfile.TemporaryDirectory() as folder:
                Recorder(RECIPES[name], Path(asked.into, f"{name}.json"), Path(folder)).record(asked.passes)
        except InUse as reason:
            print(f"{name}: {reason}; the same command goes on from here", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

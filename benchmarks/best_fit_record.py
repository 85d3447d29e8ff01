"""Record a grid: every setting of a small space that is legal and fits, trained on this machine, pass after pass.

A pass visits each process of the space once, in random order, and tries its settings there in random order. The speed
of a machine drifts, so a second process holds the baseline: its steps stand before and after every few steps of a
setting, as their anchor. A setting is tried again when others took more than 2 % of the CPU meanwhile. The grid is
written after each visit; the same command goes on with the visit that was cut off, from its start. Every rank has one
thread: two that compete for two cores run ten times slower, at random.
"""

from __future__ import annotations

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.best_fit_spaces import GRIDS, groups

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cpu.other_load import CpuWindow
from trainfast_runner.machine.devices import detect_machine
from trainfast_runner.records.home import Home
from trainfast_runner.records.search_directories import conductor_lock
from trainfast_runner.running import launch
from trainfast_runner.running.planning import plan_run
from trainfast_runner.search.best.candidates import enumerate_space
from trainfast_runner.search.best.global_batch import default_global_batch
from trainfast_runner.search.best.planning.varied import vary_of
from trainfast_runner.search.candidate_spec import candidate_spec
from trainfast_runner.search.conducting.warm_process import WarmProcess
from trainfast_runner.search.journal.best import Space
from trainfast_runner.search.searches import new_search
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

    `fewer` narrows the values of other knobs for a strategy: each of its settings takes a process of its own. A
    setting has `ROUNDS` rounds a visit, each between two of the anchor.
    """

    name: str
    preset: str
    settings: tuple[str, ...]
    vary: Mapping[str, tuple[Any, ...]]
    fewer: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)

    def records(self, knobs: Mapping[str, Any]) -> bool:
        """True if the grid has this setting."""
        fewer = self.fewer.get(str(knobs.get("strategy")), {})
        return all(knobs[name] in values for name, values in fewer.items())


COMMON = {
    "batch_size": (1, 2, 4, 8),
    "optimizer": ("adamw", "adamw-foreach", "adamw-fused"),
    "strategy": ("single", "ddp", "fsdp"),
}
# The baseline. No bf16 beside it: a processor without instructions for it takes ten times as long for half of the grid.
TWO_RANKS = (
    *("devices=cpu:2", "strategy=ddp", "precision=fp32", "workers=0", "pin_memory=off", "optimizer=adamw"),
    *("batch_size=8", "grad_accum=1"),
)
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "causal-lm",
            "tiny-llama",
            (*TWO_RANKS, "data.kind=random", "seq_len=16"),
            {**COMMON, "checkpointing": ("off", "full")},
            fewer={"fsdp": {"checkpointing": ("off",)}},
        ),
        Recipe(
            "bert",
            "bert-base",
            (
                *("model.num_hidden_layers=2", "model.hidden_size=256", "model.num_attention_heads=4"),
                *("model.intermediate_size=1024", "model.vocab_size=4096", "data.kind=random", "seq_len=16"),
                *TWO_RANKS,
            ),
            {**COMMON, "checkpointing": ("off", "full")},
            fewer={"fsdp": {"checkpointing": ("off",)}},
        ),
        Recipe(
            "vit",
            "vit-large",
            (
                *("model.num_hidden_layers=2", "model.hidden_size=192", "model.num_attention_heads=4"),
                *("model.intermediate_size=768", "model.image_size=64", *TWO_RANKS),
            ),
            {**COMMON, "attention": ("auto", "eager")},
            fewer={"fsdp": {"attention": ("auto",)}},
        ),
    )
}


class InUse(Exception):
    """Others use the machine: nothing can be recorded now."""


def record(names: Sequence[str], passes: int, folder: Path = GRIDS) -> int:
    """Record these grids, or go on with them; the exit status, 1 when the machine is in use."""
    for name in names:
        try:
            record_grid(RECIPES[name], passes, folder / f"{name}.json")
        except InUse as reason:
            print(f"{name}: {reason}; the same command goes on from here", file=sys.stderr)
            return 1
    return 0


def record_grid(recipe: Recipe, passes: int, path: Path) -> None:
    """Record one grid into a file. Raises InUse, and UserError for a recipe that cannot run here."""
    spec = resolve(recipe.preset, recipe.settings)
    space = space_of(spec, recipe)
    grid = json.loads(path.read_text()) if path.exists() else _begin(recipe, space)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        # In homes of their own: one home gives a device to one run at a time.
        homes = [Home(Path(folder, name)).create() for name in ("anchor", "visits")]
        with _warm_process(_spec_of(spec, space, space.baseline_number), homes[0]) as anchor:
            recorder = _Recorder(recipe, spec, space, homes[1], anchor)
            for number in range(passes):
                for visit in recorder.record_pass(number, grid["visits"]):
                    grid["visits"].append({"pass": number, **visit})
                    _write(path, grid)


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
    candidates = [candidate for candidate in space.candidates if recipe.records(candidate.knobs)]
    return Space(
        candidates=candidates,
        baseline_number=candidates.index(space.candidates[space.baseline_number]),
        dropped=space.dropped,
    )


def _begin(recipe: Recipe, space: Space) -> dict[str, Any]:
    """The head of a grid's file."""
    return {
        "schema": 1,
        "preset": recipe.preset,
        "settings": list(recipe.settings),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, one thread a rank",
        "baseline": space.baseline_number,
        "candidates": [
            {
                "knobs": candidate.knobs,
                "process": candidate.process_knobs,
                "samples_per_step": candidate.samples_per_step,
                "ruled_out": candidate.excluded_as,
                "reason": candidate.reason,
            }
            for candidate in space.candidates
        ],
        "visits": [],
    }


class _Recorder:
    """Tries the settings of one grid beside its anchor, a process that holds the baseline."""

    def __init__(self, recipe: Recipe, spec: RunSpec, space: Space, home: Home, anchor: WarmProcess) -> None:
        self._recipe, self._spec, self._space, self._home, self._anchor = recipe, spec, space, home, anchor
        first = _trial(anchor, self._spec_of(space.baseline_number), space.baseline_number, 4 * MIN_STEPS)
        self._anchor_steps = _steps_of_a_round(first)

    def record_pass(self, number: int, recorded: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Visit each process that this pass has not recorded. Raises InUse when a setting has company every time."""
        order = random.Random(f"{self._recipe.name} {number}")
        visits = list(groups(self._space).items())
        order.shuffle(visits)
        for place, (key, members) in enumerate(visits):
            process = dict(key)
            settings = [member for member in members if self._space.candidates[member].excluded_as is None]
            if not settings or _is_recorded(recorded, number, process):
                continue
            order.shuffle(settings)
            print(f"{self._recipe.name}, pass {number + 1}, process {place + 1} of {len(visits)}", file=sys.stderr)
            yield {"process": process, **self._visit(settings)}

    def _visit(self, settings: Sequence[int]) -> dict[str, Any]:
        """One process that tries every setting."""
        began_s = time.monotonic()
        with _warm_process(self._spec_of(settings[0]), self._home) as process:
            start_s = time.monotonic() - began_s
            trials = [trial for number in settings for trial in self._alone(process, number)]
        return {
            "start_s": start_s,
            "load": os.getloadavg()[0],
            "seconds": time.monotonic() - began_s,
            "trials": trials,
        }

    def _alone(self, process: WarmProcess, number: int) -> list[dict[str, Any]]:
        """The rounds of a setting in which others left the CPU to it. Raises InUse after `MAX_TRIES`."""
        for tries in range(MAX_TRIES):
            window = CpuWindow()
            trials = self._rounds(process, number, again=tries > 0)
            others = window.others_cores()
            share = None if others is None else others / (os.cpu_count() or 1)
            if share is not None and share <= MAX_COMPANY:
                return [{**trial, "others_share": round(share, 4)} for trial in trials]
        taken = "an unknown share" if share is None else f"{100 * share:.0f} %"
        most = f"more than {100 * MAX_COMPANY:g} % of the CPU"
        raise InUse(f"others took {most} in each of {MAX_TRIES} tries, {taken} in the last")

    def _rounds(self, process: WarmProcess, number: int, again: bool) -> list[dict[str, Any]]:
        """The rounds of a setting, each between two looks at the anchor; `again` if it is the process's last one."""
        trials, steps, before = [], MIN_STEPS, self._anchor_ms()
        for place in range(ROUNDS):
            trial = _trial(process, self._spec_of(number), number, steps, more=again or place > 0)
            steps, after = _steps_of_a_round(trial), self._anchor_ms()
            trials.append({**trial, "anchor_ms": round((before + after) / 2, 3)})
            before = after
        return trials

    def _anchor_ms(self) -> float:
        """Median of the anchor's next steps."""
        baseline = self._space.baseline_number
        trial = _trial(self._anchor, self._spec_of(baseline), baseline, self._anchor_steps, more=True)
        return float(statistics.median(trial["step_ms"]))

    def _spec_of(self, number: int) -> RunSpec:
        return _spec_of(self._spec, self._space, number)


@contextmanager
def _warm_process(spec: RunSpec, home: Home) -> Iterator[WarmProcess]:
    """A process of one thread a rank that is ready for its first trial, ended with the context."""
    search = new_search(home, "grid")
    plan = plan_run(spec)
    plan = replace(plan, role="trial", search_id=search.name, env={**plan.env, "OMP_NUM_THREADS": "1"})
    with conductor_lock(search):
        process = WarmProcess(launch.start(plan, home), plan.world_size, lambda: None)
        try:
            process.ready()
            yield process
        finally:
            process.end()


def _spec_of(spec: RunSpec, space: Space, number: int) -> RunSpec:
    """The run of a candidate of the space."""
    return candidate_spec(spec, space.candidates[number].knobs)


def _trial(process: WarmProcess, spec: RunSpec, number: int, steps: int, more: bool = False) -> dict[str, Any]:
    """The steps of one setting, by the slowest rank; `more` takes further steps of the process's last setting."""
    knobs = {name: value for name, value in spec.knobs.items() if KNOBS_BY_NAME[name].changes_in_warm_process}
    answers = process.trial(knobs, 0 if more else UNTIMED, steps, more=more)
    if answers is None:
        raise UserError(f"the process of setting {number} ended: {process.result and process.result.reason}")
    if bad := next((line for line in answers.values() if line.outcome != "measured"), None):
        raise UserError(f"setting {number}: {bad.outcome}: {bad.message}")
    slowest = max(answers.values(), key=lambda line: sum(line.step_ms))
    return {
        "candidate": number,
        "step_ms": [round(step, 3) for step in slowest.step_ms],
        "untimed_ms": [round(step, 3) for step in slowest.untimed_ms],
        "switch_s": slowest.switch_s,
        "peak_allocated_bytes": slowest.peak_allocated_bytes,
        "losses": slowest.losses,
    }


def _steps_of_a_round(trial: Mapping[str, Any]) -> int:
    """The steps of this setting that take about `ROUND_S`."""
    return max(MIN_STEPS, round(1000 * ROUND_S / float(statistics.median(trial["step_ms"]))))


def _is_recorded(visits: Sequence[Mapping[str, Any]], number: int, process: Mapping[str, Any]) -> bool:
    return any(visit["pass"] == number and visit["process"] == process for visit in visits)


def _write(path: Path, grid: Mapping[str, Any]) -> None:
    """Replace the file at once."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(grid))
    new.replace(path)

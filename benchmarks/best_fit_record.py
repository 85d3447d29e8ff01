"""Record a grid: every setting of a small space that is legal and fits, trained on this machine, pass after pass.

A pass visits each process of the space once, in random order, and tries its settings there in random order. A visit
ends with the first setting once more, its anchor. It is repeated when others took more than 2 % of the CPU meanwhile.
The grid is written after each visit, and the same command goes on where another stopped. Every rank has one thread:
two that compete for two cores run ten times slower, at random.
"""

from __future__ import annotations

import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.best_fit_spaces import GRIDS, groups

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cpu.others import CpuWindow
from trainfast_runner.machine.devices import detect_machine
from trainfast_runner.records.home import Home
from trainfast_runner.records.search_directories import exclusive
from trainfast_runner.running import launch
from trainfast_runner.running.planning import plan_run
from trainfast_runner.search.best.candidates import default_global_batch, enumerate_space, spec_of
from trainfast_runner.search.best.journal import Space
from trainfast_runner.search.best.varied import vary_of
from trainfast_runner.search.processes import WarmProcess
from trainfast_runner.search.searches import new_search
from trainfast_runner.settings.knobs import BY_NAME
from trainfast_runner.settings.spec import RunSpec, resolve

UNTIMED, STEPS = 2, 12
MOST_COMPANY = 0.02
"""Others may take this share of the CPU."""
MOST_TRIES = 5
"""A visit that had company so often ends the recording: the machine is in use."""


@dataclass(frozen=True)
class Recipe:
    """One grid: a preset with settings, and the values of each varied knob.

    `fewer` narrows the values of other knobs for a strategy: each of its settings takes a process of its own. A
    setting takes `steps` timed steps a visit.
    """

    name: str
    preset: str
    settings: tuple[str, ...]
    vary: Mapping[str, tuple[Any, ...]]
    fewer: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)
    steps: int = STEPS

    def records(self, knobs: Mapping[str, Any]) -> bool:
        """True if the grid has this setting."""
        fewer = self.fewer.get(str(knobs.get("strategy")), {})
        return all(knobs[name] in values for name, values in fewer.items())


COMMON = {
    "batch_size": (2, 4, 8, 16),
    "precision": ("fp32", "bf16"),
    "optimizer": ("adamw", "adamw-fused"),
    "checkpointing": ("off", "full"),
}
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "causal-lm",
            "tiny-llama",
            ("data.kind=random", "devices=cpu", "batch_size=8", "grad_accum=2"),
            {**COMMON, "compile": ("off", "default")},
        ),
        Recipe(
            "bert",
            "bert-base",
            (
                *("model.num_hidden_layers=2", "model.hidden_size=128", "model.num_attention_heads=4"),
                *("model.intermediate_size=512", "model.vocab_size=2048", "data.kind=random", "seq_len=32"),
                *("devices=cpu:2", "strategy=ddp", "workers=0", "pin_memory=off", "batch_size=16", "grad_accum=1"),
            ),
            {**COMMON, "batch_size": (1, 2, 4, 8, 16), "strategy": ("single", "ddp", "fsdp")},
            fewer={"fsdp": {"optimizer": ("adamw",), "checkpointing": ("off",)}},
            steps=20,
        ),
        Recipe(
            "vit",
            "vit-large",
            (
                *("model.num_hidden_layers=2", "model.hidden_size=192", "model.num_attention_heads=4"),
                *("model.intermediate_size=768", "devices=cpu:2", "strategy=ddp", "precision=fp32"),
                *("optimizer=adamw", "workers=0", "pin_memory=off", "batch_size=8", "grad_accum=1"),
            ),
            {**COMMON, "strategy": ("single", "ddp", "fsdp")},
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
        home = Home(Path(folder)).create()
        for number in range(passes):
            order = random.Random(f"{recipe.name} {number}")
            visits = list(groups(space).items())
            order.shuffle(visits)
            for place, (process, members) in enumerate(visits):
                settings = [one for one in members if space.candidates[one].ruled_out is None]
                if not settings or _is_recorded(grid, number, dict(process)):
                    continue
                order.shuffle(settings)
                print(f"{recipe.name}, pass {number + 1}, process {place + 1} of {len(visits)}", file=sys.stderr)
                for visit in _visits(spec, space, settings, home, recipe.steps):
                    grid["visits"].append({"pass": number, "process": dict(process), **visit})
                    _write(path, grid)


def space_of(spec: RunSpec, recipe: Recipe) -> Space:
    """The candidates of a grid. Raises UserError for a recipe that cannot run here."""
    plan = plan_run(spec)
    machine = detect_machine(plan.versions, plan.python)

    def refuse(one: RunSpec) -> UserError | None:
        try:
            plan_run(one)
        except UserError as problem:
            return problem
        return None

    size = default_global_batch(spec, machine)
    vary, _ = vary_of(spec, recipe.vary, machine, size, refuse)
    space = enumerate_space(spec, machine, vary, size, refuse)
    kept = [one for one in space.candidates if recipe.records(one.knobs)]
    return Space(candidates=kept, baseline=kept.index(space.candidates[space.baseline]), dropped=space.dropped)


def _begin(recipe: Recipe, space: Space) -> dict[str, Any]:
    """The head of a grid's file."""
    return {
        "schema": 1,
        "preset": recipe.preset,
        "settings": list(recipe.settings),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, one thread a rank",
        "steps": recipe.steps,
        "baseline": space.baseline,
        "candidates": [
            {
                "knobs": one.knobs,
                "process": one.process,
                "samples_per_step": one.samples_per_step,
                "ruled_out": one.ruled_out,
                "reason": one.reason,
            }
            for one in space.candidates
        ],
        "visits": [],
    }


def _is_recorded(grid: Mapping[str, Any], number: int, process: Mapping[str, Any]) -> bool:
    return any(
        one["pass"] == number and one["process"] == process and one["outcome"] == "measured" for one in grid["visits"]
    )


def _visits(spec: RunSpec, space: Space, settings: Sequence[int], home: Home, steps: int) -> list[dict[str, Any]]:
    """The visits of one process, each but the last with company. Raises InUse after `MOST_TRIES`."""
    found = []
    for _ in range(MOST_TRIES):
        found.append(_visit(spec, space, settings, home, steps))
        if found[-1]["outcome"] == "measured":
            return found
    raise InUse(f"others took {100 * found[-1]['others_share']:.0f} % of the CPU in {MOST_TRIES} visits")


def _visit(spec: RunSpec, space: Space, settings: Sequence[int], home: Home, steps: int) -> dict[str, Any]:
    """One process that tries every setting, then the first one again."""
    first = space.candidates[settings[0]]
    plan = plan_run(spec_of(spec, first.knobs))
    search = new_search(home, "grid")
    plan = replace(plan, role="trial", search_id=search.name, env={**plan.env, "OMP_NUM_THREADS": "1"})
    trials = []
    began_s = time.monotonic()
    with exclusive(search):
        process = WarmProcess(launch.start(plan, home), plan.world_size, lambda: None)
        process.ready()
        start_s = time.monotonic() - began_s
        window = CpuWindow()
        for number in settings:
            trials.append(_trial(process, spec_of(spec, space.candidates[number].knobs), number, steps))
        # A process that is no warm one takes further steps of its only setting.
        only = len(settings) == 1
        trials.append(_trial(process, spec_of(spec, first.knobs), settings[0], steps, repeats=True, more=only))
        others = window.others_cores()
        process.end()
    share = None if others is None else others / (os.cpu_count() or 1)
    failed = [trial for trial in trials if trial["outcome"] != "measured"]
    company = share is None or share > MOST_COMPANY
    return {
        "outcome": "failed" if failed else "company" if company else "measured",
        "start_s": start_s,
        "others_share": share,
        "load": os.getloadavg()[0],
        "seconds": time.monotonic() - began_s,
        "trials": trials,
    }


def _trial(
    process: WarmProcess, spec: RunSpec, number: int, steps: int, repeats: bool = False, more: bool = False
) -> dict[str, Any]:
    """The steps of one setting, by the slowest rank."""
    knobs = {name: value for name, value in spec.knobs.items() if BY_NAME[name].changes_in_warm_process}
    answers = process.trial(knobs, 0 if more else UNTIMED, steps, more)
    if answers is None:
        raise UserError(f"the process of setting {number} ended: {process.result and process.result.reason}")
    slowest = max(answers.values(), key=lambda line: sum(line.step_ms))
    return {
        "candidate": number,
        "outcome": slowest.outcome,
        "step_ms": [round(step, 3) for step in slowest.step_ms],
        "untimed_ms": [round(step, 3) for step in slowest.untimed_ms],
        "switch_s": slowest.switch_s,
        "peak_allocated_bytes": slowest.peak_allocated_bytes,
        "losses": slowest.losses,
        "repeats": repeats,
    }


def _write(path: Path, grid: Mapping[str, Any]) -> None:
    """Replace the file at once."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(grid))
    new.replace(path)

"""The largest batch on five small models: our search, accelerate's finder and Lightning's, each confirmed in a fresh
run.

    python -m benchmarks.batch_search [--models "llama;bert"] [--proof-steps 3]

Each is started as its users start it: accelerate at four times the true maximum, Lightning at 2. All take the worker's
own step under the same real limit of a process, two steps a trial, pay their own imports, and end with the same
confirmation: a fresh run of all its steps. A finder whose answer runs out of memory there has not paid for it: as its
user would, it goes on with the next size of accelerate's rule, and the time to the failed confirmation is printed
beside. The true maximum is found by cold runs of every size from ours on, up to the second in a row that runs out of
memory. Lightning is installed into a folder of its own on first use.

The models are one of each family that trains text, cut down until the limit holds twenty to a hundred samples, and no
further: a step at the maximum takes seconds on two cores, as one does on a user's machine. In a smaller one the time to
start a process and to import torch, which is the same for all three, would decide. Of fewer than twenty samples a
finder that doubles is done after three doublings, and the confirmation, again the same for all, is nearly half of the
time: a GPT-2 of 128 tokens, of which 14 samples fit, took us 0.65 of accelerate's time and 0.81 of Lightning's. It has
64 tokens here. With checkpointing a step is so long that half the limit does.
"""

import argparse
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainfast_runner.records.home import Home, cache_directory
from trainfast_runner.running import launch, planning
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.conducting.run_ends import wait_for_result
from trainfast_runner.settings.spec import resolve

ROOT = Path(__file__).resolve().parents[1]
LIGHTNING = ("lightning==2.6.6", "lightning-utilities", "torchmetrics")
LIGHTNING_FOLDER = cache_directory() / "benchmarks" / "lightning"
STEPS_A_TRIAL = 2
BUDGET = 0.6
MAX_PROBES, MAX_OOMS = 6, 1
REDUCED_TO = 0.9
"""The share of a size that ran out of memory that accelerate's find_executable_batch_size tries next (1.15)."""
TOLERANCE_SHARE, TOLERANCE_BYTES = 0.03, 48 << 20
COMMON = ("memory_limit=2GiB", "data.kind=random")
"""A model's own settings come after these."""
MODELS: dict[str, tuple[str, ...]] = {
    "llama": ("tiny-llama", "seq_len=512"),
    "llama, checkpointing, two micro-batches, 1 GiB": (
        *("tiny-llama", "seq_len=512", "checkpointing=full", "grad_accum=2", "optimizer=sgd", "memory_limit=1GiB"),
    ),
    "gpt2": (
        *("gpt2", "model.n_layer=4", "model.n_embd=512", "model.n_head=8", "seq_len=64", "precision=fp32"),
        *("optimizer=adamw", "workers=0", "pin_memory=off"),
    ),
    "bert": (
        *("bert-base", "model.num_hidden_layers=2", "model.hidden_size=256", "model.num_attention_heads=4"),
        *("model.intermediate_size=1024", "workers=0", "pin_memory=off"),
    ),
    "t5": (
        *("t5-base", "model.num_layers=2", "model.num_decoder_layers=2", "model.d_model=256", "model.d_ff=1024"),
        *("model.num_heads=4", "seq_len=256", "precision=fp32", "optimizer=adamw", "workers=0", "pin_memory=off"),
    ),
}


@dataclass(frozen=True)
class FinderResult:
    """The result of one finder."""

    who: str
    batch_size: int = 0
    trials: int = 0
    ooms: int = 0
    seconds: float = 0.0
    """Wall time with the confirmation run."""
    proof: str = ""
    """The end state of the confirmation run."""
    refuted: tuple[tuple[int, float], ...] = ()
    """Sizes whose confirmation run ran out of memory, each with the wall time in seconds until then."""
    missing: str = ""
    """The reason for no result."""


@dataclass(frozen=True)
class Row:
    """One model: the true maximum, whether ours is exact, and every finder's way there."""

    model: str
    maximum: int
    exact: bool
    finders: tuple[FinderResult, ...]

    @property
    def ours(self) -> FinderResult:
        """The result of our search."""
        return self.finders[0]

    def share_of(self, who: str) -> float | None:
        """Our wall time over another finder's; None where that did not run."""
        other = next(result for result in self.finders if result.who == who)
        return None if other.missing else self.ours.seconds / other.seconds


def measure(model: str, proof_steps: int) -> Row:
    """One model with all three finders."""
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder)).create()
        # What is known of the training Python is known to all; the trace is the search's own to pay for.
        os.environ["XDG_CACHE_HOME"] = str(home.path / "cache")
        preset, settings = MODELS[model][0], [*COMMON, *MODELS[model][1:]]
        plan = planning.plan_run(resolve(preset, settings))
        report, ours = _ours(home, preset, settings, proof_steps)
        if ours.missing:
            return Row(model, 0, False, (ours,))
        ended = {ours.batch_size: ours.proof}
        maximum = _true_maximum(plan, home, ours.batch_size, ended)
        decides = _next_that_decides(report)
        if decides not in ended:
            ended[decides] = _cold(plan, home, decides, STEPS_A_TRIAL)
        exact = ours.proof == "finished" and ended[decides] == "oom"
        others = [
            _another(who, plan, home, start, proof_steps)
            for who, start in (("accelerate", 4 * maximum), ("lightning", 2))
        ]
    return Row(model, maximum, exact, (ours, *others))


def _ours(home: Home, preset: str, settings: list[str], proof_steps: int) -> tuple[dict[str, Any], FinderResult]:
    """`search max-batch` to its end, with the prediction's trace and the confirmation run."""
    argv = [sys.executable, "-m", "trainfast_tui.cli", "search", "max-batch", preset]
    argv += [word for setting in settings for word in ("--set", setting)]
    began = time.perf_counter()
    done = subprocess.run(
        [*argv, "--proof-steps", str(proof_steps), "--fresh", "--json"],
        env={**os.environ, "TRAINFAST_HOME": str(home.path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - began
    lines = done.stdout.splitlines()
    report = json.loads(lines[-1]) if lines else {}
    if done.returncode != 0:
        return report, FinderResult("ours", missing=(done.stderr.strip().splitlines() or ["no words"])[-1])
    probes = [probe for probe in report["probes"] if probe["outcome"] != "void"]
    ooms = sum(probe["outcome"] == "oom" for probe in probes)
    proof = report["proofs"][-1]["state"]
    return report, FinderResult("ours", report["max_batch"], len(probes), ooms, seconds, proof)


def _another(who: str, plan: RunPlan, home: Home, start: int, proof_steps: int) -> FinderResult:
    """Another library's finder in a process of its own, and then the confirmation run."""
    path = os.pathsep.join([str(ROOT), *_path_of_lightning(who)])
    began = time.perf_counter()
    knobs = {**plan.spec.knobs, "batch_size": start}
    run = {"schema": 1, "run_id": "benchmark", "model": plan.spec.model, "data": plan.spec.data, "knobs": knobs}
    limits = list(plan.memory_limit_bytes or ())
    run |= {"device": "cpu", "world_size": 1, "memory_limit_bytes": limits, "cache_dir": str(cache_directory())}
    question = json.dumps(
        {"run": {**run, "role": "probe", "search_id": "none"}, "start": start, "steps": STEPS_A_TRIAL}
    )
    done = subprocess.run(
        [plan.python, "-m", "benchmarks.batch_finders", who, question],
        env={**os.environ, **plan.env, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    answer = json.loads(lines[-1]) if done.returncode == 0 and lines else {}
    if "batch_size" not in answer:
        return FinderResult(
            who, missing=answer.get("missing") or (done.stderr.strip().splitlines() or ["no words"])[-1][:200]
        )
    size, refuted = answer["batch_size"], list[tuple[int, float]]()
    while (proof := _cold(plan, home, size, proof_steps)) == "oom" and size > 1:
        refuted.append((size, time.perf_counter() - began))
        size = int(size * REDUCED_TO)
    return FinderResult(who, size, answer["trials"], answer["ooms"], time.perf_counter() - began, proof, tuple(refuted))


def _path_of_lightning(who: str) -> list[str]:
    """Lightning from a folder of its own, beside the torch that is here; installed when it is not there yet."""
    if who != "lightning":
        return []
    try:
        importlib.metadata.version("lightning")
        return []
    except importlib.metadata.PackageNotFoundError:
        folder = LIGHTNING_FOLDER
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *LIGHTNING]
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return [str(folder)]


def _cold(plan: RunPlan, home: Home, batch_size: int, steps: int) -> str:
    """The end state of a fresh run at this size."""
    knobs = {**plan.spec.knobs, "batch_size": batch_size, "steps": steps, "timing_warmup": 1}
    directory = launch.start(replace(plan, spec=replace(plan.spec, knobs=knobs)), home)
    return wait_for_result(directory, lambda: None).state


def _true_maximum(plan: RunPlan, home: Home, near: int, ended: dict[int, str]) -> int:
    """The largest size that finishes: every size from `near` up to the second in a row that does not.

    `ended` has the end states of cold runs by size, and gets those of the runs made.
    """

    def finishes(size: int) -> bool:
        if size not in ended:
            ended[size] = _cold(plan, home, size, STEPS_A_TRIAL)
        return ended[size] == "finished"

    best, size, failed = 0, near, 0
    while failed < 2:
        if finishes(size):
            best, failed = size, 0
        else:
            failed += 1
        size += 1
    while best == 0 and near > 1:
        near -= 1
        best = near if finishes(near) else 0
    return best


def _next_that_decides(report: dict[str, Any]) -> int:
    """The smallest size that needs max(3 %, 48 MiB) more than our maximum."""
    fixed, per_sample = report["model"]["fixed_bytes"], report["model"]["bytes_per_sample"]
    need = fixed + per_sample * report["max_batch"]
    return int(report["max_batch"] + math.ceil(max(TOLERANCE_SHARE * need, TOLERANCE_BYTES) / per_sample))


def lines(row: Row) -> list[str]:
    """A model's part of the table."""
    rows = [f"{row.model}: true maximum {row.maximum}, ours is {'exact' if row.exact else 'NOT EXACT'}"]
    for result in row.finders:
        if result.missing:
            rows.append(f"  {result.who:<11} did not run: {result.missing}")
            continue
        share = row.share_of(result.who) if result is not row.ours else None
        words = "" if share is None else f"  ours took {share:.2f} of it{'' if share <= BUDGET else ', NOT HELD'}"
        trials = f"{result.trials:>3} sizes, {result.ooms:>2} out of memory"
        rows.append(
            f"  {result.who:<11} {result.batch_size:>5}  {trials}  {result.seconds:7.1f} s  proof {result.proof}{words}"
        )
        for size, seconds in result.refuted:
            share = row.ours.seconds / seconds
            rows.append(
                f"  {'':<11} {size:>5}  ran out of memory when confirmed at {seconds:.1f} s, ours took {share:.2f}"
            )
    return rows


def holds(row: Row) -> bool:
    """True if every bound is held on this model."""
    shares = [row.share_of(result.who) for result in row.finders[1:]]
    fast = all(share is None or share <= BUDGET for share in shares)
    return row.exact and row.ours.trials <= MAX_PROBES and row.ours.ooms <= MAX_OOMS and fast


def print_table(models: list[str] | None = None, proof_steps: int = 3) -> bool:
    """Measure and print model by model; return True if all bounds are held."""
    print(
        f"largest batch under {COMMON[0]}, unless noted: at most {MAX_PROBES} sizes, {MAX_OOMS} out of memory,"
        f" {BUDGET:g} of the others' wall time; confirmed by {proof_steps} steps; a bound not held is marked"
    )
    held = True
    for model in models or MODELS:
        row = measure(model, proof_steps)
        print("\n".join(lines(row)), flush=True)
        held &= holds(row)
    return held


def main() -> int:
    """The table; 1 when a bound is not held."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--models", help=f"some of: {'; '.join(MODELS)}; joined by ;")
    parser.add_argument("--proof-steps", type=int, default=3)
    options = parser.parse_args()
    return 0 if print_table(options.models.split(";") if options.models else None, options.proof_steps) else 1


if __name__ == "__main__":
    sys.exit(main())

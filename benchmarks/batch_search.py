"""The largest batch on five small models, confirmed in a fresh run, beside the true maximum.

    python -m benchmarks.batch_search [--models "llama;bert"] [--proof-steps 3]

The true maximum is found by cold runs of every size from the answer on, up to the second in a row that runs out of
memory. The models are one of each family that trains text, cut down until the limit holds twenty to a hundred samples.
"""

import argparse
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

from trainfast_runner.records.home import Home
from trainfast_runner.running import launch, planning
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.conducting.run_ends import wait_for_result
from trainfast_runner.settings.spec import resolve

STEPS_A_TRIAL = 2
MAX_PROBES, MAX_OOMS = 6, 1
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
class Row:
    """One model: the search's report, the true maximum, and whether the answer is exact."""

    model: str
    report: dict[str, Any]
    seconds: float
    """Wall time with the confirmation run."""
    maximum: int = 0
    exact: bool = False
    error: str = ""
    """The reason for no answer."""

    @property
    def outcomes(self) -> list[str]:
        """The outcomes of the probes that were not void."""
        return [probe["outcome"] for probe in self.report["probes"] if probe["outcome"] != "void"]

    @property
    def holds(self) -> bool:
        """True if every bound is held."""
        return self.exact and len(self.outcomes) <= MAX_PROBES and self.outcomes.count("oom") <= MAX_OOMS


def measure(model: str, proof_steps: int) -> Row:
    """Search one model, and find its true maximum."""
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder)).create()
        # What is known of the training Python is known already; the trace is the search's own to pay for.
        os.environ["XDG_CACHE_HOME"] = str(home.path / "cache")
        preset, settings = MODELS[model][0], [*COMMON, *MODELS[model][1:]]
        plan = planning.plan_run(resolve(preset, settings))
        began = time.perf_counter()
        done = _search(home, preset, settings, proof_steps)
        seconds = time.perf_counter() - began
        if done.returncode != 0:
            return Row(model, {}, seconds, error=(done.stderr.strip().splitlines() or ["no error message"])[-1])
        report = json.loads(done.stdout.splitlines()[-1])
        ended = {report["max_batch"]: report["proofs"][-1]["state"]}
        maximum = _true_maximum(plan, home, report["max_batch"], ended)
        decides = _next_that_decides(report)
        if decides not in ended:
            ended[decides] = _cold(plan, home, decides, STEPS_A_TRIAL)
        return Row(
            model, report, seconds, maximum, ended[report["max_batch"]] == "finished" and ended[decides] == "oom"
        )


def _search(home: Home, preset: str, settings: list[str], proof_steps: int) -> subprocess.CompletedProcess[str]:
    """`search max-batch` to its end, with the prediction's trace and the confirmation run."""
    argv = [sys.executable, "-m", "trainfast_tui.cli", "search", "max-batch", preset]
    argv += [word for setting in settings for word in ("--set", setting)]
    return subprocess.run(
        [*argv, "--proof-steps", str(proof_steps), "--fresh", "--json"],
        env={**os.environ, "TRAINFAST_HOME": str(home.path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


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


def line(row: Row) -> str:
    """A model's row of the table."""
    if row.error:
        return f"{row.model}: no answer: {row.error}"
    probes = f"{len(row.outcomes)} sizes, {row.outcomes.count('oom')} out of memory"
    answer = f"{row.report['max_batch']} of {row.maximum}, {'exact' if row.exact else 'NOT EXACT'}"
    return f"{row.model}: {answer}; {probes}; {row.seconds:.1f} s{'' if row.holds else '; NOT HELD'}"


def print_table(models: list[str] | None = None, proof_steps: int = 3) -> bool:
    """Measure and print model by model; return True if all bounds are held."""
    print(f"largest batch under {COMMON[0]}, unless noted: at most {MAX_PROBES} sizes, {MAX_OOMS} out of memory")
    held = True
    for model in models or MODELS:
        row = measure(model, proof_steps)
        print(line(row), flush=True)
        held &= not row.error and row.holds
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

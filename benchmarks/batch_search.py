"""The largest batch on five small models, confirmed in a fresh run, beside the true maximum.

    python -m benchmarks.batch_search [--models llama bert] [--proof-steps 3]

The true maximum is found by cold runs of every size from the answer on, up to the second in a row that runs out of
memory. The models are one of each family that trains text, cut down until the limit holds twenty to a hundred samples.
All five take 20 minutes of two idle cores.
"""

import math
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.meter import Json, cli, options, settings_of

from trainfast_runner.records.home import Home
from trainfast_runner.running import launch, planning
from trainfast_runner.search.conductor import wait_for_result
from trainfast_runner.settings.spec import resolve

STEPS_A_TRIAL = 2
MAX_PROBES, MAX_OOMS = 6, 1
TOLERANCE_SHARE, TOLERANCE_BYTES = 0.03, 48 << 20
COMMON = ("memory_limit=2GiB", "data.kind=random")
"""A model's own settings come after these."""
ON_CPU = ("workers=0", "pin_memory=off")
MODELS: dict[str, tuple[str, ...]] = {
    "llama": ("tiny-llama", "seq_len=512"),
    "llama-checkpointing": (
        *("tiny-llama", "seq_len=512", "checkpointing=full", "grad_accum=2", "optimizer=sgd", "memory_limit=1GiB"),
    ),
    "gpt2": (
        *("gpt2", "model.n_layer=4", "model.n_embd=512", "model.n_head=8", "seq_len=64", "precision=fp32"),
        *("optimizer=adamw", *ON_CPU),
    ),
    "bert": (
        *("bert-base", "model.num_hidden_layers=2", "model.hidden_size=256", "model.num_attention_heads=4"),
        *("model.intermediate_size=1024", *ON_CPU),
    ),
    "t5": (
        *("t5-base", "model.num_layers=2", "model.num_decoder_layers=2", "model.d_model=256", "model.d_ff=1024"),
        *("model.num_heads=4", "seq_len=256", "precision=fp32", "optimizer=adamw", *ON_CPU),
    ),
}


class ColdRuns:
    """Fresh runs of one model by batch size, each made once."""

    def __init__(self, preset: str, settings: list[str], home: Home) -> None:
        self._plan, self._home = planning.plan_run(resolve(preset, settings)), home
        self.ends: dict[int, str] = {}

    def end(self, batch_size: int) -> str:
        """The end state at this size."""
        if batch_size not in self.ends:
            spec = self._plan.spec
            knobs = {**spec.knobs, "batch_size": batch_size, "steps": STEPS_A_TRIAL, "timing_warmup": 1}
            directory = launch.start(replace(self._plan, spec=replace(spec, knobs=knobs)), self._home)
            self.ends[batch_size] = wait_for_result(directory, lambda: None).state
        return self.ends[batch_size]

    def maximum(self, near: int) -> int:
        """The largest size that finishes: every size from `near` up to the second in a row that does not."""
        best, size, failed = 0, near, 0
        while failed < 2:
            best, failed = (size, 0) if self.end(size) == "finished" else (best, failed + 1)
            size += 1
        while best == 0 and near > 1:
            near -= 1
            best = near if self.end(near) == "finished" else 0
        return best


def line(model: str, proof_steps: int) -> tuple[str, bool]:
    """Search one model and find its true maximum: a line of the table, and whether every bound is held."""
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder)).create()
        # What is known of the training Python is known already; the trace is the search's own to pay for.
        os.environ["XDG_CACHE_HOME"] = str(home.path / "cache")
        preset, settings = MODELS[model][0], [*COMMON, *MODELS[model][1:]]
        cold = ColdRuns(preset, settings, home)
        words = (*settings_of(settings), "--proof-steps", str(proof_steps), "--fresh")
        began_s = time.perf_counter()
        report = cli("search", "max-batch", preset, *words, env={**os.environ, "TRAINFAST_HOME": str(home.path)})
        seconds = time.perf_counter() - began_s
        if not report.get("max_batch"):
            return f"{model}: no answer: {report.get('error') or report.get('reason')}", False
        answer = report["max_batch"]
        cold.ends[answer] = report["proofs"][-1]["state"]
        maximum = cold.maximum(answer)
        exact = cold.end(answer) == "finished" and cold.end(_next_that_decides(report)) == "oom"
    outcomes = [probe["outcome"] for probe in report["probes"] if probe["outcome"] != "void"]
    ooms = outcomes.count("oom")
    held = exact and len(outcomes) <= MAX_PROBES and ooms <= MAX_OOMS
    found = f"{answer} of {maximum}, {'exact' if exact else 'NOT EXACT'}; {len(outcomes)} sizes, {ooms} out of memory"
    return f"{model}: {found}; {seconds:.1f} s{'' if held else '; NOT HELD'}", held


def _next_that_decides(report: Json) -> int:
    """The smallest size that needs max(3 %, 48 MiB) more than our maximum."""
    fixed, per_sample = report["model"]["fixed_bytes"], report["model"]["bytes_per_sample"]
    need = fixed + per_sample * report["max_batch"]
    return int(report["max_batch"] + math.ceil(max(TOLERANCE_SHARE * need, TOLERANCE_BYTES) / per_sample))


def main() -> int:
    """Measure and print model by model; 1 when a bound is not held."""
    asked = options(__doc__, models=[], proof_steps=3).parse_args()
    print(f"largest batch under {COMMON[0]}, unless noted: at most {MAX_PROBES} sizes, {MAX_OOMS} out of memory")
    all_held = True
    for model in asked.models or MODELS:
        words, held = line(model, asked.proof_steps)
        print(words, flush=True)
        all_held &= held
    return 0 if all_held else 1


if __name__ == "__main__":
    sys.exit(main())

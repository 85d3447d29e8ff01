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
from collections.abc import Callable
from functools import cache

from benchmarks.meter import cli, options, settings_of

STEPS_A_TRIAL = 2
MAX_PROBES, MAX_OOMS = 6, 1
TOLERANCE_SHARE, TOLERANCE_BYTES = 0.03, 48 << 20
COMMON = ("memory_limit=2GiB", "data.kind=random")
"""A model's own settings come after these."""
MODELS = {
    "llama": "tiny-llama seq_len=512",
    "llama-checkpointing": "tiny-llama seq_len=512 checkpointing=full grad_accum=2 optimizer=sgd memory_limit=1GiB",
    "gpt2": "gpt2 model.n_layer=4 model.n_embd=512 model.n_head=8 seq_len=64 precision=fp32 optimizer=adamw workers=0"
    " pin_memory=off",
    "bert": "bert-base model.num_hidden_layers=2 model.hidden_size=256 model.num_attention_heads=4"
    " model.intermediate_size=1024 workers=0 pin_memory=off",
    "t5": "t5-base model.num_layers=2 model.num_decoder_layers=2 model.d_model=256 model.d_ff=1024 model.num_heads=4"
    " seq_len=256 precision=fp32 optimizer=adamw workers=0 pin_memory=off",
}
"""A preset and its settings."""


def maximum(fits: Callable[[int], bool], near: int) -> int:
    """The largest size that fits: every size from `near` up to the second in a row that does not."""
    best, size, failed = 0, near, 0
    while failed < 2:
        best, failed = (size, 0) if fits(size) else (best, failed + 1)
        size += 1
    return best or next((size for size in range(near - 1, 0, -1) if fits(size)), 0)


def line(model: str, proof_steps: int) -> tuple[str, bool]:
    """Search one model and find its true maximum: a line of the table, and whether every bound is held."""
    preset, *more = MODELS[model].split()
    settings = settings_of([*COMMON, *more])
    with tempfile.TemporaryDirectory() as home:
        # What is known of the training Python is known already; the trace is the search's own to pay for.
        environment = {**os.environ, "TRAINFAST_HOME": home, "XDG_CACHE_HOME": f"{home}/cache"}

        @cache
        def end(size: int) -> str:
            """The end state of a fresh run at this size."""
            trial = settings_of([f"batch_size={size}", f"steps={STEPS_A_TRIAL}", "timing_warmup=1"])
            return str(cli("run", preset, *settings, *trial, env=environment)["state"])

        words, began_s = (*settings, "--proof-steps", str(proof_steps), "--fresh"), time.perf_counter()
        report = cli("search", "max-batch", preset, *words, env=environment)
        seconds = time.perf_counter() - began_s
        if not report.get("max_batch"):
            return f"{model}: no answer: {report.get('error') or report.get('reason')}", False
        answer = report["max_batch"]
        largest = maximum(lambda size: end(size) == "finished", answer)
        fixed, per_sample = report["model"]["fixed_bytes"], report["model"]["bytes_per_sample"]
        tolerance_bytes = max(TOLERANCE_SHARE * (fixed + per_sample * answer), TOLERANCE_BYTES)
        # The smallest size that needs max(3 %, 48 MiB) more than our maximum decides.
        beyond = int(answer + math.ceil(tolerance_bytes / per_sample))
        exact = end(answer) == "finished" and end(beyond) == "oom"
    outcomes = [probe["outcome"] for probe in report["probes"] if probe["outcome"] != "void"]
    ooms = outcomes.count("oom")
    held = exact and len(outcomes) <= MAX_PROBES and ooms <= MAX_OOMS
    found = f"{answer} of {largest}, {'exact' if exact else 'NOT EXACT'}; {len(outcomes)} sizes, {ooms} out of memory"
    return f"{model}: {found}; {seconds:.1f} s{'' if held else '; NOT HELD'}", held


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

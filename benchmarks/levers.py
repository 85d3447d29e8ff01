"""Every lever beside the plain setting, on six small models of a CPU: its loss, its memory and its step time.

    python -m benchmarks.levers [--models llama t5] [--levers loss checkpointing]

The loss difference is the greatest of any step, relative to the plain run's of the same samples, and must be within
the lever's own tolerance; the memory's bound is the prediction's. A step time has no budget: a lever is worth what it
gives on each machine. A lever that a model, an objective or the CPU does not have is a line with its reason.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.meter import Json, cli, options, print_columns, settings_of

from trainfast_runner.worker.catalog import LEVERS, LeverEntry, LeverValue

HERE = Path(__file__).parent
SMALL = (
    *("batch_size=32", "seq_len=128", "steps=5", "timing_warmup=2", "precision=fp32", "optimizer=adamw"),
    *("workers=0", "pin_memory=off", "devices=cpu"),
)
WORDS = ("model.vocab_size=8192",)
BERT = ("model.intermediate_size=1024", *WORDS)
MODELS: dict[str, tuple[str, Sequence[str]]] = {
    "llama": ("tiny-llama", WORDS),
    "gpt2": ("gpt2", ("model.n_layer=4", "model.n_embd=256", "model.n_head=4", *WORDS)),
    "bert": ("bert-base", ("model.num_hidden_layers=4", "model.hidden_size=256", "model.num_attention_heads=4", *BERT)),
    "mixtral": (
        "moe-small",
        ("model.num_hidden_layers=4", "model.hidden_size=256", "model.intermediate_size=512", *WORDS),
    ),
    "gemma2": (str(HERE / "presets" / "gemma-2.toml"), ()),
    "t5": (
        "t5-base",
        ("model.num_layers=3", "model.num_decoder_layers=3", "model.d_model=256", "model.d_ff=512", *WORDS),
    ),
}
MEMORY_WITHIN, COMPILED_WITHIN = 0.03, 0.05
"""Bounds of predicted memory, and with `compile`."""


def measure(model: str, *settings: str) -> Json:
    """The result of a run, with the losses of its steps; of a refused one the error."""
    preset, sizes = MODELS[model]
    answer = cli("run", preset, "--wait", *settings_of([*SMALL, *sizes, *settings]))
    if answer.get("state") == "finished":
        steps = Path(os.environ["TRAINFAST_HOME"], "runs", answer["run_id"], "steps.jsonl")
        answer["losses"] = [json.loads(step)["loss"] for step in steps.read_text().splitlines()]
    return answer


def rows(models: Sequence[str], levers: Sequence[str]) -> Iterator[tuple[list[str], bool]]:
    """A line for each model's plain run and each value, and True if it is within its bounds."""
    yield ["model", "lever", "loss off by", "peak predicted", "measured", "off by", "step", "to plain", ""], True
    for model in models:
        plain = measure(model)
        yield line(model, None, plain, plain)
        for entry in map(LEVERS.__getitem__, levers):
            for value in entry.values[1:]:
                yield line(model, (entry, value), measure(model, f"{entry.name}={value.name}"), plain)


def line(model: str, lever: tuple[LeverEntry, LeverValue] | None, run: Json, plain: Json) -> tuple[list[str], bool]:
    """One run's cells, and True if its loss and memory are within their bounds. A refusal is a result."""
    name = f"{lever[0].name}={lever[1].name}" if lever else "plain"
    if run.get("state") != "finished":
        refused = run.get("error", {}).get("message") or f"{run.get('state')}: {run.get('reason')}"
        return [model, name, *[""] * 6, refused], "error" in run
    loss = max(abs(one / other - 1) for one, other in zip(run["losses"], plain["losses"], strict=True))
    measured, predicted = (run["memory"][key] for key in ("peak_allocated_bytes", "predicted_bytes"))
    off, step_ms = predicted / measured - 1, run["step_ms"]["p50"]
    bound = COMPILED_WITHIN if name.startswith("compile") else MEMORY_WITHIN
    tolerance = lever[1].tolerance if lever else 0.0
    failed = ["memory"] if abs(off) > bound else []
    failed += ["loss"] if tolerance is not None and loss > tolerance else []
    difference = "trains differently" if tolerance is None else f"{loss:.1e}"
    sizes = [f"{predicted / 2**20:,.1f} MiB", f"{measured / 2**20:,.1f} MiB", f"{100 * off:+.1f} %"]
    times = [f"{step_ms:,.0f} ms", f"{step_ms / plain['step_ms']['p50']:.2f}x"]
    return [
        model,
        name,
        difference,
        *sizes,
        *times,
        " and ".join(failed) and f"NOT HELD: {' and '.join(failed)}",
    ], not failed


def main() -> int:
    """Print the table; 1 when a bound is not held."""
    asked = options(__doc__, models=[], levers=[]).parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["TRAINFAST_HOME"] = home
        lines = []
        for cells, held in rows(asked.models or list(MODELS), asked.levers or list(LEVERS)):
            print("  ".join(cells), file=sys.stderr, flush=True)
            lines.append((cells, held))
    print_columns([cells for cells, _ in lines])
    return 0 if all(held for _, held in lines) else 1


if __name__ == "__main__":
    sys.exit(main())

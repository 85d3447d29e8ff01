"""Predicted memory against the memory of real runs on this CPU.

python -m benchmarks.memory_prediction [--tables speed measured ranks]
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from unittest import mock

from benchmarks.meter import Row, at_most, cli, options, print_table, settings_of

from trainfast_runner.memory.tracing import cached_model, trace_model
from trainfast_runner.settings.spec import resolve

MEASURED_WITHIN = 0.05
RANKS_WITHIN = 0.10
"""For several processes: freed blocks that the C library keeps, 20 to 80 MiB a process, are not the training's."""
FIRST_ANSWER_S, AFTER_A_KNOB_MS = 6.0, 50.0
ANSWERS = 3
"""The median counts."""
DEEP = ("bert-large", ("batch_size=56", "seq_len=128", "precision=fp32"))
"""24 layers, for the time that a first answer takes."""
MEASURED: Sequence[tuple[str, Sequence[str], Sequence[int]]] = (
    ("tiny-llama", (), (32, 64)),
    ("bert-base", ("model.num_hidden_layers=4", "workers=0"), (8, 16)),
    ("gpt2", ("model.n_layer=3", "model.n_embd=384", "model.n_head=6", "seq_len=256", "workers=0"), (4, 8)),
)
"""Presets, settings and batch sizes of the real runs; depths and widths cut down for two cores."""
WIDE = (
    *("model.num_hidden_layers=6", "model.hidden_size=384", "model.intermediate_size=1024"),
    *("model.num_attention_heads=6", "model.num_key_value_heads=6", "devices=2", "workers=0"),
)
THREE_AXES = ("ddp+tp+pp", "fsdp+tp+pp")
RANKS: Sequence[Sequence[str]] = (
    *((f"strategy={name}", "batch_size=32") for name in ("ddp", "fsdp", "zero2", "zero3")),
    *((f"strategy={name}", "batch_size=32") for name in ("zero2-offload", "zero3-offload")),
    ("strategy=tp", "tp_degree=2", "batch_size=32"),
    ("strategy=pp", "pp_degree=2", "pp_schedule=gpipe", "micro_batches=4", "batch_size=64"),
    ("strategy=pp", "pp_degree=2", "pp_schedule=1f1b", "micro_batches=8", "batch_size=64"),
    ("strategy=pp", "pp_degree=2", "pp_schedule=interleaved", "micro_batches=4", "batch_size=32"),
    ("strategy=ddp+tp", "tp_degree=2", "batch_size=16", "devices=4"),
    ("strategy=fsdp+tp", "tp_degree=2", "batch_size=16", "devices=4"),
    ("strategy=ddp+pp", "pp_degree=2", "pp_schedule=gpipe", "micro_batches=4", "batch_size=32", "devices=4"),
    *((f"strategy={name}", "pp_degree=2", "tp_degree=2", "batch_size=32", "devices=8") for name in THREE_AXES),
)
"""tiny-llama of 52 MiB of weights in two, four or eight processes, each way of sharing it."""
MIXTURE = (
    *(
        "model.num_hidden_layers=4",
        "model.hidden_size=256",
        "model.intermediate_size=768",
        "model.num_attention_heads=4",
    ),
    *("model.vocab_size=4096", "precision=fp32", "optimizer=adamw", "workers=0", "seq_len=256", "pin_memory=off"),
)
EXPERTS: Sequence[Sequence[str]] = (
    ("strategy=tp", "ep_degree=2", "batch_size=16", "devices=2"),
    ("strategy=ddp+tp", "ep_degree=2", "batch_size=8", "devices=4"),
    ("strategy=fsdp+tp", "ep_degree=2", "batch_size=8", "devices=4"),
)
"""moe-small of 22 million parameters, its experts spread."""


def measured_rows() -> Iterator[Row]:
    """Presets in one process."""
    for preset, settings, batches in MEASURED:
        for batch in batches:
            yield _row(f"{preset} b{batch}", preset, [*settings, f"batch_size={batch}", "steps=5"], MEASURED_WITHIN)


def rank_rows() -> Iterator[Row]:
    """The fullest process, for each way of sharing."""
    for preset, sizes, rows in (("tiny-llama", WIDE, RANKS), ("moe-small", MIXTURE, EXPERTS)):
        for settings in rows:
            words = " ".join(setting.partition("=")[2] for setting in settings if "degree" not in setting)
            asked = [*sizes, *settings, "steps=3", "timing_warmup=2"]
            yield _row(f"{preset} {words}", preset, asked, RANKS_WITHIN)


def speed_rows() -> Iterator[Row]:
    """Seconds to a first answer of the command with nothing remembered, and milliseconds after a knob."""
    first_s = median(_first_answer_s(*DEEP) for _ in range(ANSWERS))
    yield at_most("first answer, 24 layers", first_s, FIRST_ANSWER_S, "s", digits=1)
    yield "guide-single-gpu, nine variants", f"{_first_answer_s('guide-single-gpu', ()):.1f} s", "", True
    spec = resolve(*DEEP)
    model, again_s = trace_model(spec), []
    for batch in (8, 16, 32):
        began_s = time.monotonic()
        cached = cached_model(spec)
        assert cached == model
        cached.predict(replace(spec, knobs={**spec.knobs, "batch_size": batch}))
        cached.max_batch(spec, 1, 24 << 30)
        again_s.append(time.monotonic() - began_s)
    yield at_most("after a knob", 1000 * max(again_s), AFTER_A_KNOB_MS, "ms", digits=1)


def _first_answer_s(preset: str, settings: Sequence[str]) -> float:
    """Seconds that `predict` takes with an empty cache, its own start and that of the training Python in it."""
    with tempfile.TemporaryDirectory() as cache:
        began_s = time.monotonic()
        cli("predict", preset, *settings_of(settings), env={**os.environ, "XDG_CACHE_HOME": cache})
        return time.monotonic() - began_s


def _row(what: str, preset: str, settings: Sequence[str], bound: float) -> Row:
    """A prediction before any run of the machine is known, against `peak_allocated_bytes` of a real run.

    Raises RuntimeError when the run does not finish.
    """
    spec = resolve(preset, settings)
    with tempfile.TemporaryDirectory() as home, mock.patch.dict(os.environ, TRAINFAST_HOME=home):
        predicted = trace_model(spec).predict(spec, int(str(spec.knobs["devices"] or 1))).total_bytes
        result = cli("run", preset, "--wait", *settings_of(settings))
    if result.get("state") != "finished":
        raise RuntimeError(f"{preset}: {result.get('reason') or result}")
    measured = result["memory"]["peak_allocated_bytes"]
    off = predicted / measured - 1
    sizes = f"{predicted / 2**20:,.1f} for {measured / 2**20:,.1f} MiB ({100 * off:+.2f} %)"
    return what, sizes, f"within {100 * bound:g} %", abs(off) <= bound


def main() -> int:
    """Print each table; 1 when a bound is not held."""
    asked = options(__doc__, tables=[]).parse_args()
    held = True
    for name, title, rows in (
        ("speed", "speed of a prediction", speed_rows()),
        ("measured", "real runs on this CPU: predicted, for peak_allocated_bytes", measured_rows()),
        ("ranks", "two, four or eight processes on this CPU: predicted, for the fullest one's peak", rank_rows()),
    ):
        if name in (asked.tables or [name]):
            print(f"\n{title}", flush=True)
            held &= print_table(list(rows)) == 0
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())

"""Predicted memory against the memory of real runs on this CPU, and against a public table of adapters on a GPU.

python -m benchmarks.memory_prediction [--tables speed measured ranks public]
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

from trainfast_runner.machine.warm_python import WARM
from trainfast_runner.memory.tracing import cached_model, trace_model
from trainfast_runner.settings.knob_values import KnobValues
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.settings.spec import RunSpec, resolve

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
    ("tiny-llama", ("method=lora",), (32, 64)),
    ("tiny-llama", ("method=qlora",), (32,)),
    (
        "gpt2",
        ("method=lora", "model.n_layer=3", "model.n_embd=384", "model.n_head=6", "seq_len=256", "workers=0"),
        (8,),
    ),
    ("bert-base", ("method=lora", "model.num_hidden_layers=4", "workers=0"), (16,)),
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


GIB = 2**30
QWEN = {
    "0.5B": (896, 4864, 24, 14, 2, 151_936),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936),
    "3B": (2048, 11_008, 36, 16, 2, 151_936),
    "7B": (3584, 18_944, 28, 28, 4, 152_064),
}
"""Qwen2.5: hidden and intermediate size, layers, heads, key-value heads, vocabulary; all but 7B tie the embeddings."""
PUBLIC: Sequence[tuple[str, str, int, int, str, float]] = (
    ("0.5B", "lora", 1024, 1, "full", 3.03),
    ("0.5B", "qlora", 1024, 1, "full", 3.12),
    ("0.5B", "qlora", 2048, 1, "full", 5.52),
    ("1.5B", "qlora", 512, 1, "full", 2.79),
    ("1.5B", "qlora", 1024, 1, "full", 4.04),
    ("1.5B", "qlora", 1024, 1, "off", 9.34),
    ("1.5B", "qlora", 1024, 2, "full", 6.53),
    ("1.5B", "qlora", 2048, 1, "full", 6.53),
    ("1.5B", "qlora", 4096, 1, "full", 11.51),
    ("3B", "qlora", 1024, 1, "full", 5.17),
    ("7B", "qlora", 1024, 1, "full", 10.00),
)
"""Model, method, length, batch, checkpointing, allocated peak in GiB: RTX 4080, torch 2.6, transformers 5.8, peft 0.19,
bitsandbytes 0.49, rank 16 on the attention projections (github.com/DaoyuanLi2816/can-i-finetune-this, July 2026)."""
ADA_WORKSPACES_BYTES = 2 * 8320 * 1024
"""cuBLAS's two workspaces on a GPU of compute capability 8.9 (`library_bytes` of the tracer)."""


def public_rows() -> Iterator[Row]:
    """Peaks that others measured on a GPU, predicted without one: traced on a CPU, as that run was and no other.

    It has no autocast: `lora` is bf16-pure and `qlora` fp32 around matrices of four bits. Its loop keeps the logits
    until the next step's, which ours does not. In fp32 torch 2.6 has no fused attention for grouped heads
    (sdp_utils.cpp, can_use_mem_efficient_attention): sdpa writes the scores there.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from trainfast_runner.worker.memory_trace.answers import traced

    for size, method, seq_len, batch, checkpointing, published in PUBLIC:
        hidden, intermediate, layers, heads, kv_heads, vocabulary = QWEN[size]
        model = {"family": "qwen2", "hidden_size": hidden, "intermediate_size": intermediate, "vocab_size": vocabulary}
        model |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
        model |= {"tie_word_embeddings": size != "7B", "max_position_embeddings": 32_768}
        knobs: KnobValues = {"method": method, "seq_len": seq_len, "batch_size": batch, "checkpointing": checkpointing}
        knobs |= {"precision": "bf16-pure" if method == "lora" else "fp32", "optimizer": "adamw-8bit"}
        data = {"objective": "causal-lm", "kind": "random"}
        spec = RunSpec(size, None, "", model, data, {**defaults(), **knobs, "attention": "sdpa"})
        backend = SDPBackend.FLASH_ATTENTION if method == "lora" else SDPBackend.MATH
        with (
            tempfile.TemporaryDirectory() as home,
            mock.patch.dict(os.environ, TRAINFAST_HOME=home, XDG_CACHE_HOME=home),
            mock.patch.object(WARM, "ask_each", lambda _executable, fields, *_more: traced(fields)),
            sdpa_kernel(backend),
        ):
            predicted = trace_model(spec).predict(spec)
        logits_bytes = batch * seq_len * vocabulary * (2 if method == "lora" else 4)
        ours = (predicted.total_bytes + logits_bytes + ADA_WORKSPACES_BYTES) / GIB
        off = ours / published - 1
        fixed = f"frozen {predicted.frozen_bytes / GIB:.2f}, quantized {predicted.quantized_bytes / GIB:.2f}"
        words = f"{size} {method} {seq_len} x {batch} {checkpointing}"
        figures = f"{ours:.2f} for {published:.2f} GiB ({100 * off:+.1f} %; {fixed})"
        yield words, figures, f"within {100 * MEASURED_WITHIN:g} %", abs(off) <= MEASURED_WITHIN


def measured_rows() -> Iterator[Row]:
    """Presets in one process."""
    for preset, settings, batches in MEASURED:
        for batch in batches:
            words = " ".join([preset, *(text for text in settings if text.startswith("method")), f"b{batch}"])
            yield _row(words, preset, [*settings, f"batch_size={batch}", "steps=5"], MEASURED_WITHIN)


def rank_rows() -> Iterator[Row]:
    """The fullest process, for each way of sharing."""
    for preset, sizes, rows in (("tiny-llama", WIDE, RANKS), ("moe-small", MIXTURE, EXPERTS)):
        for settings in rows:
            words = " ".join(setting.partition("=")[2] for setting in settings if "degree" not in setting)
            asked = [*sizes, *settings, "steps=4", "timing_warmup=3"]
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
        ("public", "a public table of adapters on a GPU: predicted without one, for the allocated peak", public_rows()),
        ("ranks", "two, four or eight processes on this CPU: predicted, for the fullest one's peak", rank_rows()),
    ):
        if name in (asked.tables or [name]):
            print(f"\n{title}", flush=True)
            held &= print_table(list(rows)) == 0
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())

"""Predicted memory against the whole model traced, and against the memory of real runs on this CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

from trainfast_runner.machine import training_python
from trainfast_runner.memory.model import MemoryModel
from trainfast_runner.memory.tracing import cached_model, trace_model, trace_uncached
from trainfast_runner.settings import presets
from trainfast_runner.settings.spec import RunSpec, resolve

BATCHES = (1, 8, 64)
TRACED_WITHIN = 0.01
MEASURED_WITHIN = 0.05
FIRST_ANSWER_S = 6.0
PAIRS = 3
"""First answers and imports, in alternation; the medians count."""
AFTER_A_KNOB_MS = 50.0
DEEP = ("bert-large", ("batch_size=56", "seq_len=128", "precision=fp32"))
"""24 layers, for the time that a first answer takes."""

NARROW = {
    "llama-8b": ("model.hidden_size=512", "model.intermediate_size=1792", "model.head_dim=16"),
    "gpt2-xl": ("model.n_embd=400",),
}
"""Widths of the presets whose full size only makes the comparison slow; depth and vocabulary are the preset's."""

MEASURED: Sequence[tuple[str, Sequence[str], Sequence[int]]] = (
    ("tiny-llama", (), (32, 64)),
    ("bert-base", ("model.num_hidden_layers=4", "workers=0"), (8, 16)),
    ("gpt2", ("model.n_layer=3", "model.n_embd=384", "model.n_head=6", "seq_len=256", "workers=0"), (4, 8)),
)
"""Presets, settings and batch sizes of the real runs; depths and widths cut down for two cores."""

RANKS_WITHIN = 0.10
"""For several processes: freed blocks that the C library keeps, 20 to 80 MiB a process, are not the training's."""
WIDE = (
    "model.num_hidden_layers=6",
    "model.hidden_size=384",
    "model.intermediate_size=1024",
    "model.num_attention_heads=6",
    "model.num_key_value_heads=6",
    "devices=2",
    "workers=0",
)
RANKS: Sequence[Sequence[str]] = (
    ("strategy=ddp", "batch_size=32"),
    ("strategy=fsdp", "batch_size=32"),
    ("strategy=tp", "tp_degree=2", "batch_size=32"),
    ("strategy=zero2", "batch_size=32"),
    ("strategy=zero3", "batch_size=32"),
    ("strategy=zero2-offload", "batch_size=32"),
    ("strategy=zero3-offload", "batch_size=32"),
    ("strategy=pp", "pp_degree=2", "pp_schedule=gpipe", "micro_batches=4", "batch_size=64"),
    ("strategy=pp", "pp_degree=2", "pp_schedule=1f1b", "micro_batches=8", "batch_size=64"),
    ("strategy=pp", "pp_degree=2", "pp_schedule=interleaved", "micro_batches=4", "batch_size=32"),
    ("strategy=ddp+tp", "tp_degree=2", "batch_size=16", "devices=4"),
    ("strategy=fsdp+tp", "tp_degree=2", "batch_size=16", "devices=4"),
    ("strategy=ddp+pp", "pp_degree=2", "pp_schedule=gpipe", "micro_batches=4", "batch_size=32", "devices=4"),
)
"""tiny-llama of 52 MiB of weights in two processes or four, each way of sharing it."""

Row = tuple[str, str, str, str, bool]
"""Subject, predicted, compared with, difference, True within the bound."""


def text_presets() -> Iterator[RunSpec]:
    """Every shipped preset that trains on text, its variants left out: they are the same models."""
    for path in sorted(presets.shipped_directory().glob("*.toml")):
        spec = resolve(path.stem)
        if spec.data["objective"] != "image-classification":
            yield resolve(path.stem, NARROW.get(path.stem, ()))


def traced_rows(specs: Iterator[RunSpec]) -> Iterator[Row]:
    """Put together from three layers, against the whole depth traced, at three batch sizes."""
    for spec in specs:
        with _empty_home():
            model, whole = trace_uncached(spec), trace_uncached(spec, whole=True)
        for batch in BATCHES:
            here = replace(spec, knobs={**spec.knobs, "batch_size": batch, "strategy": "single"})
            yield _row(f"{spec.name} b{batch}", _total(model, here), _total(whole, here), TRACED_WITHIN)


def measured_rows() -> Iterator[Row]:
    """Before any run of the machine is known, against `peak_allocated_bytes` of real runs of five steps."""
    for preset, settings, batches in MEASURED:
        for batch in batches:
            chosen = [*settings, f"batch_size={batch}", "steps=5"]
            spec = resolve(preset, chosen)
            with _empty_home():
                predicted, measured = _total(trace_uncached(spec), spec), _run(preset, chosen)
            yield _row(f"{preset} b{batch}", predicted, measured, MEASURED_WITHIN)


def rank_rows() -> Iterator[Row]:
    """The fullest process, for each way of sharing."""
    for settings in RANKS:
        chosen = [*WIDE, *settings, "steps=3", "timing_warmup=2"]
        spec = resolve("tiny-llama", chosen)
        words = " ".join(setting.partition("=")[2] for setting in settings if "degree" not in setting)
        with _empty_home():
            predicted = trace_uncached(spec).predict(spec, int(str(spec.knobs["devices"]))).total_bytes
            measured = _run("tiny-llama", chosen)
        yield _row(words, predicted, measured, RANKS_WITHIN)


@contextmanager
def _empty_home() -> Iterator[None]:
    """Nothing measured earlier corrects what is predicted in here, and runs teach nothing that outlives it."""
    before = os.environ.get("TRAINFAST_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRAINFAST_HOME"] = folder
        try:
            yield
        finally:
            del os.environ["TRAINFAST_HOME"]
            if before is not None:
                os.environ["TRAINFAST_HOME"] = before


def speed_rows() -> Iterator[Row]:
    """Seconds to a first answer of the command with nothing remembered, and milliseconds after a knob."""
    firsts_s, imports_s = zip(*((_first_answer_s(*DEEP), _import_s()) for _ in range(PAIRS)), strict=True)
    first_s, import_s = median(firsts_s), median(imports_s)
    yield "import of its class alone", f"{import_s:.1f} s", "none", "", True
    yield "first answer, 24 layers", f"{first_s:.1f} s", f"{FIRST_ANSWER_S:.0f} s", "", first_s <= FIRST_ANSWER_S
    nine_s = _first_answer_s("guide-single-gpu", ())
    yield "guide-single-gpu, nine variants", f"{nine_s:.1f} s", "none", "", True
    spec = resolve(*DEEP)
    model = trace_model(spec)
    again_s = []
    for batch in (8, 16, 32):
        began = time.monotonic()
        cached = cached_model(spec)
        assert cached == model
        cached.predict(replace(spec, knobs={**spec.knobs, "batch_size": batch}))
        cached.max_batch(spec, 1, 24 << 30)
        again_s.append(time.monotonic() - began)
    again_ms = 1000 * max(again_s)
    yield "after a knob", f"{again_ms:.1f} ms", f"{AFTER_A_KNOB_MS:.0f} ms", "", again_ms <= AFTER_A_KNOB_MS


def _first_answer_s(preset: str, settings: Sequence[str]) -> float:
    """Seconds that `predict` takes with an empty cache, its own start and that of the training Python in it."""
    command = [sys.executable, "-m", "trainfast_tui.cli", "predict", preset, "--json"]
    for setting in settings:
        command += ["--set", setting]
    with tempfile.TemporaryDirectory() as cache:
        began = time.monotonic()
        env = {**os.environ, "XDG_CACHE_HOME": cache}
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, env=env)
        return time.monotonic() - began


def _import_s() -> float:
    """Seconds that the training Python takes to import the class of `DEEP`, as a user's script does first."""
    command = [training_python.find_python(None), "-c", "from transformers import BertForMaskedLM"]
    began = time.monotonic()
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return time.monotonic() - began


def print_tables(some: int | None = None) -> bool:
    """Print the tables, row by row as they come; whether all is within bounds. `some` cuts the list of presets."""
    held = True
    specs = list(text_presets())[:some]
    for title, rows in (
        ("speed of a prediction (measured, budget)", speed_rows()),
        ("three layers traced, put together (predicted, all layers traced), within 1 %", traced_rows(iter(specs))),
        ("real runs on this CPU (predicted, peak_allocated_bytes), within 5 %", measured_rows()),
        (
            "two or four processes on this CPU (predicted, the fullest one's peak), within 10 %",
            rank_rows(),
        ),
    ):
        print(f"\n{title}")
        for what, predicted, measured, difference, within in rows:
            print(
                f"  {what:34}{predicted:>14}{measured:>14}{difference:>10}  {'held' if within else 'NOT HELD'}",
                flush=True,
            )
            held &= within
    return held


def _row(what: str, predicted: int, actual: int, bound: float) -> Row:
    off = predicted / actual - 1
    return what, f"{predicted / 2**20:,.1f} MiB", f"{actual / 2**20:,.1f} MiB", f"{100 * off:+.2f} %", abs(off) <= bound


def _total(model: MemoryModel, spec: RunSpec) -> int:
    return model.predict(spec).total_bytes


def _run(preset: str, settings: Sequence[str]) -> int:
    command = [sys.executable, "-m", "trainfast_tui.cli", "run", preset, "--json", "--wait"]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    if result.get("state") != "finished":
        raise RuntimeError(f"{preset}: {result.get('reason') or result}")
    peak: int = result["memory"]["peak_allocated_bytes"]
    return peak

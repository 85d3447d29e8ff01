"""The checks of `gpu.sh`: commands on a GPU, one entry each, in groups."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainfast_runner.worker.catalog import OPTIMIZERS

HERE = Path(__file__).parent
APART = ("search", "levers")
"""Groups that run only where they are named: minutes each."""
SPEED = ("plain-1", "run-1", "run-2", "plain-2")
"""Outer runs of a plain loop and of the product, A B B A."""
BERT = ("run", "bert-large", "precision=bf16")
TINY = ("run", "tiny-llama", "steps=12")
SMALL_SPEED = ("batch_size=32", "seq_len=128", "steps=60")


@dataclass(frozen=True, kw_only=True)
class Check:
    """A command of Python. `alone` for one that is timed; the others run side by side."""

    name: str
    group: str
    arguments: tuple[str, ...]
    alone: bool = False
    expect: int = 0
    """The exit code that is right."""
    needs: str | None = None
    """Left out where this distribution is not installed."""
    gpus: int = 1
    about_s: float | None = None
    """Seconds by its arguments, until a GPU's result is recorded; None for as long as most checks."""
    at_most: tuple[tuple[str, float, str], ...] = ()
    """Bounds: a path in the JSON of the command, the most, the unit."""
    at_least: tuple[tuple[str, float, str], ...] = ()

    @property
    def words(self) -> str:
        """The command as a person types it in the checkout."""
        is_cli = self.arguments[1] == "trainfast_tui.cli"
        words = ("trainfast-tui", *self.arguments[2:]) if is_cli else ("python", *self.arguments)
        return " ".join(words).replace(sys.executable, "python").replace(f"{HERE.parent}/", "")


def cli(name: str, group: str, *words: str, **fields: object) -> Check:
    """A check by a command of the product; words with `=` are settings."""
    command = [part for word in words for part in (("--set", word) if "=" in word else (word,))]
    command.insert(command.index("--") if "--" in command else len(command), "--json")
    return Check(name=name, group=group, arguments=("-m", "trainfast_tui.cli", *command), **fields)  # type: ignore[arg-type]


def benchmark(name: str, group: str, module: str, *words: str, **fields: object) -> Check:
    """A check by a benchmark, which judges its own bounds."""
    return Check(name=name, group=group, arguments=("-m", f"benchmarks.{module}", *words), **fields)  # type: ignore[arg-type]


def all_checks() -> Iterator[Check]:
    """Every check, group by group."""
    yield from _machine()
    yield from _trainings()
    yield from _strategies()
    yield from _several()
    yield from _timed()
    yield from _apart()


def _machine() -> Iterator[Check]:
    yield cli("monitor", "nvml", "monitor", "--once", about_s=3)
    yield cli("doctor", "nvml", "doctor", about_s=15)
    yield cli("topo", "nvml", "topo", about_s=3)
    # A ninth of those of the first H100's host.
    launches = (("calibration.launches_per_s", 10_000.0, "launches/s"),)
    yield cli("calibrate", "nvml", "doctor", "--calibrate", alone=True, at_least=launches)
    yield benchmark("nvml-truth", "nvml", "nvml_truth", "--seconds", "8", alone=True, about_s=35)
    yield benchmark("sampler-cost", "nvml", "sampler_cost", "--real", "--seconds", "10", alone=True, about_s=16)


def _trainings() -> Iterator[Check]:
    yield cli("default-preset", "models", "run", "gpt2-medium", "steps=20")
    yield cli("tiny-llama", "models", "run", "tiny-llama", "steps=30")
    yield cli("llama-1b", "models", "run", "llama-1b", "precision=bf16", "steps=10")
    loader = ("workers=4", "pin_memory=on", "batch_size=16")
    yield cli("vit-and-loader", "models", "run", "vit-large", "precision=bf16", "steps=15", *loader)
    yield cli("t5-adafactor", "models", "run", "t5-base", "precision=bf16", "steps=12")
    yield cli("moe", "models", "run", "moe-small", "precision=bf16", "steps=12")
    yield cli("convolutions", "models", "run", str(HERE / "presets/resnet-50.toml"), "precision=bf16", "steps=12")
    for precision in ("fp32", "tf32", "fp16", "bf16", "bf16-pure"):
        run = ("run", "bert-large", f"precision={precision}", "batch_size=16", "steps=12")
        yield cli(f"precision-{precision}", "precision", *run)
    for optimizer in OPTIMIZERS.values():
        run = (*BERT, f"optimizer={optimizer.name}", "steps=12")
        yield cli(f"optimizer-{optimizer.name}", "optimizer", *run, needs=optimizer.package)
    yield cli("checkpointing", "technique", *BERT, "checkpointing=full", "batch_size=16", "steps=12")
    yield cli("accumulation", "technique", *BERT, "grad_accum=4", "steps=10")
    yield cli("attention-eager", "technique", *BERT, "attention=eager", "steps=12")
    compiled = ("compile=default", "precision=bf16", "steps=20", "batch_size=32")
    yield cli("compile", "technique", "run", "bert-base", *compiled, about_s=70)
    yield cli("limit-below-parameters", "memory", "run", "bert-large", "memory_limit=1GiB", "steps=10", expect=3)


def _strategies() -> Iterator[Check]:
    for strategy in ("ddp", "fsdp"):
        yield cli(f"{strategy}-one-rank", "strategy", *TINY, f"strategy={strategy}", "devices=1", "precision=bf16")
    # The short steps of the small model have two sets of buckets for a while, the long ones of this have one.
    large = (*BERT, "strategy=ddp", "devices=1", "batch_size=16", "steps=12")
    yield cli("ddp-of-a-large-model", "strategy", *large)
    for strategy in ("zero1", "zero2", "zero3", "zero2-offload"):
        run = (*TINY, f"strategy={strategy}", "devices=1", "precision=bf16")
        about_s = 100.0 if "offload" in strategy else None  # DeepSpeed compiles its Adam
        yield cli(f"{strategy}-one-rank", "strategy", *run, needs="deepspeed", about_s=about_s)
    for engine in ("accelerate", "trainer"):
        yield cli(f"engine-{engine}", "strategy", *TINY, f"engine={engine}", "precision=bf16", needs="accelerate")
    for script, package in (
        ("hard_coded_trainer", "accelerate"),
        ("with_accelerate", "accelerate"),
        ("with_lightning", "lightning"),
    ):
        command = ("run", "--", sys.executable, str(HERE / f"scripts/{script}.py"))
        yield cli(f"script-{script}", "scripts", *command, needs=package)
    launched = ("run", "--", "deepspeed", "--num_gpus", "1", str(HERE / "scripts/nanogpt_ddp.py"))
    yield cli("script-under-deepspeed", "scripts", *launched, needs="deepspeed")


def _several() -> Iterator[Check]:
    for strategy in ("dp", "ddp", "fsdp", "tp", "naive-mp"):
        yield benchmark(f"losses-{strategy}", "several", "several_gpus", "losses", strategy, gpus=2)
    for schedule in ("gpipe", "1f1b", "interleaved"):
        words = ("losses", "pp", "--set", f"pp_schedule={schedule}")
        yield benchmark(f"losses-pp-{schedule}", "several", "several_gpus", *words, gpus=2)
    for strategy in ("zero1", "zero2", "zero3", "zero2-offload", "zero3-offload"):
        fields = {"gpus": 2, "needs": "deepspeed"}
        yield benchmark(f"losses-{strategy}", "several", "several_gpus", "losses", strategy, **fields)
    for strategy in ("ddp+tp", "fsdp+tp", "ddp+pp"):
        four = ("losses", strategy, "--devices", "4")
        yield benchmark(f"losses-{strategy}", "several", "several_gpus", *four, gpus=4)
    for p2p in ("on", "off"):
        run = ("run", "gpt2", "strategy=ddp", "devices=2", f"p2p={p2p}", "precision=bf16", "steps=30")
        yield cli(f"nccl-p2p-{p2p}", "several", *run, gpus=2)
    yield benchmark("topology-beside-nvidia-smi", "several", "several_gpus", "topology", gpus=2, about_s=5)


def _timed() -> Iterator[Check]:
    oom = ("run", "bert-large", "batch_size=256", "memory_limit=8GiB", "steps=10")
    yield cli("limit-oom", "memory", *oom, expect=3, alone=True, about_s=25)
    plain = ("bert-large", "--precision", "bf16", "--batch-size", "32", "--steps", "60")
    for name in SPEED:
        if name.startswith("plain"):
            yield benchmark(name, "speed", "plain_loop", *plain, alone=True)
        else:
            yield cli(name, "speed", *BERT, *SMALL_SPEED, alone=True)
    long_run = ("--set", "steps=10000000", "--set", "batch_size=8", "--set", "seq_len=128")
    pairs = ("--pairs", "4", "--window", "2")
    yield benchmark("attached-pairs", "slowdown", "attached", *pairs, *long_run, alone=True, about_s=75)
    drawn = (("cpu_percent", 3.0, "% of a core"), ("bytes_per_s", 20_000.0, "bytes/s"))
    view = ("--json", "--settle", "4", "--key", "1:m", "--", sys.executable, "-m", "trainfast_tui.cli")
    yield benchmark("monitor-view", "screen", "meter", *view, alone=True, about_s=18, at_most=drawn)


def _apart() -> Iterator[Check]:
    limited = ("memory_limit=16GiB", "precision=bf16", "seq_len=256")
    yield cli("max-batch-with-a-limit", "search", "search", "max-batch", "bert-large", *limited, alone=True)
    best = ("search", "best", "bert-large", "precision=bf16", "--budget", "90s")
    yield cli("best-fit", "search", *best, alone=True)
    yield cli("bench", "search", "bench", "guide-single-gpu", alone=True)
    yield benchmark("search-of-two-ranks", "search", "several_gpus", "search", alone=True, gpus=2)
    tuned = ("compile=max-autotune", "precision=bf16", "steps=20", "batch_size=32")
    yield cli("compile-max-autotune", "levers", "run", "bert-base", *tuned, about_s=240)
    yield cli("attention-flash", "levers", *BERT, "attention=flash", "steps=12", needs="flash-attn")

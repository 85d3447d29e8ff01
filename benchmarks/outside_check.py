"""A CPU run against a plain training loop of the same model: `run` must be as fast as the user's own script.

    python benchmarks/outside_check.py [--pairs 6] [--only tiny-llama bert vit] [--beside quiet busy]

Each model is trained A B B A by the loop of `plain_loop.py`, in an environment with no allocator or thread settings,
and by `trainfast-tui run`. Quiet: the ratio of the two must be at least 0.95. Beside one busy core, against a loop
whose threads sleep while they wait (OMP_WAIT_POLICY=PASSIVE): at least 0.7. A pair during which others took more than
5 % of a core is run again; a machine that disturbs more pairs than were asked for gets no verdict. Exits 1 when a
ratio is not held, 2 without a verdict.
"""

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PLAIN_LOOP = Path(__file__).with_name("plain_loop.py")
QUIET_RATIO, BUSY_RATIO, FAST_RATIO = 0.95, 0.7, 1.05
NOT_QUIET_CORES = 0.05
WARMUP = 5
ORDINARY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""The thresholds of a run's timed steps: the plain loop is tried with them where a run is faster than without."""
STEPS = {"tiny-llama": 45, "bert": 35, "vit": 80}
OURS = ("MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Variables that change what is compared; neither side inherits them."""
BUSY: list[int] = []
"""The pid of the busy process, while there is one."""
PR_SET_CHILD_SUBREAPER = 36
PRESETS = {
    "tiny-llama": """
[model]
family = "llama"
hidden_size = 192
intermediate_size = 512
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 4
vocab_size = 4096
tie_word_embeddings = false
[data]
kind = "text"
objective = "causal-lm"
[knobs]
batch_size = 8
seq_len = 128
""",
    "bert": """
[model]
family = "bert"
hidden_size = 256
intermediate_size = 1024
num_hidden_layers = 4
num_attention_heads = 4
vocab_size = 8192
[data]
kind = "random"
objective = "masked-lm"
[knobs]
batch_size = 8
seq_len = 128
""",
    "vit": """
[model]
family = "vit"
hidden_size = 192
intermediate_size = 768
num_hidden_layers = 6
num_attention_heads = 3
image_size = 128
patch_size = 16
num_labels = 10
[data]
kind = "jpeg"
objective = "image-classification"
paths = ["{folder}/pictures/*.jpg"]
[knobs]
batch_size = 8
""",
}


def main() -> int:
    """Measure what was asked for and print a line for each ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--only", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--beside", nargs="+", choices=("quiet", "busy"), default=["quiet", "busy"])
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        draw_pictures(Path(folder) / "pictures")
        for beside in options.beside:
            for name in options.only:
                status = max(status, check(name, Path(folder), options.pairs, is_busy=beside == "busy"))
    return status


def check(name: str, folder: Path, pairs: int, *, is_busy: bool) -> int:
    """Print one model's ratio; 0 when it is held, 1 when not, 2 when the machine was not quiet."""
    preset = folder / f"{name}.toml"
    preset.write_text(f'schema = 1\ntitle = "{name}"\n{PRESETS[name].replace("{folder}", str(folder))}')
    environment = clean_environment(folder)
    plain_environment = {**environment, "OMP_WAIT_POLICY": "PASSIVE"} if is_busy else environment
    ours: list[float] = []
    plain: list[float] = []
    disturbed: list[float] = []
    ordinary_rate = None
    with busy_core() if is_busy else nothing():
        run_once(preset, environment)  # Fills caches: the tokenizer and what the first start compiles.
        while len(ours) < pairs and len(disturbed) <= pairs:
            rates, others = one_pair(
                preset, environment, plain_environment, is_run_first=len(ours + disturbed) % 2 == 1
            )
            others -= 1 if is_busy else 0
            if others > NOT_QUIET_CORES:
                disturbed.append(others)
                continue
            ours.append(rates[0])
            plain.append(rates[1])
    if len(ours) < pairs:
        taken = ", ".join(f"{100 * cores:.0f}" for cores in disturbed)
        print(f"{name:12} no verdict: not quiet, others took {taken} % of a core", flush=True)
        return 2
    if not is_busy and statistics.median(ours) > FAST_RATIO * statistics.median(plain):
        ordinary_rate, _ = plain_once(preset, {**environment, **ORDINARY})
    ratios = [run / loop for run, loop in zip(ours, plain, strict=True)]
    ratio, least = statistics.median(ratios), BUSY_RATIO if is_busy else QUIET_RATIO
    verdict = "held" if ratio >= least else "NOT HELD"
    if ordinary_rate is not None:
        verdict += f" (faster by our malloc thresholds: with them the plain loop makes {ordinary_rate:.1f})"
    if disturbed:
        verdict += f" ({len(disturbed)} disturbed pairs run again)"
    where = "beside a busy core" if is_busy else "quiet"
    print(
        f"{name:12} {where:18} run {statistics.median(ours):7.1f}, plain {statistics.median(plain):7.1f} samples/s:"
        f" ratio {ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {pairs} pairs), >= {least:g}: {verdict}",
        flush=True,
    )
    return 0 if ratio >= least else 1


def one_pair(
    preset: Path, environment: Mapping[str, str], plain_environment: Mapping[str, str], *, is_run_first: bool
) -> tuple[tuple[float, float], float]:
    """Samples/s of a run and of the plain loop, one after the other, and the most cores that others took meanwhile."""
    if is_run_first:
        ours, ours_others = run_once(preset, environment)
        plain, plain_others = plain_once(preset, plain_environment)
    else:
        plain, plain_others = plain_once(preset, plain_environment)
        ours, ours_others = run_once(preset, environment)
    return (ours, plain), max(ours_others, plain_others)


def run_once(preset: Path, environment: Mapping[str, str]) -> tuple[float, float]:
    """Samples/s of `trainfast-tui run`, and the cores that others took meanwhile."""
    command = [sys.executable, "-m", "trainfast_tui.cli", "run", str(preset), "--json"]
    settings = ["--set", f"steps={STEPS[preset.stem]}", "--set", f"timing_warmup={WARMUP}"]
    result, others = watched([*command, *settings], environment)
    return result["throughput"]["samples_per_s"]["median"], others


def plain_once(preset: Path, environment: Mapping[str, str]) -> tuple[float, float]:
    """Samples/s of the plain loop, and the cores that others took meanwhile."""
    command = [sys.executable, str(PLAIN_LOOP), str(preset), "--steps", str(STEPS[preset.stem])]
    answer, others = watched([*command, "--warmup", str(WARMUP)], environment)
    return answer["samples_per_s"], others


def watched(command: Sequence[str], environment: Mapping[str, str]) -> tuple[dict[str, Any], float]:
    """The JSON object that a command prints, and the cores that others took until all it started had ended."""
    busy_s, own_s, began_s = busy(), own(), time.monotonic()
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    # A supervisor outlives its command: it is ours to collect, and its CPU time with it.
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0 if not BUSY else os.WNOHANG)[0]:
            pass
    others = (busy() - busy_s - (own() - own_s)) / (time.monotonic() - began_s)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer, max(0.0, others)


def own() -> float:
    """CPU seconds of this process and of the children it has collected."""
    return sum(os.times()[:4])


def clean_environment(folder: Path) -> dict[str, str]:
    """This environment without settings of allocators and threads, and a home of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return {**environment, "TRAINFAST_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}


def busy() -> float:
    """Seconds that the machine's cores were busy since boot."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


@contextmanager
def busy_core() -> Iterator[None]:
    """One process that never sleeps."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    BUSY.append(process.pid)
    try:
        time.sleep(1.5)
        yield
    finally:
        BUSY.clear()
        process.kill()
        process.wait()


@contextmanager
def nothing() -> Iterator[None]:
    """An idle machine."""
    yield


def draw_pictures(folder: Path) -> None:
    """Write 64 JPEG files of noise over a gradient, 320 x 240."""
    import numpy
    from PIL import Image

    folder.mkdir()
    random = numpy.random.default_rng(0)
    for number in range(64):
        base = numpy.linspace(0, 200, 320)[None, :, None] * numpy.ones((240, 1, 3))
        noise = random.normal(0, 12, (240, 320, 3))
        picture = numpy.clip(base + noise, 0, 255).astype(numpy.uint8)
        Image.fromarray(picture).save(folder / f"{number:02}.jpg", quality=90)


if __name__ == "__main__":
    sys.exit(main())

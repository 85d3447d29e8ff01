"""Checks that need two or more GPUs: losses of every strategy against `single`, the search over ranks, topology.

    python -m benchmarks.several_gpus losses STRATEGY [--devices 2] [--set knob=value ...]
    python -m benchmarks.several_gpus search
    python -m benchmarks.several_gpus topology

Each prints one JSON object; exit code 1 when its `held` is false.
"""

import json
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.meter import Json, cli, options, settings_of

from trainfast_runner.records.home import Home, home_directory
from trainfast_runner.records.run_directory import read_records
from trainfast_runner.worker.catalog import STRATEGIES

STEPS = 20
GLOBAL_BATCH = 8
MAX_APART = 1e-3
"""fp32 losses differ by the order of sums: on two gloo processes by 2e-7 at most. Untied weights differ by 4e-4 where
the loss is near log(vocabulary), so it must fall by this factor of it first."""
MIN_FALL = 0.03
ONE_BATCH = tuple(name for name, entry in STRATEGIES.items() if "dp" not in entry.axes and not entry.one_device)
"""Strategies whose devices share one batch."""
SMALL_MODEL = ("model.vocab_size=512", "seq_len=64", "lr=3e-3", "precision=fp32", f"steps={STEPS}")


def compare_losses(strategy: str, devices: int, settings: Sequence[str]) -> Json:
    """Train the same global batches with `single` and with the strategy, and compare each step's loss."""
    ranks = 1 if strategy in ONE_BATCH else devices // 2 if "+" in strategy else devices
    report: Json = {"strategy": strategy, "settings": list(settings)}
    batch = f"batch_size={GLOBAL_BATCH // ranks}"
    other = run(f"strategy={strategy}", f"devices={devices}", batch, *settings)
    if other["state"] != "finished":
        return report | {"held": False, "run": other["run_id"], "reason": other["reason"]}
    single = run(f"batch_size={GLOBAL_BATCH}")
    report |= {"single": single["run_id"], "run": other["run_id"]}
    if single["state"] != "finished":
        return report | {"held": False, "reason": single["reason"]}
    pairs = list(zip(losses_of(single["run_id"]), losses_of(other["run_id"]), strict=True))
    apart = max(abs(ours - theirs) for ours, theirs in pairs)
    fall = 1 - pairs[-1][0] / pairs[0][0]
    held = len(pairs) == STEPS and apart <= MAX_APART and fall >= MIN_FALL
    report |= {"losses": pairs, "most_apart": apart, "fall": fall, "wrapper": other["actual"]["wrapper"]}
    return report | {"samples_per_s": other["throughput"]["samples_per_s"]["median"], "held": held}


def search() -> Json:
    """The largest batch of two ranks, the second with less memory: that rank decides, and the answer is confirmed."""
    settings = ("strategy=ddp", "devices=2", "memory_limit=3GiB+2GiB", "precision=bf16")
    answer = cli("search", "max-batch", "tiny-llama", *settings_of(settings))
    fields = ("max_batch", "tightest_rank", "headroom_bytes", "proof_run_id", "seconds", "reason")
    held = answer.get("tightest_rank") == 1 and bool(answer.get("proof_run_id"))
    return {name: answer.get(name) for name in fields} | {"held": held}


def topology() -> Json:
    """Every sign of our matrix beside that of `nvidia-smi topo -m`."""
    ours = cli("topo")["matrix"]
    done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True)
    theirs = matrix_of(done.stdout)
    return {"ours": ours, "nvidia_smi": theirs, "held": ours == theirs}


def matrix_of(text: str) -> list[list[str]]:
    """The GPU rows and columns of `nvidia-smi topo -m`, which underlines its heading on a terminal."""
    plain = text.replace("\x1b[4m", "").replace("\x1b[0m", "")
    rows = [line.split() for line in plain.splitlines() if line.startswith("GPU") and not line.startswith("GPU NUMA")]
    return [row[1 : 1 + len(rows)] for row in rows]


def run(*settings: str) -> Json:
    """One run of tiny-llama to its end."""
    answer = cli("run", "tiny-llama", *settings_of([*SMALL_MODEL, *settings]))
    if "error" in answer and "state" not in answer:
        return {"state": "refused", "reason": answer["error"]["message"], "run_id": None}
    return answer


def losses_of(run_id: str) -> list[float]:
    """Rank 0's losses, step by step."""
    records = read_records(Home(home_directory()).directory(run_id))
    return [step.loss for step in records.steps[0] if step.loss is not None]


def main() -> int:
    """The command line."""
    parser = options(__doc__, devices=2, set=[])
    parser.add_argument("part", choices=("losses", "search", "topology"))
    parser.add_argument("strategy", nargs="?", default="ddp")
    asked = parser.parse_args()
    if asked.part == "losses":
        report = compare_losses(asked.strategy, asked.devices, asked.set)
    else:
        report = search() if asked.part == "search" else topology()
    print(json.dumps(report))
    return 0 if report["held"] else 1


if __name__ == "__main__":
    sys.exit(main())

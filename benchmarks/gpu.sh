#!/usr/bin/env bash
# Everything that only a GPU can tell, one JSON file per check, with device, driver and versions in each.
#   benchmarks/gpu.sh [OUTPUT_DIRECTORY]      (default: benchmarks/results/DEVICE-DATE)
# Run from the checkout, with the environment active whose trainfast-tui is meant. Changes no setting of the GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v nvidia-smi >/dev/null || { echo "no nvidia-smi here: these checks need an NVIDIA GPU" >&2; exit 2; }
python=${PYTHON:-python}
device=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr ' /' '--')
out=${1:-benchmarks/results/$device-$(date -u +%Y%m%d)}
mkdir -p "$out"
TRAINFAST_HOME=$(mktemp -d)
export TRAINFAST_HOME
trap 'rm -rf "$TRAINFAST_HOME"' EXIT
failed=0

# check NAME EXPECTED_EXIT_CODE ARGUMENT...: runs trainfast-tui and keeps what it printed as JSON.
check() {
    local name=$1 expected=$2 code=0 began
    shift 2
    began=$(date +%s.%N)
    "$python" -m trainfast_tui.cli "$@" --json >"$TRAINFAST_HOME/out" 2>"$TRAINFAST_HOME/err" || code=$?
    "$python" - "$name" "$expected" "$code" "$began" "$out/$name.json" "$TRAINFAST_HOME" "$@" <<'PY'
import importlib.metadata, json, pathlib, subprocess, sys, time

name, expected, code, began, path, home, *command = sys.argv[1:]
def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
lines = (pathlib.Path(home) / "out").read_text().splitlines()
smi = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv,noheader"]
pathlib.Path(path).write_text(json.dumps({
    "check": name,
    "command": ["trainfast-tui", *command],
    "exit_code": int(code),
    "expected_exit_code": int(expected),
    "seconds": round(time.time() - float(began), 2),
    "devices": subprocess.run(smi, capture_output=True, text=True, check=True).stdout.splitlines(),
    "versions": {p: version(p) for p in ("torch", "transformers", "bitsandbytes", "nvidia-ml-py", "trainfast-tui")},
    "output": json.loads(lines[-1]) if lines else None,
    "stderr_tail": (pathlib.Path(home) / "err").read_text().splitlines()[-5:] if code != expected else [],
}, indent=1) + "\n")
PY
    if [ "$code" = "$expected" ]; then echo "ok    $name"; else echo "FAIL  $name: exit code $code, not $expected"; failed=1; fi
}

check monitor 0 monitor --once
check doctor 0 doctor
# What NVML costs and tells here: latency of each call, live throttle counters, energy against integrated power.
measure() {
    local name=$1
    shift
    if "$python" -m "$@" >"$out/$name.txt" 2>&1; then echo "ok    $name"; else echo "FAIL  $name"; failed=1; fi
}
measure nvml-truth benchmarks.nvml_truth --seconds 30 -o "$out/nvml-truth.json"
measure sampler-cost benchmarks.sampler_cost --real --seconds 30
measure monitor-side-by-side benchmarks.monitor --real --no-attached
measure attached-pairs benchmarks.attached --pairs 30 --set steps=10000000 --set batch_size=8 --set seq_len=128

check default-preset 0 run gpt2-medium --set steps=30
check tiny-llama 0 run tiny-llama --set steps=30
for precision in fp32 tf32 fp16 bf16 bf16-pure; do
    check "precision-$precision" 0 run bert-large --set "precision=$precision" --set batch_size=16 --set steps=20
done
for optimizer in adamw adamw-loop adamw-foreach adamw-fused adamw-8bit adafactor sgd; do
    check "optimizer-$optimizer" 0 run bert-large --set "optimizer=$optimizer" --set precision=bf16 --set steps=15
done
check checkpointing 0 run bert-large --set checkpointing=full --set precision=bf16 --set batch_size=16 --set steps=15
check accumulation 0 run bert-large --set grad_accum=4 --set precision=bf16 --set steps=15
check attention-eager 0 run bert-large --set attention=eager --set precision=bf16 --set steps=15
check loader 0 run bert-large --set workers=4 --set pin_memory=on --set precision=bf16 --set steps=20
check ddp-one-rank 0 run tiny-llama --set strategy=ddp --set devices=1 --set steps=20
check limit-oom 3 run bert-large --set batch_size=256 --set memory_limit=8GiB --set steps=10
check limit-below-parameters 3 run bert-large --set memory_limit=1GiB --set steps=10
# What was predicted for each of the runs above, beside what it took; a second run of the same is corrected by the first.
check memory-once 0 run bert-large --set batch_size=24 --set steps=10
check memory-again 0 run bert-large --set batch_size=24 --set steps=10
measure memory-predicted-and-measured benchmarks.memory_prediction
exit $failed

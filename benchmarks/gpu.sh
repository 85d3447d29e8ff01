#!/usr/bin/env bash
# Checks that need a GPU, one JSON file per check, with device, driver and versions in each.
#
#   benchmarks/gpu.sh [-n] [-o DIRECTORY] [-l SECONDS] [-k PATTERN] [GROUP ...]
#
#   -o   where the files go (default: benchmarks/results/DEVICE-DATE)
#   -n   only print the checks: name, expected exit code, command
#   -l   the longest that one check may take (default: 240)
#   -k   only the checks whose names match, as 'precision-*'
#   groups, all of them by default, each meant to end within some minutes on one fast GPU:
#     nvml       readings, latency of each call, live counters, energy against integrated power, the sampler
#     first      the default preset and the smallest
#     precision  every precision
#     optimizer  every optimizer; those of bitsandbytes where it is installed
#     technique  checkpointing, accumulation, attention, compile, loader, energy
#     strategy   ddp, fsdp and ZeRO with one rank, the other engines; where their packages are installed
#     several    every strategy of several GPUs with its losses against single, NCCL with and without p2p, a search of
#                two ranks, topology; with fewer GPUs each says that it was left out
#     memory     limits, out of memory, predicted against measured, the largest batch
#     slowdown   pairs with and without an attached app; PAIRS and WINDOW (seconds) make it shorter or longer
#     screen     the monitor, and nvitop and gpustat beside it where they are installed or can be
#   run is first, precision, optimizer, technique and strategy. How long all of it took is in total-GROUP....json.
#
# Run from anywhere with the environment active that trains and has what trainfast-tui needs, or name its interpreter with
# PYTHON; trainfast-tui itself is this checkout's. Changes no setting of the GPU. A check that fails stops no other.
# Exit code: 0 all passed, 1 some did not, 2 there is no GPU to check.
set -uo pipefail
here=$PWD
cd "$(dirname "$0")/.." || exit 2

out="" limit=240 only_say="" only="*"
while getopts no:l:k: option; do
    case $option in
        n) only_say=1 ;;
        o) case $OPTARG in /*) out=$OPTARG ;; *) out=$here/$OPTARG ;; esac ;;
        l) limit=$OPTARG ;;
        k) only=$OPTARG ;;
        *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
groups=("$@")
python=${PYTHON:-python3}
[ ${#groups[@]} -gt 0 ] || groups=(nvml first precision optimizer technique strategy several memory slowdown screen)

# Finds the GPU and a Python that can use it, and where the files go; ends the script where there is none.
ready() {
    command -v nvidia-smi >/dev/null || { echo "no GPU: there is no nvidia-smi here, and these checks need an NVIDIA GPU" >&2; exit 2; }
    device=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr -c 'A-Za-z0-9.\n' '-')
    [ -n "$device" ] || { echo "no GPU: nvidia-smi lists none" >&2; exit 2; }
    command -v "$python" >/dev/null || { echo "there is no $python: name one with PYTHON" >&2; exit 2; }
    export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD/runner:$PWD/tui"
    "$python" -c "import trainfast_tui.cli, textual, msgspec, pynvml, psutil, platformdirs, tomlkit" ||
        { echo "$python lacks what trainfast-tui needs" >&2; exit 2; }
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        { echo "no GPU for $python: its torch sees none" >&2; exit 2; }
    out=${out:-benchmarks/results/$device-$(date -u +%Y%m%d)}
    mkdir -p "$out" || exit 2
    TRAINFAST_HOME=$(mktemp -d)
    export TRAINFAST_HOME
    trap 'rm -rf "$TRAINFAST_HOME"' EXIT
}
failed=0
[ -n "$only_say" ] || ready

# check NAME EXPECTED_EXIT_CODE ARGUMENT...: runs trainfast-tui with --json.
check() {
    local name=$1 expected=$2
    shift 2
    # shellcheck disable=SC2053  # a pattern
    [[ $name == $only ]] || return 0
    [ -z "$only_say" ] || { echo "$name $expected trainfast-tui $*"; return; }
    "$python" -m benchmarks.gpu_check --expect "$expected" --limit "$limit" -o "$out" ${needs:+--needs "$needs"} ${gpus:+--gpus "$gpus"} \
        "$name" -- -m trainfast_tui.cli "$@" --json || failed=1
}

# measure NAME SECONDS_ALLOWED MODULE ARGUMENT...: runs a benchmark.
measure() {
    local name=$1 allowed=$2
    shift 2
    # shellcheck disable=SC2053
    [[ $name == $only ]] || return 0
    [ -z "$only_say" ] || { echo "$name 0 -m $*"; return; }
    "$python" -m benchmarks.gpu_check --limit "$allowed" -o "$out" ${needs:+--needs "$needs"} ${gpus:+--gpus "$gpus"} \
        "$name" -- -m "$@" || failed=1
}

group_nvml() {
    check monitor 0 monitor --once
    check doctor 0 doctor
    check calibrate 0 doctor --calibrate
    check topo 0 topo
    measure nvml-truth 240 benchmarks.nvml_truth --seconds 30
    measure sampler-cost 120 benchmarks.sampler_cost --real --seconds 30
}

group_run() { group_first; group_precision; group_optimizer; group_technique; group_strategy; }

group_first() {
    check default-preset 0 run gpt2-medium --set steps=30
    check tiny-llama 0 run tiny-llama --set steps=30
}

group_precision() {
    local precision
    for precision in fp32 tf32 fp16 bf16 bf16-pure; do
        check "precision-$precision" 0 run bert-large --set "precision=$precision" --set batch_size=16 --set steps=20
    done
}

group_optimizer() {
    local optimizers optimizer needs
    optimizers=$(PYTHONPATH="runner${PYTHONPATH:+:$PYTHONPATH}" "$python" -c '
from trainfast_runner.worker.catalog.optimizers import OPTIMIZERS
for optimizer in OPTIMIZERS.values():
    print(optimizer.name, optimizer.package or "")') || { echo "$python cannot list the optimizers" >&2; failed=1; return; }
    while read -r optimizer needs; do
        needs=$needs check "optimizer-$optimizer" 0 \
            run bert-large --set "optimizer=$optimizer" --set precision=bf16 --set steps=15 </dev/null
    done <<<"$optimizers"
}

group_technique() {
    check checkpointing 0 run bert-large --set checkpointing=full --set precision=bf16 --set batch_size=16 --set steps=15
    check accumulation 0 run bert-large --set grad_accum=4 --set precision=bf16 --set steps=15
    check attention-eager 0 run bert-large --set attention=eager --set precision=bf16 --set steps=15
    check compile 0 run tiny-llama --set compile=default --set steps=20
    check loader 0 run bert-large --set workers=4 --set pin_memory=on --set precision=bf16 --set steps=20
    check energy-and-throttling 0 run bert-large --set precision=bf16 --set batch_size=64 --set steps=100
}

group_strategy() {
    local engine strategy needs
    for strategy in ddp fsdp; do
        check "$strategy-one-rank" 0 run tiny-llama --set "strategy=$strategy" --set devices=1 --set steps=20
    done
    for strategy in zero2 zero3; do
        needs=deepspeed check "$strategy-one-rank" 0 \
            run tiny-llama --set "strategy=$strategy" --set devices=1 --set precision=bf16 --set steps=20
    done
    for engine in accelerate trainer; do
        needs=accelerate check "engine-$engine" 0 run tiny-llama --set "engine=$engine" --set precision=bf16 --set steps=20
    done
}

group_several() {
    local gpus=2 needs="" strategy schedule p2p
    for strategy in dp ddp fsdp tp naive-mp; do
        measure "losses-$strategy" 240 benchmarks.several_gpus losses "$strategy"
    done
    for schedule in gpipe 1f1b interleaved; do
        measure "losses-pp-$schedule" 240 benchmarks.several_gpus losses pp --set "pp_schedule=$schedule"
    done
    for strategy in zero1 zero2 zero3 zero2-offload zero3-offload; do
        needs=deepspeed measure "losses-$strategy" 240 benchmarks.several_gpus losses "$strategy"
    done
    for strategy in ddp+tp fsdp+tp ddp+pp; do
        gpus=4 measure "losses-$strategy" 240 benchmarks.several_gpus losses "$strategy" --devices 4
    done
    for p2p in on off; do
        check "nccl-p2p-$p2p" 0 run gpt2 --set strategy=ddp --set devices=2 --set "p2p=$p2p" --set precision=bf16 --set steps=30
    done
    measure search-of-two-ranks 420 benchmarks.several_gpus search
    measure topology-beside-nvidia-smi 60 benchmarks.several_gpus topology
}

group_memory() {
    check limit-oom 3 run bert-large --set batch_size=256 --set memory_limit=8GiB --set steps=10
    check limit-below-parameters 3 run bert-large --set memory_limit=1GiB --set steps=10
    # A second run of the same is corrected by the first.
    check memory-once 0 run bert-large --set batch_size=24 --set steps=10
    check memory-again 0 run bert-large --set batch_size=24 --set steps=10
    check memory-bf16 0 run bert-large --set batch_size=64 --set precision=bf16 --set steps=10
    check memory-checkpointing 0 run bert-large --set batch_size=64 --set checkpointing=full --set steps=10
    check max-batch-with-a-limit 0 search max-batch bert-large --set memory_limit=16GiB --set precision=bf16
    # Predicted beside measured for every run that this script made so far.
    measure memory-predicted-and-measured 60 benchmarks.memory_prediction
}

group_slowdown() {
    measure attached-pairs 900 benchmarks.attached --pairs "${PAIRS:-20}" --window "${WINDOW:-3}" \
        --set steps=10000000 --set batch_size=8 --set seq_len=128
}

group_screen() {
    measure monitor-side-by-side 420 benchmarks.monitor --real --no-attached
}

for group in "${groups[@]}"; do
    if declare -F "group_$group" >/dev/null; then "group_$group"; else echo "there is no group $group" >&2; failed=1; fi
done
if [ -z "$only_say" ]; then
    printf '{"groups": "%s", "checks": "%s", "seconds": %d, "passed": %s, "ended": "%s"}\n' "${groups[*]}" "$only" "$SECONDS" \
        "$([ $failed = 0 ] && echo true || echo false)" "$(date -u +%FT%TZ)" >"$out/total-$(IFS=-; echo "${groups[*]}").json"
    echo "$SECONDS s in all; the files are in $out"
fi
exit $failed

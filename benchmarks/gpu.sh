#!/usr/bin/env bash
# Checks that need a GPU, in ten minutes: six lanes side by side where nothing is timed, then the timed ones alone.
#
#   benchmarks/gpu.sh [-n] [-o FILE] [-l SECONDS] [-k PATTERN] [GROUP ...]      (-h lists the groups)
#
# Run it from anywhere with the environment active that trains, or name its interpreter with PYTHON; trainfast-tui itself
# is this checkout's. It changes no setting of the GPU. Exit code: 0 all passed, 1 some did not, 2 there is no GPU.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || exit 2
export PYTHONPATH="$root:$root/runner:$root/tui${PYTHONPATH:+:$PYTHONPATH}"
for python in "${PYTHON:-python3}" "$root/.venv/bin/python"; do
    "$python" -c "import textual, msgspec, pynvml, psutil, platformdirs, tomlkit" 2>/dev/null && exec "$python" -m benchmarks.gpu_check "$@"
done
echo "${PYTHON:-python3} lacks what trainfast-tui needs; name an interpreter with PYTHON" >&2
exit 2

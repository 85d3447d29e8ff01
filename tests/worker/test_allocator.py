"""Memory is measured in steps that are not timed, and time in steps whose memory is not measured."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from trainfast_runner.machine.training_python import WORKER_FOLDER
from trainfast_runner.worker.memory.allocator import Allocator

KEPT_ALLOCATOR = """
import sys; sys.path.insert(0, sys.argv[1])
import bootstrap
from trainfast_worker.memory.allocator import Allocator
found = Allocator()
print(found.name, found.thresholds, found.kept_reason, sep="|")
"""
STRICT_ORDINARY_STRICT = """
import sys; sys.path.insert(0, sys.argv[1])
import bootstrap
from trainfast_worker.memory.allocator import Allocator
allocator = Allocator()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def blocks():
    return [bytearray(b"x" * (1 << 20)) for _ in range(64)]
def full_and_left():
    before = resident()
    held = blocks()
    full = resident()
    del held
    print(full - before, resident() - before)
allocator.set_strict()
full_and_left()
allocator.set_ordinary()
earlier = blocks()
pinned = [bytearray(1000) for _ in range(1000)]
del earlier
kept = resident()
allocator.set_strict_again()
print(kept - resident())
full_and_left()
allocator.set_ordinary()
"""


@pytest.mark.ci
@pytest.mark.long
def test_peaks_come_from_the_warm_up_and_are_null_in_timed_steps(train):
    run = train(cold=True, steps=20)
    peaks = [step["peak_allocated_bytes"] for step in run.steps()]
    assert all(peaks[:2])
    assert peaks[:2] == [step["peak_reserved_bytes"] for step in run.steps()[:2]]
    assert peaks[:2] == [max(step["phase_peaks"].values()) for step in run.steps()[:2]]
    assert peaks[2:] == [None] * 18
    assert [step["phase_peaks"] for step in run.steps()][2:] == [None] * 18
    assert run.record("cpu")["thresholds"] == "strict in warm-up"


@pytest.mark.ci
@pytest.mark.long
def test_under_a_memory_limit_every_step_is_measured(train):
    run = train(steps=5, timing_warmup=2, memory_limit_bytes=[1 << 30])
    assert all(step["peak_allocated_bytes"] for step in run.steps())
    assert run.record("cpu")["thresholds"] == "strict"


# Beside the tests of one process, whose trainings are forked from one process too.
@pytest.mark.xdist_group("one-process")
@pytest.mark.long
@pytest.mark.ci
def test_one_warm_up_step_measures_no_memory(train):
    run = train(steps=3, timing_warmup=1)
    assert [step["peak_allocated_bytes"] for step in run.steps()] == [None] * 3
    assert run.record("cpu")["thresholds"] == "ordinary"


@pytest.mark.ci
@pytest.mark.long
def test_the_users_own_malloc_settings_are_kept(start, environment):
    folder, command = start(steps=3, timing_warmup=2)
    own = {**environment, "MALLOC_ARENA_MAX": "4"}
    subprocess.run(command, env=own, cwd=folder, capture_output=True, timeout=400, check=True)
    steps, worker = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("steps.jsonl", "worker.jsonl")
    )
    assert [step["peak_allocated_bytes"] for step in steps] == [None] * 3
    found = next(line for line in worker if line["kind"] == "cpu")
    assert (found["thresholds"], found["kept_because"]) == ("kept", "MALLOC_ARENA_MAX is set")


def test_a_preloaded_allocator_is_kept_and_named(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "own.c", tmp_path / "libownmalloc.so"
    source.write_text(
        "#include <stddef.h>\nextern void *__libc_malloc(size_t);\n"
        "void *malloc(size_t n) { return __libc_malloc(n); }\n"
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", KEPT_ALLOCATOR, str(WORKER_FOLDER)],
        env={**environment, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=True,
    )
    name, thresholds, why = done.stdout.strip().split("|")
    assert (name, thresholds) == ("libownmalloc.so", "kept")
    assert "malloc is libownmalloc.so" in why


def test_freed_blocks_go_back_under_strict_thresholds_only():
    """Ordinary ones keep them, and a process that is strict again neither keeps nor reuses what it freed."""
    command = [sys.executable, "-c", STRICT_ORDINARY_STRICT, str(WORKER_FOLDER)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (full, left), (returned,), (full_again, left_again) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert min(full, returned, full_again) > 60 << 20
    assert left < 50 << 20
    assert left_again < 1 << 20


def test_glibc_tunables_of_malloc_are_the_users_own():
    assert Allocator({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=2"}).thresholds == "kept"
    assert Allocator({"GLIBC_TUNABLES": "glibc.cpu.x86_shstk=off"}).thresholds == "ordinary"

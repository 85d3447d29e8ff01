"""Starts real workers on hand-written run directories, and reads what they leave there."""

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from worker_knobs import knob_values, llama

from forking import Forks
from trainfast_runner.machine.training_python import extensions_directory, search_path

WORKER = Path(__file__).parents[2] / "runner" / "trainfast_runner" / "worker"
TINY = {"llama": llama(), "bert": llama(family="bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)}
SOURCES = {"kind": "files", "paths": sorted(map(str, Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py")))}
"""A megabyte of the 8 MB that `data.kind=text` reads: its tokens take a second, not ten."""
KNOBS = {
    "precision": "fp32", "batch_size": 8, "grad_accum": 1, "seq_len": 32, "lr": 5e-3, "steps": 6, "timing_warmup": 2,
    "strategy": "single", "seed": 7,
}  # fmt: skip


@dataclass
class Run:
    """A finished worker's directory."""

    folder: Path
    code: int
    stderr: str

    def steps(self, rank=0):
        return _lines(self.folder / f"steps{'' if rank == 0 else f'.rank{rank}'}.jsonl")

    def losses(self, rank=0):
        return [step["loss"] for step in self.steps(rank)]

    def records(self, kind, rank=0):
        name = f"worker{'' if rank == 0 else f'.rank{rank}'}.jsonl"
        return [line for line in _lines(self.folder / name) if line["kind"] == kind]

    def record(self, kind, rank=0):
        """The last record of a kind, which is the one that counts."""
        found = self.records(kind, rank)
        assert found, f"no {kind} record; the worker said:\n{self.stderr[-3000:]}"
        return found[-1]


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


LONG = ["compile", "engines", "images_and_seq2seq", "larger_than_a_device", "optimizers", "pipeline", "sharded", "zero"]
"""Files whose tests start many trainings of several processes: `make test-long` runs them, `make test` does not."""


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.stem.removeprefix("test_") in LONG:
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def cache_dir(cache):
    """The folder in which a worker looks for tokenized data."""
    return cache / "trainfast-tui"


@pytest.fixture(scope="session")
def start(tmp_path_factory, cache_dir):
    """Write a `run.json`; returns the run directory and the command that trains it."""

    def write(model="llama", data=None, ranks=1, memory_limit_bytes=None, cache=None, **knobs):
        folder = tmp_path_factory.mktemp("run")
        asked = {"objective": "causal-lm", "paths": [], **(data or {})}
        spec = {
            "schema": 1, "run_id": folder.name, "model": TINY[model] if isinstance(model, str) else model,
            "data": asked if "kind" in asked else {**asked, **SOURCES},
            "knobs": {**knob_values(**KNOBS), **knobs, "a_knob_of_tomorrow": 1}, "device": "cpu", "world_size": ranks,
            "memory_limit_bytes": memory_limit_bytes, "cache_dir": str(cache or cache_dir),
        }  # fmt: skip
        (folder / "run.json").write_text(json.dumps(spec))
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        launcher = [*torchrun, "--max-restarts", "0"] if ranks > 1 else []
        return folder, [sys.executable, *launcher, str(WORKER / "bootstrap.py"), str(folder)]

    return write


@pytest.fixture(scope="session")
def environment():
    """The environment that the launcher sets for a CPU run."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "deepspeed") if find_spec(name)}
    deepspeed = {
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(extensions_directory(sys.executable, versions)),
        "PATH": search_path(sys.executable),
    }
    return {**os.environ, **deepspeed, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def train(start, environment):
    """Train to the end; equal requests share one run.

    A run that is `cold`, has a memory limit or is compiled starts as the product starts it: a process of its own, or
    torchrun. All others are forked from a process with the imports done, whose heap is no measure of memory.
    """
    warm = Forks(Path(__file__).with_name("warm_rank.py"), environment)
    done = {}

    def run(cold=False, **request):
        key = json.dumps([cold, request], sort_keys=True, default=str)
        if key not in done:
            folder, command = start(**request)
            compiled = request.get("compile", "off") != "off"
            # Compiling takes half a minute of a free core, and several times that of a busy one.
            patience_s = 900 if compiled else 400
            if cold or compiled or "memory_limit_bytes" in request:
                ended = subprocess.run(
                    command, env=environment, cwd=folder, capture_output=True, text=True, timeout=patience_s
                )
                done[key] = Run(folder, ended.returncode, ended.stderr)
            else:
                with ranks_of(environment, request.get("ranks", 1)) as ranks:
                    forked = warm.run([str(folder)], ranks, folder, patience_s)
                done[key] = Run(folder, forked.code, forked.err)
        return done[key]

    yield run
    warm.close()


@contextmanager
def ranks_of(environment, world_size):
    """The environment of each rank, and for as long as the context lasts the store at which they meet.

    As torchrun's agent does: a port that a rank chose could be taken before the rank listens.
    """
    if world_size == 1:
        yield [environment]
        return
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {
        "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    yield [{**environment, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]

"""A lever added as CONTRIBUTING says, to a copy of the program: an entry, one file, and a field of the record."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENTRY = """
TOY = LeverEntry(
    name="toy",
    group="memory",
    what="Sound of a run.",
    values=(
        LeverValue(name="quiet", trainer_fields=()),
        LeverValue(name="loud", path="toy:speak", what="heard", strategies=("single",), is_searched=True),
    ),
    actual="toy",
)
"""
FILE = '''
def speak(model, knobs):
    """Make the model loud."""
    model.sound = knobs.lever("toy")


def actual(model):
    """Return `toy`, read from the live model."""
    return {"toy": getattr(model, "sound", "quiet")}
'''


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Run a command line with the lever `toy`; returns its JSON."""
    copy = tmp_path_factory.mktemp("copy")
    for folder in ("runner", "tui", "presets"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    worker = copy / "runner" / "trainfast_runner" / "worker"
    catalog = worker / "catalog" / "levers.py"
    text = (
        catalog.read_text()
        .replace("\nLEVERS = {", f"{ENTRY}\n\nLEVERS = {{")
        .replace("ALLOCATOR)}", "ALLOCATOR, TOY)}")
    )
    catalog.write_text(text)
    (worker / "levers" / "toy.py").write_text(FILE)
    records = copy / "runner" / "trainfast_runner" / "records" / "run_lines.py"
    field = "    kernels: str | None = None\n"
    records.write_text(records.read_text().replace(field, field + "    toy: str | None = None\n"))
    paths = os.pathsep.join(str(copy / folder) for folder in ("runner", "tui"))
    environment = {**os.environ, "PYTHONPATH": paths, "TRAINFAST_HOME": str(copy / "home")}

    def run(*settings):
        options = [word for setting in settings for word in ("--set", setting)]
        command = [sys.executable, "-m", "trainfast_tui.cli", "run", "tiny-llama", *options, "--json"]
        done = subprocess.run(command, env=environment, cwd=copy, capture_output=True, text=True, timeout=400)
        assert done.stdout, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_the_knob_is_refused_by_its_own_rule_and_what_ran_is_recorded(program):
    assert program("toy=silent")["error"]["allowed"] == ["quiet", "loud"]
    refused = program("toy=loud", "strategy=ddp", "devices=2")["error"]
    assert refused["message"].startswith("toy=loud works with strategy single, not with strategy=ddp")
    assert (refused["key"], refused["nearest"]) == ("toy", "toy=quiet, or strategy=single")
    small = ("steps=2", "timing_warmup=0", "batch_size=1", "seq_len=32", "data.kind=random", "data.paths=[]")
    result = program("toy=loud", *small)
    assert (result["state"], result["knobs"]["toy"], result["actual"]["toy"]) == ("finished", "loud", "loud")

"""The accelerator that a Python's torch was built for, by torch's own version file."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainfast_runner.worker.programs import inspect_model

SCRIPT = Path(inspect_model.__file__)
UNTAGGED_CPU = "__version__ = '2.13.0'\ncuda: str | None = None\nhip: str | None = None\n"
UNTAGGED_CUDA = "__version__ = '2.13.0'\ncuda = '13.0'\nhip = None\n"
ROCM = "__version__ = '2.13.0+rocm7.0'\ncuda = None\nhip = '7.0.51831'\n"


def ask(folder=None):
    environment = os.environ if folder is None else {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["versions"]


@pytest.mark.parametrize(
    ("file", "cuda", "hip"),
    [(UNTAGGED_CPU, None, None), (UNTAGGED_CUDA, "13.0", None), (ROCM, None, "7.0.51831"), ("", None, None)],
)
def test_rocm_and_untagged_builds_are_distinguished(tmp_path, file, cuda, hip):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('torch is not imported for this')\n")
    (package / "version.py").write_text(file)
    found = ask(tmp_path)
    assert (found["torch.version.cuda"], found["torch.version.hip"]) == (cuda, hip)


def test_the_answer_is_torchs_own():
    found = ask()
    assert found["torch"] == importlib.metadata.version("torch")
    assert found["torch.version.cuda"] == torch.version.cuda
    assert found["torch.version.hip"] == torch.version.hip
    assert (found["torch.version.cuda"] is not None) == torch.backends.cuda.is_built()

"""Facts about a training Python and a model, before a launch; torch's build is read from its own version file."""

import importlib.metadata
import os
import sys
from contextlib import closing

import pytest
import torch

from trainfast_runner.machine.warm_python import WarmPythons
from trainfast_runner.worker.model.inspection import inspect

UNTAGGED_CPU = "__version__ = '2.13.0'\ncuda: str | None = None\nhip: str | None = None\n"
UNTAGGED_CUDA = "__version__ = '2.13.0'\ncuda = '13.0'\nhip = None\n"
ROCM = "__version__ = '2.13.0+rocm7.0'\ncuda = None\nhip = '7.0.51831'\n"


def ask(model, objective, folder=None):
    """The answer of a Python that finds packages in the folder first."""
    environment = os.environ if folder is None else {**os.environ, "PYTHONPATH": str(folder)}
    request = {"part": "inspect", "model": model, "objective": objective, "count": False, "attention": False}
    with closing(WarmPythons()) as warm:
        return next(warm.ask_each(sys.executable, [request], environment=environment))


def test_versions_fields_overrides_and_the_models_own_count():
    answer = ask({"family": "bert", "hidden_size": 96}, "masked-lm")
    assert answer["versions"]["torch"]
    assert answer["versions"]["transformers"]
    assert (answer["config"]["hidden_size"], answer["config"]["num_hidden_layers"]) == (96, 12)
    assert "error" not in answer
    answer = inspect("inspect", {"family": "gpt2"}, "causal-lm", count=True, attention=False)
    assert answer["parameters"] == 124_439_808


@pytest.mark.parametrize(
    ("file", "cuda", "hip"),
    [(UNTAGGED_CPU, None, None), (UNTAGGED_CUDA, "13.0", None), (ROCM, None, "7.0.51831"), ("", None, None)],
)
def test_rocm_and_untagged_builds_are_distinguished(tmp_path, file, cuda, hip):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('torch is not imported for this')\n")
    (package / "version.py").write_text(file)
    found = ask({}, "", tmp_path)["versions"]
    assert (found["torch.version.cuda"], found["torch.version.hip"]) == (cuda, hip)


def test_the_answer_is_torchs_own():
    found = ask({}, "")["versions"]
    assert (found["torch"], found["torch.version.cuda"]) == (importlib.metadata.version("torch"), torch.version.cuda)
    assert found["torch.version.hip"] == torch.version.hip
    assert (found["torch.version.cuda"] is not None) == torch.backends.cuda.is_built()

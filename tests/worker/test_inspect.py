"""Facts about a training Python and a model, before a launch."""

import json
import subprocess
import sys
from pathlib import Path

from trainfast_runner.worker.programs import inspect_model

SCRIPT = Path(inspect_model.__file__)


def ask(request):
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(request)], capture_output=True, text=True, check=True
    )
    return json.loads(ended.stdout.splitlines()[-1])


def test_versions_fields_and_overrides():
    answer = ask({"model": {"family": "bert", "hidden_size": 96}, "objective": "masked-lm"})
    assert answer["versions"]["torch"]
    assert answer["versions"]["transformers"]
    assert (answer["config"]["hidden_size"], answer["config"]["num_hidden_layers"]) == (96, 12)
    assert "error" not in answer


def test_the_count_is_the_models_own():
    request = {"model": {"family": "gpt2"}, "objective": "causal-lm"}
    answer = inspect_model.main([json.dumps(request), "--count"])
    assert answer["parameters"] == 124_439_808

"""Facts about a training Python and a model, before a launch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from trainfast_runner.worker.programs import inspect_model

SCRIPT = Path(inspect_model.__file__)


def ask(request: dict[str, Any]) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(request)], capture_output=True, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def test_versions_fields_and_overrides() -> None:
    answer = ask({"model": {"family": "bert", "hidden_size": 96}, "objective": "masked-lm"})
    assert answer["versions"]["torch"]
    assert answer["versions"]["transformers"]
    assert answer["config"]["hidden_size"] == 96
    assert answer["config"]["num_hidden_layers"] == 12
    assert "error" not in answer


def test_an_unknown_field_names_the_nearest() -> None:
    # Asked here, where torch is there already: with a flag nothing is hidden from the imports.
    request = {"model": {"family": "bert", "num_hidden_layer": 2}}
    error = inspect_model.main([json.dumps(request), "--attention"])["error"]
    assert (error["key"], error["nearest"]) == ("model.num_hidden_layer", "num_hidden_layers")
    assert "hidden_size" in error["allowed"]


def test_the_count_is_the_models_own_and_a_cpu_machine_has_no_gpu() -> None:
    request = {"model": {"family": "gpt2"}, "objective": "causal-lm"}
    answer = inspect_model.main([json.dumps(request), "--count", "--devices"])
    assert answer["parameters"] == 124_439_808
    assert len(answer["devices"]["names"]) == len(answer["devices"]["uuids"])

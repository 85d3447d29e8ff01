"""The least that a memory limit must hold: a rank's own part of the weights, not the whole model."""

from __future__ import annotations

import pytest

from trainfast_runner.memory.model_size import least_weight_bytes
from trainfast_runner.settings.spec import resolve


@pytest.mark.parametrize(
    ("settings", "devices", "bytes_a_parameter"),
    [
        (["strategy=single"], 1, 4),
        (["strategy=single", "precision=bf16"], 1, 4),
        (["strategy=single", "precision=bf16-pure"], 1, 2),
        (["strategy=ddp"], 4, 4),
        (["strategy=fsdp"], 4, 1),
        (["strategy=fsdp+tp"], 8, 0.5),
        (["strategy=zero3"], 4, 1),
        (["strategy=zero2", "precision=bf16"], 4, 2),
        (["strategy=zero3-offload"], 2, 0),
        (["strategy=tp", "tp_degree=4"], 4, 1),
        (["strategy=ddp+tp", "tp_degree=2"], 8, 2),
        (["strategy=ddp+pp", "pp_degree=4"], 8, 1),
        (["strategy=naive-mp"], 2, 2),
    ],
)
def test_least_weight_bytes(settings: list[str], devices: int, bytes_a_parameter: float) -> None:
    knobs = resolve("tiny-llama", settings).knobs
    assert least_weight_bytes(1_000_000, knobs, devices) == bytes_a_parameter * 1_000_000

"""A speed that cannot be predicted is null, with the reason."""

from __future__ import annotations

import msgspec
import pytest

from cli.command import SMALL, Cli
from trainfast_runner.machine.calibration import CALIBRATION_FILE, Ceiling
from trainfast_runner.machine.cpu.cpu_info import cpu_name

ROUND = Ceiling(device="cpu", name="", tflops={"fp32": 0.1}, copy_gb_per_s=10.0, operation_us=20.0, cpu_share=1.0)
"""A calibration in round figures: a real one takes seconds, and is refused beside other work."""


@pytest.mark.parametrize("settings", [["memory_limit=4GiB"], pytest.param(["precision=bf16"], marks=pytest.mark.long)])
def test_a_speed_that_cannot_be_known_is_null_with_the_reason(cli: Cli, settings: list[str]) -> None:
    cli.home.mkdir()
    (cli.home / CALIBRATION_FILE).write_bytes(msgspec.json.encode({cpu_name(): ROUND}))
    words = [word for one in settings for word in ("--set", one)]
    answer = cli("predict", "tiny-llama", *SMALL, "--set", "devices=cpu", *words, "--json").json
    assert answer["samples_per_s"] is None
    assert settings[0].partition("=")[0] in answer["why"]

"""A speed that was predicted before a real run stands beside what the run measured."""

from __future__ import annotations

import msgspec
import pytest

from cli.command import SMALL, Cli
from trainfast_runner.machine.calibration import CALIBRATION_FILE, Ceiling, cpu_name
from trainfast_tui.text.format import number

ROUND = Ceiling(device="cpu", name="", tflops={"fp32": 0.1}, copy_gb_per_s=10.0, operation_us=20.0, cpu_share=1.0)
"""A calibration in round figures: a real one takes seconds, and is refused beside other work."""


def test_a_run_keeps_its_prediction_beside_its_measurement(cli: Cli) -> None:
    cli.home.mkdir()
    (cli.home / CALIBRATION_FILE).write_bytes(msgspec.json.encode({cpu_name(): ROUND}))
    changed = ("data.kind=random", "model.num_hidden_layers=1", "steps=6", "devices=cpu")
    settings = [word for one in changed for word in ("--set", one)]
    first = cli("predict", "tiny-llama", *settings, "--json").json["samples_per_s"]
    assert first["from"] == "the calibrated speeds of this device"

    done = cli("run", "tiny-llama", *settings)
    throughput = cli("runs", "show", "last", "--json").json["throughput"]
    assert throughput["predicted"] == first
    assert f"predicted {number(first['median'])} samples/s ({number(first['low'])} to" in done.out
    assert throughput["samples_per_s"]["median"] > 0


@pytest.mark.parametrize("settings", [["memory_limit=4GiB"], ["precision=bf16"]])
def test_a_speed_that_cannot_be_known_is_null_with_the_reason(cli: Cli, settings: list[str]) -> None:
    cli.home.mkdir()
    (cli.home / CALIBRATION_FILE).write_bytes(msgspec.json.encode({cpu_name(): ROUND}))
    words = [word for one in settings for word in ("--set", one)]
    answer = cli("predict", "tiny-llama", *SMALL, "--set", "devices=cpu", *words, "--json").json
    assert answer["samples_per_s"] is None
    assert settings[0].partition("=")[0] in answer["why"]

"""A whole process that finds eight GPUs through the ordinary loader, with the compiled stand-in library."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import shared_object

import trainfast_runner

RUNNER = Path(next(iter(trainfast_runner.__path__))).parent
ONE_TICK = f"""
import sys; sys.path.insert(0, {str(RUNNER)!r})
import msgspec
from trainfast_runner.machine.telemetry.sampler import take_tick
print(msgspec.json.encode(take_tick(settle_s=0.05)).decode())
"""


def take(environment):
    done = subprocess.run([sys.executable, "-c", ONE_TICK], env=environment, capture_output=True, check=True)
    tick = json.loads(done.stdout)
    assert isinstance(tick, dict)
    return tick


def test_eight_gpus(nvml_library):
    tick = take(shared_object.environment(nvml_library))
    assert tick["schema"] == 1
    assert [gpu["index"] for gpu in tick["devices"]] == list(range(8))
    assert len({gpu["uuid"] for gpu in tick["devices"]}) == 8
    assert [gpu["temperature_c"] for gpu in tick["devices"]] == [40 + index for index in range(8)]
    assert all(gpu["memory_total_bytes"] == 81920 * 1024**2 for gpu in tick["devices"])
    assert {gpu["compute_capability"] for gpu in tick["devices"]} == {"8.0"}
    assert all(gpu["throttle_reasons"] == ["idle"] for gpu in tick["devices"])
    assert tick["missing"]["gpu7.fan_percent"] == "not supported by this GPU and driver"
    assert "nvml" not in tick["missing"]


def test_visible_devices_do_not_hide_the_machine(nvml_library):
    environment = shared_object.environment(nvml_library, gpus=2) | {"CUDA_VISIBLE_DEVICES": "1"}
    assert [gpu["index"] for gpu in take(environment)["devices"]] == [0, 1]


def test_scenario_heats_loses_and_shares_a_gpu(nvml_library, tmp_path):
    scenario = tmp_path / "scenario.txt"
    scenario.write_text(
        "ramp * 0 50 0 200 1700\nramp * 1000 90 20 250 1200\nlost 1 0 3000\nprocess 2 4242 2048 0 3000\nmemory * 100\n"
    )
    environment = shared_object.environment(nvml_library, gpus=3, scenario=scenario)
    half_way = time.time() - 500
    os.utime(scenario, (half_way, half_way))
    warm, lost, shared = take(environment)["devices"]
    assert 70 <= warm["temperature_c"] <= 76
    assert (warm["throttle_reasons"], warm["sm_clock_mhz"]) == ([], 1700)
    assert "GPU is lost" in lost["error"]
    assert shared["processes"] == [{"pid": 4242, "memory_used_bytes": 2048 * 1024**2, "kind": "compute"}]
    assert shared["memory_used_bytes"] == (2048 + 100) * 1024**2
    long_ago = time.time() - 1500
    os.utime(scenario, (long_ago, long_ago))
    hot = take(environment)["devices"][0]
    assert (hot["temperature_c"], hot["throttle_reasons"], hot["power_w"]) == (90, ["sw_thermal"], 250.0)

"""The compiled stand-in does what the scenario says, and its counters are the scenario's exact integrals."""

import json
import os
import subprocess
import sys
import time

import pytest
import scenario
import shared_object
from scenario import Moment, Scenario, thermal_ramp

ASK = """
import ctypes, json, sys, time
import pynvml as nv
nv.nvmlInit()
gpu = nv.nvmlDeviceGetHandleByIndex(0)
before = time.monotonic_ns()
fields = nv.nvmlDeviceGetFieldValues(gpu, [74, 75, 76, 269, 270, 271, 251, 83])
after = time.monotonic_ns()
print(json.dumps([before, after, [[f.nvmlReturn, f.valueType, f.value.ullVal] for f in fields],
                  nv.nvmlDeviceGetTemperature(gpu, 0), nv.nvmlDeviceGetCurrentClocksEventReasons(gpu)]))
"""


def ask(folder, path):
    environment = shared_object.environment(folder, gpus=1, scenario=path)
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, check=True)
    return json.loads(done.stdout)


def test_the_counters_are_the_integrals_of_the_ramp(nvml_library, tmp_path):
    ramp = thermal_ramp()
    ramp.origin_ns -= 13_100_000_000
    before, after, fields, _, _ = ask(nvml_library, ramp.write(tmp_path / "scenario"))
    base_ns = 5_000_000_000
    for position, bits in ((1, scenario.THERMAL), (3, scenario.SW_THERMAL), (4, scenario.HW_THERMAL)):
        code, kind, value = fields[position]
        low, high = (base_ns + ramp.held_s(0, bits, (t - ramp.origin_ns) / 1e9) * 1e9 for t in (before, after))
        assert (code, kind) == (0, 3)
        assert low - 1000 <= value <= high + 1000
    assert fields[6] == [0, 1, 1], "251 means power smoothing to this driver, and succeeds"


FOLLOW = """
import pynvml as nv, time
nv.nvmlInit()
gpu = nv.nvmlDeviceGetHandleByIndex(0)
until, last, seen = time.monotonic() + 0.15, [0, 0], 0
while not seen or time.monotonic() < until:
    now = [f.value.ullVal for f in nv.nvmlDeviceGetFieldValues(gpu, [75, 83])]
    assert now >= last and now[1] >= last[1], (last, now)
    seen, last = seen + 1, now
print(seen)
"""


def test_no_counter_steps_back_at_the_end_of_a_period(nvml_library, tmp_path):
    """A nanosecond less, by rounding, and the sampler would rightly believe the counter no more."""
    moments = [Moment(0, 86), Moment(0.0011, 89, 0x20, 210.7), Moment(0.0018, 87)]
    ramp = Scenario(time.monotonic_ns() - 150_000_000, 0.0026, {0: moments})
    environment = shared_object.environment(nvml_library, gpus=1, scenario=ramp.write(tmp_path / "scenario"))
    done = subprocess.run([sys.executable, "-c", FOLLOW], env=environment, capture_output=True, check=True)
    assert int(done.stdout) > 0


def test_a_ramp_is_between_its_lines_and_begins_again():
    ramp = Scenario(0, 10, {0: [Moment(0, 50, 0), Moment(4, 90, 0x20), Moment(6, 90, 0x1)]})
    assert [ramp.at(0, s).temperature_c for s in (0, 2, 5, 9, 12)] == [50, 70, 90, 90, 70]
    assert [ramp.at(0, s).reasons for s in (3, 5, 7, 15)] == [0, 0x20, 1, 0x20]
    assert ramp.fraction(0, scenario.THERMAL, 0, 10**10) == pytest.approx(0.2)
    assert ramp.fraction(0, scenario.THERMAL, 5 * 10**9, 25 * 10**9) == pytest.approx(0.2)


def test_a_scenario_without_an_origin_begins_when_its_file_was_written(nvml_library, tmp_path):
    path = tmp_path / "scenario"
    path.write_text("ramp 0 0 50 0 200 1700\nramp 0 1000 90 20 250 1200\ncounters 251\n")
    half_way = time.time() - 500
    os.utime(path, (half_way, half_way))
    _, _, fields, temperature, reasons = ask(nvml_library, path)
    assert 69 <= temperature <= 75
    assert reasons == 0
    assert fields[3][0] != 0, "this driver has its counters at 251 to 253"
    assert fields[6][:2] == [0, 3]
    assert 100_000_000 <= fields[7][2] < 118_000_000, "about 500 s at 200 W, in mJ, on top of the 5 kJ before"

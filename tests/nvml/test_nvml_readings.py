"""Readings of healthy GPUs, through pynvml's own packing, from a stand-in for the C library."""

import pynvml
import pytest
from stand_in import MIB, Gpu, Machine, gpus

from trainfast_runner.machine.device_events import defects


def test_every_reading_arrives_in_its_unit(watch):
    look = watch(Machine(gpus(1, processes={4242: 2048 * MIB}, ecc=(2, 1), remapped=(3, 4, 1, 0))))
    [gpu], missing = look(0)
    assert missing == {}
    assert (gpu.index, gpu.uuid, gpu.name, gpu.error) == (0, "GPU-0", "NVIDIA Stand-In 80GB", None)
    assert (gpu.compute_capability, gpu.memory_used_bytes, gpu.memory_total_bytes) == ("8.0", 1024 * MIB, 81920 * MIB)
    assert gpu.memory_free_bytes == (81920 - 1024 - 512) * MIB, "what the driver reserves is not free"
    assert (gpu.gpu_utilization_percent, gpu.memory_utilization_percent) == (97, 41)
    assert (gpu.temperature_c, gpu.slowdown_temperature_c, gpu.shutdown_temperature_c) == (50, 92, 95)
    assert (gpu.gpu_max_temperature_c, gpu.memory_max_temperature_c, gpu.degrees_to_slowdown_c) == (87, 95, 37)
    assert (gpu.memory_temperature_c, gpu.fan_percent) == (60, 30)
    assert (gpu.power_average_w, gpu.power_instant_w) == (250.0, 255.0)
    assert (gpu.ecc_corrected_errors, gpu.ecc_uncorrected_errors) == (2, 1)
    assert (gpu.remapped_rows_corrected, gpu.remapped_rows_uncorrected) == (3, 4)
    assert (gpu.remapped_rows_pending, gpu.remapped_rows_failed) == (1, 0)
    assert gpu.mig_mode is False
    assert (gpu.power_w, gpu.power_limit_w, gpu.energy_mj) == (250.0, 400.0, 5_000_000)
    assert (gpu.sm_clock_mhz, gpu.sm_clock_max_mhz) == (1410, 1980)
    assert (gpu.memory_clock_mhz, gpu.memory_clock_max_mhz, gpu.throttle_reasons) == (1593, 1593, [])
    assert (gpu.power_violation_ns, gpu.thermal_violation_ns) == (0, 0)
    assert (gpu.pcie_generation, gpu.pcie_width, gpu.pcie_generation_max, gpu.pcie_width_max) == (4, 16, 4, 16)
    assert [(p.pid, p.memory_used_bytes, p.kind) for p in gpu.processes or []] == [(4242, 2048 * MIB, "compute")]


def test_heat_ramp_turns_the_thermal_reason_on_and_its_counter_is_reported(watch):
    look = watch(Machine(gpus(1, temperature=80, heats_per_s=1)))
    seen = [(gpu.temperature_c, gpu.throttle_reasons) for at_s in (0, 6, 8) for gpu in look(at_s)[0]]
    assert seen == [(80, []), (86, []), (88, ["sw_thermal"])]
    look = watch(Machine(gpus(1, reasons=0x20, violation_ns=lambda field, s: int(s * 5e8) if field == 75 else 0)))
    seen = [look(at_s)[0][0] for at_s in range(8)]
    assert [gpu.thermal_violation_ns for gpu in seen] == [at_s * 500_000_000 for at_s in range(8)]
    assert {gpu.power_violation_ns for gpu in seen} == {0}


def test_power_cap_is_reported_and_a_flash_of_hardware_slowdown_is_not(watch):
    machine = Machine(gpus(1, reasons=0x4))
    look = watch(machine)
    reasons = []
    for at_s, bits in enumerate((0x4, 0xC, 0x4, 0xC, 0xC)):
        machine.gpus[0].reasons = bits
        reasons.append(look(at_s)[0][0].throttle_reasons)
    assert reasons == [["sw_power_cap"]] * 4 + [["sw_power_cap", "hw_slowdown"]]


def test_unsupported_readings_are_null_with_a_reason_and_are_asked_only_once(watch):
    machine = Machine(gpus(1, unsupported=frozenset({"nvmlDeviceGetUtilizationRates", "field 82"})))
    look = watch(machine)
    for at_s in range(4):
        [gpu], missing = look(at_s)
        assert (gpu.gpu_utilization_percent, gpu.memory_utilization_percent) == (None, None)
        assert gpu.memory_temperature_c is None
        assert (gpu.temperature_c, gpu.power_w) == (50, 250.0), "one missing reading must not lose the others"
        assert missing["gpu0.memory_temperature_c"] == "not supported by this GPU and driver"
        assert missing["gpu0.gpu_utilization_percent"] == "not supported by this GPU and driver"
    assert machine.calls["nvmlDeviceGetUtilizationRates"] == 1
    assert machine.calls["nvmlDeviceGetFieldValues"] == 2 + 4, "one call for all fields, twice to probe, each tick"


def test_slow_questions_stay_off_the_hot_path(watch):
    machine = Machine(gpus(1, processes={1: MIB}))
    look = watch(machine)
    for at_s in range(10):
        assert look(at_s)[0][0].processes, "between two looks the last list stands"
    # One look at probing, then one in five ticks.
    assert machine.calls["nvmlDeviceGetComputeRunningProcesses_v3"] == 3
    assert machine.calls["nvmlDeviceGetMaxClockInfo"] == 2
    assert machine.calls["nvmlDeviceGetClockInfo"] == (1 + 10) + (1 + 2), "the SM clock each tick, the memory's not"
    assert "nvmlDeviceGetPowerUsage" not in machine.calls, "a field value gives the power"
    assert "nvmlDeviceGetPcieThroughput" not in machine.calls


@pytest.mark.parametrize(
    "absent",
    [
        {"nvmlDeviceGetCurrentClocksEventReasons"},
        {"nvmlDeviceGetTemperatureV"},
        {"nvmlDeviceGetMemoryInfo_v2"},
        {"nvmlDeviceGetComputeRunningProcesses_v3"},
    ],
)
def test_an_older_driver_answers_through_its_older_functions(watch, absent):
    look = watch(Machine(gpus(1, reasons=0x4, processes={7: MIB}), absent=frozenset(absent)))
    [gpu], missing = look(0)
    assert missing == {}
    assert (gpu.throttle_reasons, gpu.temperature_c, gpu.memory_total_bytes) == (["sw_power_cap"], 50, 81920 * MIB)
    assert [p.pid for p in gpu.processes or []] == [7]


@pytest.mark.skipif(not hasattr(pynvml, "nvmlDeviceGetMarginTemperature"), reason="this binding has no margins")
def test_slowdown_temperature_comes_from_the_margin_where_there_is_no_threshold(watch):
    look = watch(Machine(gpus(1, temperature=61, unsupported=frozenset({"nvmlDeviceGetTemperatureThreshold"}))))
    [gpu], missing = look(0)
    assert (gpu.slowdown_temperature_c, gpu.degrees_to_slowdown_c) == (87, 26)
    assert set(missing) == {f"gpu0.{name}_temperature_c" for name in ("shutdown", "gpu_max", "memory_max")}
    assert set(missing.values()) == {"not supported by this GPU and driver"}


def test_an_older_binding_loses_only_what_it_lacks(watch, monkeypatch):
    for name in ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetFanSpeed"):
        monkeypatch.delattr(pynvml, name, raising=False)
    look = watch(Machine(gpus(1, reasons=0x20)))
    [gpu], missing = look(0)
    assert (gpu.temperature_c, gpu.throttle_reasons, gpu.fan_percent) == (50, ["sw_thermal"], None)
    assert list(missing) == ["gpu0.fan_percent"]
    assert "pip install --upgrade nvidia-ml-py" in missing["gpu0.fan_percent"]


@pytest.mark.parametrize("without", [{"field 185"}, {"nvmlDeviceGetFieldValues"}, {"nvmlDeviceGetPowerUsage"}])
def test_power_comes_from_the_field_or_from_the_function(watch, without):
    [gpu], missing = watch(Machine(gpus(1, unsupported=frozenset(without))))(0)
    assert (gpu.power_w, "gpu0.power_w" in missing) == (250.0, False)


def test_mixed_gpus_have_their_own_capabilities_and_name_the_reasons_they_lack(watch):
    old = Gpu(uuid="GPU-old", name="Old", unsupported=frozenset({"nvmlDeviceGetTotalEnergyConsumption", "field 83"}))
    look = watch(Machine([Gpu(uuid="GPU-new"), old, Gpu(uuid="GPU-between", unsupported=frozenset({"field 83"}))]))
    energies = [gpu.energy_mj for gpu in look(0)[0]]
    assert energies == [5_000_000, None, 5_000_000], "from the field, not at all, from the function"
    look = watch(Machine(gpus(1, supported_reasons=0x1FF & ~0x88)))
    _, missing = look(0)
    assert set(missing) == {"gpu0.throttle_reasons.hw_slowdown", "gpu0.throttle_reasons.hw_power_brake"}


@pytest.mark.parametrize("garbage", [0xFFFFFFFF, 0x55555555, 0xFFFFFFD8, 3_714_000_000])
def test_kind_h_impossible_readings_are_null_with_the_reason(watch, garbage):
    settings = dict.fromkeys(("temperature", "slowdown", "shutdown", "gpu_max", "memory_max"), garbage)
    settings |= dict.fromkeys(("memory_temperature", "fan", "power_mw", "limit_mw", "reasons"), garbage)
    clocks = {1: garbage, 2: garbage}
    pairs = dict.fromkeys(("utilization", "pcie", "pcie_max"), (garbage, garbage))
    odd = Gpu(
        **settings, **pairs, uuid="GPU-odd", clocks=clocks, max_clocks=clocks, ecc=(garbage, garbage),
        remapped=(garbage,) * 4, compute_capability=(8, garbage), energy_mj=garbage << 40, memory_used=1 << 45,
        processes={0: 1, garbage: 1, 4242: 1 << 45},
    )  # fmt: skip
    look = watch(Machine([odd, Gpu(uuid="GPU-sound")]))
    for at_s in range(7):
        (gpu, sound), missing = look(at_s)
        believed = {name for name in gpu.__struct_fields__ if getattr(gpu, name) not in (None, {}, 0)}
        assert believed <= {
            *("uuid", "name", "t_ns", "memory_total_bytes", "processes", "throttle_counters"),
            *(name for name in believed if name.endswith("_ns")),
            "power_instant_w",  # the stand-in adds 5 W to it, which may wrap around
        }
        assert [(process.pid, process.memory_used_bytes) for process in gpu.processes or []] == [(4242, None)]
        assert missing["gpu0.processes.pid"] == f"the driver's answer is impossible for process 0, {garbage}"
        absent = {name for name in gpu.__struct_fields__ if getattr(gpu, name) is None} - {"error"}
        assert absent == {key.removeprefix("gpu0.") for key in missing if ".processes." not in key}
        assert sound.power_w == 250.0
    assert list(defects(gpu)) == []


def test_kind_h_unusual_readings_are_believed(watch):
    """A fan above its maximum, an overclocked GPU, a hot memory, a full one, a reason that this version cannot name."""
    gpu = Gpu(
        uuid="GPU-0", fan=104, clocks={1: 3300, 2: 14001}, max_clocks={1: 3300, 2: 14001}, memory_temperature=108,
        memory_used=81408 * MIB, power_mw=1_450_000, limit_mw=1_400_000, reasons=0x8000000000000200,
        energy_mj=1 << 42,
    )  # fmt: skip
    [seen], missing = watch(Machine([gpu]))(0)
    assert missing == {}
    assert (seen.fan_percent, seen.sm_clock_mhz, seen.memory_clock_mhz) == (104, 3300, 14001)
    assert (seen.power_w, seen.energy_mj, seen.memory_temperature_c) == (1450.0, 1 << 42, 108)
    assert seen.throttle_reasons == ["0x200", "0x8000000000000000"]

"""MIG instances through NVML: what it lists, and what it says of one."""

import json
import subprocess
import sys

import shared_object
import stand_in
from stand_in import Gpu, Machine
from test_nvml_whole_process import RUNNER

from trainfast_runner.machine.telemetry.nvml import Nvml
from trainfast_runner.machine.telemetry.topology import read_instances

ONE = "MIG-41a36bfc-73e2-5e3d-8b3a-2b7a4b0d0ac0"
TWO = "MIG-9f1c2a34-0000-5e3d-8b3a-2b7a4b0d0ac0"
PROCESS = f"""
import sys; sys.path.insert(0, {str(RUNNER)!r})
import json, msgspec
from trainfast_runner.machine.telemetry.topology import read_instances
from trainfast_runner.machine.telemetry.nvml import Nvml
instances = read_instances()
readings, missing = Nvml(instances=[one.uuid for one in instances]).sample(0)
print(json.dumps([[one.uuid for one in instances], msgspec.to_builtins(readings), missing]))
"""


def machine():
    parts = (
        Gpu(
            name="A100 MIG 1g.10gb",
            uuid=ONE,
            memory_total=10240 * stand_in.MIB,
            numbers=(7, 0),
            memory_used=stand_in.MIB,
        ),
        Gpu(name="A100 MIG 1g.10gb", uuid=TWO, memory_total=10240 * stand_in.MIB, numbers=(8, 0), processes={42: 9}),
    )
    return Machine([Gpu(uuid="GPU-0"), Gpu(uuid="GPU-1", mig=True, instances=parts)])


def test_every_instance_is_listed_with_its_gpu():
    with stand_in.installed(machine()):
        found = read_instances()
    assert [(one.uuid, one.gpu_index, one.gpu_uuid) for one in found] == [(ONE, 1, "GPU-1"), (TWO, 1, "GPU-1")]
    with stand_in.installed(Machine([Gpu(uuid="GPU-0")])):
        assert read_instances() == []


def test_of_an_instance_there_is_its_memory_and_its_processes_and_null_for_the_rest():
    with stand_in.installed(machine()):
        nvml = Nvml(instances=[TWO])
        readings, missing = nvml.sample(0)
        nvml.close()
    first, second, instance = readings
    assert (first.index, second.index, second.mig_mode) == (0, 1, True)
    assert (instance.index, instance.uuid, instance.name) == (2, TWO, "A100 MIG 1g.10gb")
    assert instance.memory_total_bytes == 10240 * stand_in.MIB
    assert [process.pid for process in instance.processes or []] == [42]
    read_fields = {
        "index",
        "uuid",
        "name",
        "t_ns",
        "memory_used_bytes",
        "memory_total_bytes",
        "memory_free_bytes",
        "processes",
    }
    assert {name for name in instance.__struct_fields__ if getattr(instance, name) not in (None, {})} == read_fields
    for name in ("power_w", "temperature_c", "sm_clock_mhz", "gpu_utilization_percent", "energy_mj"):
        assert missing[f"gpu2.{name}"] == "NVML reports this only for a whole GPU, not for a MIG instance"


def test_an_instance_that_is_destroyed_is_one_that_does_not_answer():
    with stand_in.installed(machine()):
        nvml = Nvml(instances=["MIG-gone"])
        readings, missing = nvml.sample(0)
        nvml.close()
    assert [gpu.error is None for gpu in readings] == [True, True, False]
    assert "gpu2" in missing


def test_a_whole_process_sees_the_instances_of_the_compiled_stand_in(nvml_library, tmp_path):
    scenario = tmp_path / "scenario"
    scenario.write_text("instance 1 7 0 512\ninstance 1 8 0 64\n")
    environment = shared_object.environment(nvml_library, gpus=2, scenario=scenario)
    done = subprocess.run([sys.executable, "-c", PROCESS], env=environment, capture_output=True, check=True)
    names, readings, missing = json.loads(done.stdout)
    assert names == [f"MIG-00000000-0000-0000-000{number}-000000000001" for number in (1, 2)]
    instance = readings[2]
    assert instance["uuid"] == "MIG-00000000-0000-0000-0001-000000000001"
    assert instance["name"] == "NVIDIA Stand-In 80GB MIG 1g.10gb"
    assert instance["memory_used_bytes"] == 512 << 20
    assert instance.get("power_w") is None
    assert "gpu2.power_w" in missing

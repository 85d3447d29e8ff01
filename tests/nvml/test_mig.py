"""MIG instances through NVML: what it lists, and what it says of one."""

import json
import subprocess
import sys

import shared_object
import stand_in
from stand_in import MIB, Gpu, Machine
from test_nvml_whole_process import RUNNER

from trainfast_runner.machine.telemetry.nvml import Nvml

ONE = "MIG-41a36bfc-73e2-5e3d-8b3a-2b7a4b0d0ac0"
TWO = "MIG-9f1c2a34-0000-5e3d-8b3a-2b7a4b0d0ac0"
PROCESS = f"""
import sys; sys.path.insert(0, {str(RUNNER)!r})
import json, msgspec
from trainfast_runner.machine.telemetry.nvml import Nvml
readings, missing = Nvml().sample(0)
print(json.dumps([msgspec.to_builtins(readings), missing]))
"""


def machine():
    parts = (
        Gpu(name="A100 MIG 1g.10gb", uuid=ONE, memory_total=10240 * MIB, numbers=(7, 0), memory_used=MIB),
        Gpu(name="A100 MIG 1g.10gb", uuid=TWO, memory_total=10240 * MIB, numbers=(8, 0), processes={42: 9}),
    )
    return Machine([Gpu(uuid="GPU-0"), Gpu(uuid="GPU-1", mig=True, instances=parts)])


def test_of_an_instance_there_is_its_memory_and_its_processes_and_null_for_the_rest():
    with stand_in.installed(machine()):
        nvml = Nvml()
        readings, missing = nvml.sample(0)
        nvml.close()
    first, second, _, instance = readings
    assert (first.index, second.index, second.mig_mode) == (0, 1, True)
    assert (instance.index, instance.uuid, instance.name) == (3, TWO, "A100 MIG 1g.10gb")
    assert instance.memory_total_bytes == 10240 * MIB
    assert [process.pid for process in instance.processes or []] == [42]
    read_fields = {
        "index", "uuid", "name", "t_ns", "memory_used_bytes", "memory_total_bytes", "memory_free_bytes", "processes",
        "compute_capability",
    }  # fmt: skip
    assert {name for name in instance.__struct_fields__ if getattr(instance, name) not in (None, {})} == read_fields
    for name in ("power_w", "temperature_c", "sm_clock_mhz", "gpu_utilization_percent", "energy_mj"):
        assert missing[f"gpu3.{name}"] == "NVML reports this only for a whole GPU, not for a MIG instance"


def test_a_whole_process_sees_the_instances_of_the_compiled_stand_in(nvml_library, tmp_path):
    scenario = tmp_path / "scenario"
    scenario.write_text("instance 1 7 0 512\ninstance 1 8 0 64\n")
    environment = shared_object.environment(nvml_library, gpus=2, scenario=scenario)
    done = subprocess.run([sys.executable, "-c", PROCESS], env=environment, capture_output=True, check=True)
    readings, missing = json.loads(done.stdout)
    names = [f"MIG-00000000-0000-0000-000{number}-000000000001" for number in (1, 2)]
    assert [reading["uuid"] for reading in readings[2:]] == names
    instance = readings[2]
    assert (instance["name"], instance["memory_used_bytes"]) == ("NVIDIA Stand-In 80GB MIG 1g.10gb", 512 << 20)
    assert instance.get("power_w") is None
    assert "gpu2.power_w" in missing

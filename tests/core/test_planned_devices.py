"""The devices that CUDA_VISIBLE_DEVICES leaves a run, and those that a launch gives its processes, by UUID."""

import shlex

import pytest
import stand_in
from cuda_python import cuda_python
from stand_in import Gpu, Machine

from on_disk import run_file
from trainfast_runner.errors import UserError
from trainfast_runner.export.formats import export_run
from trainfast_runner.machine import devices
from trainfast_runner.machine.devices import detect_machine
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.running import launch
from trainfast_runner.running.planning import plan_run, plan_script
from trainfast_runner.settings.spec import resolve

MIG = "MIG-41a36bfc-73e2-5e3d-8b3a-2b7a4b0d0ac0"


def a_cuda_python(tmp_path, monkeypatch):
    """Write a training Python with a CUDA build of torch, and see every GPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return cuda_python(tmp_path / "bin", {"deepspeed": "0.19.8"})


@pytest.fixture
def python(tmp_path, monkeypatch):
    return a_cuda_python(tmp_path, monkeypatch)


def planned(python, gpus, *settings):
    with stand_in.installed(Machine(gpus)):
        return plan_run(resolve("tiny-llama", settings), python)


def run_of(plan, **fields):
    placed = {"device": plan.device, "device_uuids": plan.device_uuids, "env": plan.env}
    return run_file(**plan.spec.record_fields(), **placed, **fields)


def test_a_run_on_a_mig_instance_gets_it_alone_by_its_whole_name(python, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", MIG[:12])
    part = Gpu(name="A100 MIG 1g.10gb", uuid=MIG, numbers=(7, 0))
    made = planned(python, [Gpu(uuid="GPU-aa11", mig=True, instances=(part,)), Gpu(uuid="GPU-bb22")])
    assert (made.device, made.world_size) == ("cuda", 1)
    assert (made.env["CUDA_VISIBLE_DEVICES"], made.env["CUDA_DEVICE_ORDER"]) == (MIG, "PCI_BUS_ID")
    assert (made.device_uuids, made.device_names) == ([MIG], ["A100 MIG 1g.10gb"])
    assert [gpu.uuid for gpu in made.watched] == [MIG]


def test_the_cpu_is_taken_beside_gpus_and_sees_none_of_them(python):
    made = planned(python, [Gpu(uuid="GPU-aa11")], "strategy=ddp", "devices=cpu:2", "watch=0")
    assert (made.device, made.world_size, made.device_uuids) == ("cpu", 2, [])
    assert (made.env["CUDA_VISIBLE_DEVICES"], made.spec.knobs["devices"]) == ("", "cpu:2")
    assert [gpu.uuid for gpu in made.watched] == ["GPU-aa11"]
    assert made.versions["torch.version.cuda"] == "13.0"


def test_a_launch_on_a_gpu_that_was_empty_before_the_last_run_waits_for_it_to_empty(python, monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "MEMORY_SETTLES_S", 0.0)
    monkeypatch.setattr(launch, "_start_supervisor", lambda directory, standby, cold_reason: None)
    home = Home(tmp_path / "home")
    started = []
    for used in (0, 1 << 30):
        gpus = [Gpu(uuid="GPU-aa11", memory_used=used, memory_reserved=0)]
        plan = planned(python, gpus)
        with stand_in.installed(Machine(gpus)):
            started.append(read_run_file(launch.start(plan, home)))
    assert [(run.used_before_bytes, run.clean) for run in started if run is not None] == [
        ({"GPU-aa11": 0}, True),
        ({"GPU-aa11": 1 << 30}, False),
    ]


def test_the_exported_command_of_a_script_is_planned_on_the_gpus_that_it_names(python, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    gpus = [Gpu(uuid=f"GPU-{index}", bus=index + 1) for index in range(3)]
    with stand_in.installed(Machine(gpus)):
        first = plan_script([python, str(tmp_path / "train.py")], ["devices=1+2"])
        exported = export_run(run_of(first, script=first.script, cwd=str(tmp_path)), tmp_path, "command")
        order, visible, *words = shlex.split(exported.text, comments=True)[1:]
        for variable in (order, visible):
            monkeypatch.setenv(*variable.split("=", 1))
        again = plan_script(words)
    assert "CUDA_VISIBLE_DEVICES=1,2" in exported.text
    assert again.device_uuids == first.device_uuids == ["GPU-1", "GPU-2"]
    assert [gpu.uuid for gpu in again.watched] == ["GPU-1", "GPU-2"]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "zero2-offload", "zero3-offload"])
@pytest.mark.parametrize(
    ("variable", "devices", "indexes"),
    [(None, "2", "1,3"), (None, "3+0", "3,0"), ("3,GPU-2,1", "0+1", "3,2"), ("3,1", None, "3,1")],
)
def test_deepspeed_parses_the_nvml_indexes_of_its_gpus(python, monkeypatch, strategy, variable, devices, indexes):
    """The indexes are the driver's, in PCI order, and not those into CUDA_VISIBLE_DEVICES."""
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    settings = [f"strategy={strategy}", *([] if devices is None else [f"devices={devices}"])]
    made = planned(python, four(9, 1, 8, 2), *settings)
    assert (made.env["CUDA_DEVICE_ORDER"], made.env["CUDA_VISIBLE_DEVICES"]) == ("PCI_BUS_ID", indexes)
    assert made.device_uuids == [f"GPU-{index}" for index in indexes.split(",")], "records name GPUs by UUID"
    ddp = planned(python, four(9, 1, 8, 2), "strategy=ddp", *settings[1:])
    assert ddp.env["CUDA_VISIBLE_DEVICES"] == ",".join(made.device_uuids)


def four(*used_gib):
    return [Gpu(uuid=f"GPU-{index}", bus=index + 1, memory_used=used_gib[index] << 30) for index in range(4)]


@pytest.mark.parametrize(
    ("strategy", "instead"),
    [("zero1", "zero3"), ("zero2", "zero3"), ("zero2-offload", "zero3-offload"), ("zero3", None), ("fsdp", None)],
)
def test_a_mig_instance_has_no_index_for_deepspeed(python, monkeypatch, strategy, instead):
    """DeepSpeed asks for the GPU's free memory in stages 1 and 2 only; stage 3 gets the instance's UUID."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", MIG)
    part = Gpu(name="A100 MIG 1g.10gb", uuid=MIG, numbers=(7, 0))
    gpus = [Gpu(uuid="GPU-aa11", mig=True, instances=(part,))]
    if instead is None:
        assert planned(python, gpus, f"strategy={strategy}").env["CUDA_VISIBLE_DEVICES"] == MIG
        return
    with pytest.raises(UserError) as refused:
        planned(python, gpus, f"strategy={strategy}")
    assert refused.value.line() == (
        f"strategy={strategy} needs a GPU with an index, and devices=1 is the MIG instance {MIG} of"
        f" CUDA_VISIBLE_DEVICES; try strategy={instead}"
    )
    assert planned(python, gpus, f"strategy={instead}").env["CUDA_VISIBLE_DEVICES"] == MIG


def test_a_script_gets_the_devices_it_is_given_by_their_indexes_as_deepspeed_reads_them(python, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-3,GPU-0")
    words = ["torchrun", "--nproc-per-node", "2", "train.py"]
    with stand_in.installed(Machine(four(0, 0, 0, 0))):
        made = plan_script(words, ["devices=1+0"], python=python)
        inherited = plan_script(words, python=python)
    assert (made.env["CUDA_VISIBLE_DEVICES"], made.env["CUDA_DEVICE_ORDER"]) == ("0,3", "PCI_BUS_ID")
    assert "CUDA_VISIBLE_DEVICES" not in inherited.env


def test_kind_a_a_gpu_without_a_uuid_and_an_exported_command_of_deepspeed_name_indexes(python, tmp_path):
    gpus = four(0, 0, 0, 0)
    gpus[2].uuid = "no uuid"
    made = planned(python, gpus, "strategy=ddp", "devices=3+2")
    assert (made.env["CUDA_VISIBLE_DEVICES"], made.device_uuids, made.world_size) == ("3,2", ["GPU-3"], 2)
    first = planned(python, four(0, 0, 0, 0), "strategy=zero2", "devices=1+3", "grad_clip=1.0")
    (tmp_path / "deepspeed.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    text = export_run(run_of(first, world_size=first.world_size), tmp_path, "torchrun").text
    assert "env CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1,3 " in text


CUDA = {"torch": "2.13.0", "torch.version.cuda": "13.0", "torch.version.hip": None}
CPU = {"torch": "2.13.0", "torch.version.cuda": None, "torch.version.hip": None}
ROCM = {"torch": "2.13.0+rocm7.0", "torch.version.cuda": None, "torch.version.hip": "7.0.2"}
OTHER_MIG = "MIG-9f1c2a34-0000-5e3d-8b3a-2b7a4b0d0ac0"
Versions = dict[str, str | None]


def cut(uuid, *instances):
    """A GPU in MIG mode with instances of these names."""
    parts = tuple(
        Gpu(name="A100 MIG 1g.10gb", uuid=name, memory_total=9728 * stand_in.MIB, memory_used=64, numbers=(7 + n, 0))
        for n, name in enumerate(instances)
    )
    return Gpu(name="A100", uuid=uuid, mig=True, instances=parts)


def seen(variable, versions=CUDA, *gpus, order=None):
    asked = {"CUDA_VISIBLE_DEVICES": variable, "CUDA_DEVICE_ORDER": order}
    environment = {name: value for name, value in asked.items() if value is not None}
    with stand_in.installed(Machine(list(gpus) or [Gpu(uuid="GPU-aa11"), Gpu(uuid="GPU-bb22")])):
        return detect_machine(versions, environment=environment)


def refused(machine):
    """The one line of the refusal; a run that asks for the CPU is not refused."""
    assert (machine.device, machine.gpus) == ("cpu", ())
    assert machine.used_by("cpu:2").refusal is None
    line = machine.refusal.line()
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("variable", "indexes"),
    [(None, [0, 1]), ("1", [1]), ("1,0", [1, 0]), ("GPU-bb", [1]), ("GPU-aa11, 1", [0, 1]), ("0,7,1", [0])],
)
def test_indexes_and_uuids_name_gpus_in_their_order(variable, indexes):
    machine = seen(variable)
    assert [gpu.index for gpu in machine.gpus] == indexes
    assert (machine.device, machine.refusal) == ("cuda", None)


@pytest.mark.parametrize("variable", ["", "-1", "NoDevFiles"])
def test_gpus_hidden_on_purpose_ask_for_the_cpu(variable):
    machine = seen(variable)
    assert (machine.device, machine.gpus, machine.refusal) == ("cpu", (), None)
    assert machine.no_gpu_reason == f"CUDA_VISIBLE_DEVICES={variable} leaves none"


@pytest.mark.parametrize("variable", ["7", "²", "GPU-cc", "0,0", "1,0,1", "GPU-aa,GPU-aa11"])
def test_a_name_that_no_gpu_has_and_one_given_twice_do_not_train_on_the_cpu(variable):
    assert refused(seen(variable)) == (
        f"CUDA_VISIBLE_DEVICES={variable} names no GPU here, or one twice; try CUDA_VISIBLE_DEVICES=0,"
        " or devices=cpu to train on the CPU (allowed: 0, 1)"
    )


def test_an_nvml_failure_with_gpus_present_is_refused_and_says_what_to_do():
    with stand_in.installed(Machine([Gpu(uuid="GPU-aa11")], init_code=18)):
        machine = detect_machine(CUDA, environment={})
        hidden = detect_machine(CUDA, environment={"CUDA_VISIBLE_DEVICES": ""})
        on_cpu_build = detect_machine(CPU, environment={})
    line = refused(machine)
    assert "the driver was updated under the running system: reboot" in line
    assert "try devices=cpu to train on the CPU" in line
    assert hidden.refusal is None
    assert on_cpu_build.refusal is None


def test_a_driver_that_is_not_loaded_is_no_gpu_unless_there_is_a_sign_of_one(monkeypatch):
    for sign in (None, "the PCI bus lists 0000:3b:00.0"):
        monkeypatch.setattr("trainfast_runner.machine.devices.sign_of_a_gpu", lambda sign=sign: sign)
        with stand_in.installed(Machine([], init_code=9)):
            machine = detect_machine(CUDA, environment={})
        if sign is None:
            assert (machine.device, machine.refusal) == ("cpu", None)
        else:
            assert f"NVML lists no GPU, but {sign}: the NVIDIA kernel module is not loaded" in refused(machine)


def test_the_signs_of_a_gpu_without_nvml(tmp_path):
    assert devices.sign_of_a_gpu(root=tmp_path) is None
    card = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x040300\n")
    assert devices.pci_card(tmp_path) is None, "the sound device of a graphics card is no GPU"
    (card / "class").write_text("0x030200\n")
    assert devices.sign_of_a_gpu(root=tmp_path) == "the PCI bus lists 0000:3b:00.0"
    (tmp_path / "dev").mkdir()
    for name in ("nvidiactl", "nvidia0"):
        (tmp_path / "dev" / name).touch()
    assert devices.sign_of_a_gpu(root=tmp_path) == "/dev/nvidia0 is there"


def test_a_build_without_cuda_has_no_gpu_and_numbers_on_mixed_cards_need_an_order():
    machine = seen(MIG, CPU)
    assert (machine.device, machine.gpus, machine.refusal) == ("cpu", (), None)
    assert machine.no_gpu_reason == "torch is a CPU build"
    line = refused(seen("0", CUDA, *MIXED))
    assert "counts GPUs of several models in CUDA's own order" in line
    assert "try CUDA_DEVICE_ORDER=PCI_BUS_ID, or the UUIDs of `nvidia-smi -L`" in line
    assert [gpu.uuid for gpu in seen("0", CUDA, *MIXED, order="PCI_BUS_ID").gpus] == ["GPU-slow"]
    assert [gpu.uuid for gpu in seen("GPU-fast", CUDA, *MIXED).gpus] == ["GPU-fast"]


@pytest.mark.parametrize("variable", [MIG, MIG[:12], f"{MIG},{OTHER_MIG}"])
def test_a_mig_instance_named_by_uuid_or_number_is_what_a_run_gets(variable):
    machine = seen(variable, CUDA, cut("GPU-aa11", MIG, OTHER_MIG))
    assert (machine.device, machine.refusal) == ("cuda", None)
    (instance,) = machine.default_gpus("single")
    assert (instance.uuid, instance.name) == (MIG, "A100 MIG 1g.10gb")
    assert (instance.memory_total_bytes, instance.memory_used_bytes) == (9728 * stand_in.MIB, 64)
    assert instance.compute_capability == "8.0"
    for name in ("power_w", "temperature_c", "sm_clock_mhz", "gpu_utilization_percent", "energy_mj"):
        assert getattr(instance, name) is None, name
    assert instance.throttle_reasons is None


def test_cuda_gives_a_process_one_mig_instance_and_a_wrong_name_names_them():
    machine = seen(f"{MIG},{OTHER_MIG}", CUDA, cut("GPU-aa11", MIG, OTHER_MIG))
    with pytest.raises(UserError, match=r"devices=2, but there is 1 \(CUDA gives a process one MIG inst"):
        machine.named_or_counted_gpus(2)
    machine = seen(MIG.replace("41a3", "41a4"), CUDA, cut("GPU-aa11", MIG, OTHER_MIG))
    assert f"(allowed: {MIG}, {OTHER_MIG})" in refused(machine)
    assert "NVML lists none" in refused(seen(MIG, CUDA, Gpu(uuid="GPU-aa11")))


def test_a_gpu_in_mig_mode_is_never_chosen_by_its_parent_and_names_its_instances():
    machine = seen(None, CUDA, cut("GPU-aa11", MIG), Gpu(name="A100", uuid="GPU-bb22", memory_used=2**34))
    assert [gpu.uuid for gpu in machine.default_gpus("single")] == ["GPU-bb22"]
    assert [gpu.uuid for gpu in machine.default_gpus("ddp")] == ["GPU-bb22"]
    assert [gpu.uuid for gpu in machine.named_or_counted_gpus("1+")] == ["GPU-bb22"], "places are those of the variable"
    with pytest.raises(UserError, match=r"devices=2, but there is 1 \(GPU 0 in MIG mode not counted\)"):
        machine.named_or_counted_gpus(2)
    with pytest.raises(UserError, match=f"GPU 0 is in MIG mode.* try CUDA_VISIBLE_DEVICES={MIG}"):
        machine.named_or_counted_gpus("0+")
    for variable in (None, "0", "GPU-aa11"):
        line = refused(seen(variable, CUDA, cut("GPU-aa11", MIG, OTHER_MIG)))
        assert f"GPU 0 is in MIG mode, where runs use an instance by its name; try CUDA_VISIBLE_DEVICES={MIG}" in line
        assert OTHER_MIG in line
    assert "and there is none; try `sudo nvidia-smi -i 0 -mig 0`" in refused(seen(None, CUDA, cut("GPU-aa11")))


MIXED = (Gpu(name="T400", uuid="GPU-slow"), Gpu(name="RTX 4090", uuid="GPU-fast"))


@pytest.mark.parametrize(
    ("free_gib", "count", "taken"), [([60, 79, 80, 60], 2, [1, 2]), ([80, 80, 80, 80], 2, [0, 1]), ([76, 79], 1, [1])]
)
def test_the_gpus_with_most_free_memory_are_taken(free_gib, count, taken):
    gpus = [Gpu(uuid=f"GPU-{n}", memory_used=(80 - gib) << 30, memory_total=80 << 30) for n, gib in enumerate(free_gib)]
    assert [gpu.index for gpu in seen(None, CUDA, *gpus).named_or_counted_gpus(count)] == taken

"""The devices that a launch gives its processes, by UUID."""

import shlex

import pytest
import stand_in
from cuda_python import cuda_python
from stand_in import Gpu, Machine

from on_disk import run_file
from trainfast_runner.errors import UserError
from trainfast_runner.export.formats import export_run
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

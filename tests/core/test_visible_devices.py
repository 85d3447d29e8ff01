"""What CUDA_VISIBLE_DEVICES leaves of the GPUs that the driver lists."""

from __future__ import annotations

import pytest
import stand_in
from stand_in import Gpu, Machine

from trainfast_runner.hardware.machine import Machine as Seen
from trainfast_runner.hardware.machine import look
from trainfast_runner.problem import Problem

CUDA, CPU = "2.13.0+cu130", "2.13.0+cpu"
MIG = "MIG-41a36bfc-73e2-5e3d-8b3a-2b7a4b0d0ac0"


def seen(variable: str | None, torch: str | None = CUDA) -> Seen:
    gpus = [Gpu(uuid="GPU-aa11"), Gpu(uuid="GPU-bb22")]
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    with stand_in.installed(Machine(gpus)):
        return look(torch, environment)


@pytest.mark.parametrize(
    ("variable", "indexes"),
    [(None, [0, 1]), ("1", [1]), ("1,0", [1, 0]), ("GPU-bb", [1]), ("GPU-aa11, 1", [0, 1]), ("0,7,1", [0])],
)
def test_indexes_and_uuids_name_gpus_in_their_order(variable: str | None, indexes: list[int]) -> None:
    machine = seen(variable)
    assert [gpu.index for gpu in machine.gpus] == indexes
    assert machine.device == "cuda"
    machine.refuse_mig()


@pytest.mark.parametrize("variable", ["", "-1", "7", "GPU-cc"])
def test_where_none_is_left_it_is_said_why(variable: str) -> None:
    machine = seen(variable)
    assert (machine.device, machine.gpus) == ("cpu", ())
    assert machine.why_no_gpu == f"CUDA_VISIBLE_DEVICES={variable} leaves none"
    machine.refuse_mig()


@pytest.mark.parametrize("variable", [MIG, f"0,{MIG}", "MIG-GPU-aa11/1/0"])
def test_a_mig_instance_is_refused_and_not_replaced_by_the_cpu(variable: str) -> None:
    with pytest.raises(Problem, match=r"CUDA_VISIBLE_DEVICES=MIG-\S+ is an instance of a GPU \(MIG\)") as raised:
        seen(variable).refuse_mig()
    assert "\n" not in raised.value.line()


def test_a_build_for_the_cpu_does_not_care_for_mig() -> None:
    machine = seen(MIG, CPU)
    machine.refuse_mig()
    assert (machine.device, machine.gpus) == ("cpu", ())

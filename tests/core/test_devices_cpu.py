"""`devices=cpu` and `cpu:N` train on the CPU of a machine that has GPUs."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import Machine
from trainfast_runner.memory.headroom import available_memory
from trainfast_runner.records.result import Result
from trainfast_runner.records.tick import DeviceReading
from trainfast_runner.results.comparison.difference import compare
from trainfast_runner.search.advice.advisor import advise
from trainfast_runner.search.advice.facts import Situation
from trainfast_runner.settings import device_counts
from trainfast_runner.settings.compatibility.check import check, refusal_anywhere
from trainfast_runner.settings.compatibility.facts import Facts
from trainfast_runner.settings.device_counts import first_gpu_name
from trainfast_runner.settings.spec import resolve

GIB = 2**30
GPUS = tuple(
    DeviceReading(index=index, uuid=f"GPU-{index}", name="Card", memory_free_bytes=20 * GIB, compute_capability="8.6")
    for index in range(2)
)
TWO = Machine(device="cuda", gpus=GPUS, nvml_gpus=GPUS, cores=8)
BROKEN = Machine(
    device="cpu", gpus=(), nvml_gpus=(), cores=8, refusal=UserError("a GPU is here and NVML gives none", key="devices")
)
LLAMA = {"model_type": "llama", "vocab_size": 4096, "base_model_tp_plan": {"layers.*.self_attn.q_proj": "colwise"}}


def facts(*settings: str, where: Machine = TWO) -> Facts:
    spec = resolve("tiny-llama", settings)
    return Facts(spec, where.used_by(spec.knobs["devices"]), LLAMA, {}, "python")


@pytest.mark.parametrize(
    ("value", "nearest"), [("cpux", "cpu"), ("cpu:0", "cpu:1"), ("cpu:99", "cpu:8"), ("cpu:", "cpu"), ("CPU", "cpu")]
)
def test_what_is_nearly_the_cpu_names_the_nearest(value: str, nearest: str) -> None:
    with pytest.raises(UserError) as refused:
        resolve("tiny-llama", [f"devices={value}"])
    line = refused.value.line()
    assert (refused.value.nearest, refused.value.key) == (nearest, "devices")
    assert value in line
    assert "allowed: cpu, cpu:1 to cpu:8" in line


def test_the_cpu_is_no_device_to_watch() -> None:
    with pytest.raises(UserError, match="neither a count nor a list"):
        resolve("tiny-llama", ["watch=cpu"])


@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        (["devices=cpu"], 1),
        (["devices=cpu:1"], 1),
        (["strategy=ddp", "devices=cpu"], 8),
        (["strategy=ddp", "devices=cpu:3"], 3),
        (["strategy=tp", "devices=cpu"], 2),
        (["strategy=tp", "devices=cpu:2"], 2),
        (["strategy=fsdp+tp", "devices=cpu"], 4),
    ],
)
def test_so_many_processes_run_on_the_cpu_of_a_machine_with_gpus(settings: list[str], processes: int) -> None:
    asked = facts(*settings)
    check(asked)
    assert asked.machine.device == "cpu"
    assert (asked.rank_count, asked.device_count) == (processes, processes)
    assert device_counts.recorded_devices(asked.spec, TWO) == f"cpu:{processes}"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["strategy=dp", "devices=cpu"], "devices=cpu asks for the CPU; try strategy=ddp with devices=cpu:2"),
        (["strategy=naive-mp", "devices=cpu:4"], "devices=cpu:4 asks for the CPU; try strategy=pp with devices=cpu:4"),
        (["devices=cpu:2"], "strategy=single trains on one device and devices=cpu:2 asks for 2"),
        (["precision=tf32", "devices=cpu"], "precision=tf32 is a format of NVIDIA tensor cores"),
        (["optimizer=paged-adamw-8bit", "devices=cpu"], "optimizer=paged-adamw-8bit"),
    ],
)
def test_what_needs_a_gpu_is_refused_with_both_named(settings: list[str], expected: str) -> None:
    asked = replace(facts(*settings), versions={"bitsandbytes": "1"})
    with pytest.raises(UserError) as refused:
        check(asked)
    assert expected in refused.value.line()


def test_predict_refuses_what_no_cpu_can_run() -> None:
    refusal = refusal_anywhere(resolve("tiny-llama", ["strategy=dp", "devices=cpu"]), TWO)
    assert refusal is not None
    assert "strategy=dp" in refusal.line()
    assert refusal_anywhere(resolve("tiny-llama", ["strategy=dp", "devices=4"]), TWO) is None


def test_the_available_memory_is_the_hosts_and_the_watched_gpus_stay() -> None:
    spec = resolve("tiny-llama", ["strategy=ddp", "devices=cpu:2", "watch=1"])
    available = available_memory(spec, TWO, 2, 8 * GIB)
    assert available is not None
    assert (available.size_bytes, available.source) == (4 * GIB, "free, shared by 2 processes")
    assert first_gpu_name(spec, TWO) is None
    on_cpu = TWO.used_by(spec.knobs["devices"])
    assert [gpu.index for gpu in on_cpu.watched("1", ())] == [1]


def test_gpus_that_cannot_be_used_refuse_every_run_but_one_on_the_cpu() -> None:
    with pytest.raises(UserError, match="a GPU is here"):
        check(facts(where=BROKEN))
    check(facts("devices=cpu", where=BROKEN))


def test_the_advice_is_for_the_cpu() -> None:
    spec = resolve("tiny-llama", ["devices=cpu"])
    (strategy,) = [one for one in advise(spec, spec.knobs, TWO, Situation()) if one.knob == "strategy"]
    assert strategy.text.startswith("single: with devices=cpu the processes of other strategies share these 8 cores")


def test_runs_compare_takes_cpu_2_for_two_processes() -> None:
    def result(devices: object) -> Result:
        whole = {
            **{"run_id": f"of-{devices}", "state": "finished", "preset": "tiny-llama"},
            **{"knobs": {"strategy": "ddp", "devices": devices}, "actual": {"device": "cpu", "world_size": 2}},
        }
        return msgspec.convert(whole, Result)

    assert compare(result("cpu:2"), result(2)).knobs == []
    assert compare(result("cpu:2"), result(4)).knobs == [("devices", 2, 4)]

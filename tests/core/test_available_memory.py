"""The memory that a rank may use, the least that a limit must hold, and the fit of a predicted run or search."""

import sys
import tempfile
import threading
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from layered_model import model_of, spec_with

import plans
from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import Machine
from trainfast_runner.machine.resource_limits import free_within_limits
from trainfast_runner.memory import corrections, headroom
from trainfast_runner.memory.corrections import Correction
from trainfast_runner.memory.headroom import UNCORRECTED_MARGIN_BYTES, UNTOUCHED_BYTES, AvailableMemory
from trainfast_runner.records.tick import DeviceReading
from trainfast_runner.search import searches
from trainfast_runner.search.batch_conductor import predicted_size, trace_size_model
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.settings.spec import resolve

MIB, GIB = 1 << 20, 1 << 30
CPU = Machine(device="cpu", gpus=(), nvml_gpus=(), cores=2)


def two_gpus():
    gpus = tuple(
        DeviceReading(index=index, uuid=f"GPU-{index}", memory_free_bytes=free * GIB)
        for index, free in enumerate((10, 4))
    )
    return Machine(device="cuda", gpus=gpus, nvml_gpus=gpus, cores=2)


def asked(*settings):
    return resolve("tiny-llama", settings)


SHARED = (DeviceReading(index=0, uuid="GPU-0"),)
TWO_GPUS, WITHOUT_READING = two_gpus(), Machine(device="cuda", gpus=SHARED, nvml_gpus=SHARED, cores=20)
BEYOND, UNEVEN = ("memory_limit=9.8GiB", "devices=0+"), ("strategy=ddp", "devices=2", "memory_limit=2GiB+1536MiB")
LIMIT, CONTEXT = {"from_memory_limit": True}, {"with_context": True}


@pytest.mark.parametrize(
    ("settings", "machine", "ranks", "host", "size_bytes", "source", "flags"),
    [
        ((), TWO_GPUS, 1, (None,), 10 * GIB, "free on GPU 0", CONTEXT),
        (["strategy=ddp"], TWO_GPUS, 2, (None,), 4 * GIB, "free on GPU 1", CONTEXT),
        ((), WITHOUT_READING, 1, (6 * GIB,), 6 * GIB, "free on the host, whose memory GPU 0 shares", CONTEXT),
        (["memory_limit=3GiB"], TWO_GPUS, 1, (None, 512 * MIB), 3 * GIB, "memory_limit", LIMIT),
        (UNEVEN, CPU, 2, (None,), 1536 * MIB, "memory_limit", LIMIT),
        (BEYOND, TWO_GPUS, 1, (None,), int(9.8 * GIB), "memory_limit", LIMIT),
        (BEYOND, TWO_GPUS, 1, (None, 512 * MIB), 10 * GIB, "free on GPU 0, less than memory_limit", CONTEXT),
        (["memory_limit=8GiB"], CPU, 1, (6 * GIB,), 6 * GIB, "free, less than memory_limit", {}),
        ((), CPU, 1, (4 * GIB,), 4 * GIB, "free", {}),
        (["strategy=ddp"], CPU, 2, (4 * GIB,), 2 * GIB, "free, shared by 2 processes", {}),
    ],
)
def test_the_tightest_rank_has_its_limit_or_what_is_free(settings, machine, ranks, host, size_bytes, source, flags):
    available = headroom.available_memory(asked(*settings), machine, ranks, *host)
    assert available == AvailableMemory(size_bytes, source, **flags)


def test_a_context_comes_out_of_what_is_free_and_not_out_of_a_limit():
    hosts = [headroom.available_memory(asked(), machine, 1, None) for machine in (CPU, WITHOUT_READING)]
    assert hosts == [None, None], "unknown"
    free, limit = (AvailableMemory(4 * GIB, "", **flags) for flags in (CONTEXT, LIMIT))
    assert [free.for_allocator(size) for size in (512 * MIB, None, 5 * GIB)] == [4 * GIB - 512 * MIB, 4 * GIB, 0]
    assert limit.for_allocator(512 * MIB) == 4 * GIB
    gpus = (DeviceReading(index=0, uuid="GPU-0", name="a GPU", memory_free_bytes=GIB),)
    machine = Machine(device="cuda", gpus=gpus, nvml_gpus=gpus, cores=2)
    found = fit(msgspec.structs.replace(MODEL, device="cuda"), machine)
    assert (found.margin_bytes, found.refusal) == (0, None)
    assert found.fits is True


def test_control_group_may_have_less_than_its_host(tmp_path):
    group = tmp_path / "fs/job/step"
    group.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("0::/job/step\n")
    (tmp_path / "mountinfo").write_text(f"41 31 0:38 / {tmp_path / 'fs'} rw,relatime - cgroup2 cgroup2 rw\n")
    assert free_within_limits(8 * GIB, tmp_path) == 8 * GIB
    (group / "memory.current").write_text(f"{GIB}\n")
    (group / "memory.max").write_text("max\n")
    assert free_within_limits(8 * GIB, tmp_path) == 8 * GIB
    (group / "memory.max").write_text(f"{4 * GIB}\n")
    assert (free_within_limits(8 * GIB, tmp_path), free_within_limits(2 * GIB, tmp_path)) == (3 * GIB, 2 * GIB)
    (group / "memory.stat").write_text(f"active_file {GIB // 4}\ninactive_file {GIB // 2}\n")
    assert free_within_limits(8 * GIB, tmp_path) == 3.5 * GIB, "the kernel drops file pages before it refuses memory"
    (group.parent / "memory.current").write_text(f"{5 * GIB}\n")
    (group.parent / "memory.max").write_text(f"{6 * GIB}\n")
    assert free_within_limits(8 * GIB, tmp_path) == GIB, "the group above has less left"
    (group.parent / "memory.max").write_text(f"{4 * GIB}\n")
    assert free_within_limits(8 * GIB, tmp_path) == 0


def test_memory_controller_of_version_1_may_have_less_than_its_host(tmp_path):
    group = tmp_path / "fs/job"
    group.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("5:cpu,cpuacct:/job\n4:memory:/job\n")
    (tmp_path / "mountinfo").write_text(f"41 31 0:38 / {tmp_path / 'fs'} rw - cgroup cgroup rw,memory\n")
    (group / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert free_within_limits(8 * GIB, tmp_path) == 8 * GIB
    (group / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    assert free_within_limits(8 * GIB, tmp_path) == 3 * GIB
    (group / "memory.stat").write_text(f"inactive_file {GIB // 4}\ntotal_inactive_file {GIB // 2}\n")
    assert free_within_limits(8 * GIB, tmp_path) == 3.5 * GIB


def a_plan(asked_bytes, device="cpu", ranks=1):
    limit = None if asked_bytes is None else "+".join(f"{one >> 20}MiB" for one in asked_bytes)
    spec = SimpleNamespace(knobs={**defaults(), "memory_limit": limit})
    return SimpleNamespace(device=device, world_size=ranks, memory_limit_bytes=asked_bytes, spec=spec)


def test_a_search_goes_up_to_the_limit_or_a_share_of_what_is_free_so_that_nothing_swaps(monkeypatch):
    monkeypatch.setattr(searches, "read_host_free_bytes", lambda: 10 * GIB)
    assert searches.limits_of(a_plan((9 * GIB,))) == searches.Limits((9 * GIB,), "memory_limit=9216MiB")
    assert searches.limits_of(a_plan((2 * GIB, GIB), ranks=2)).by_rank == (2 * GIB, GIB)
    found = searches.limits_of(a_plan(None))
    assert found == searches.Limits((9 * GIB,), "90% of the 10.0 GiB free, set as a real limit")
    beyond = searches.limits_of(a_plan((8 * GIB, 8 * GIB), ranks=2))
    assert beyond.by_rank == (4608 * MIB, 4608 * MIB)
    assert beyond.source.endswith("shared by 2 ranks, set as a real limit, less than memory_limit=8192MiB+8192MiB")
    assert searches.limits_of(a_plan(None, "cuda")).by_rank == (), "each rank says what its GPU has"
    assert searches.limits_of(a_plan((64 * GIB,), "cuda")).by_rank == (64 * GIB,)


LEAST_WEIGHTS = [
    (["strategy=single"], 1, 4), (["strategy=single", "precision=bf16"], 1, 4),
    (["strategy=single", "precision=bf16-pure"], 1, 2), (["strategy=ddp"], 4, 4), (["strategy=fsdp"], 4, 1),
    (["strategy=fsdp+tp"], 8, 0.5), (["strategy=zero3"], 4, 1), (["strategy=zero2", "precision=bf16"], 4, 2),
    (["strategy=zero3-offload"], 2, 0), (["strategy=tp", "tp_degree=4"], 4, 1),
    (["strategy=ddp+tp", "tp_degree=2"], 8, 2), (["strategy=ddp+pp", "pp_degree=4"], 8, 1),
    (["strategy=ddp+tp+pp"], 8, 1), (["strategy=fsdp+tp+pp"], 8, 0.5), (["strategy=naive-mp"], 2, 2),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "devices", "bytes_a_parameter"), LEAST_WEIGHTS)
def test_least_weight_bytes(settings, devices, bytes_a_parameter):
    knobs = resolve("tiny-llama", settings).knobs
    assert headroom.least_weight_bytes(1_000_000, knobs, devices) == bytes_a_parameter * 1_000_000


MODEL = msgspec.structs.replace(model_of(12), trace="t")


def fit(model=MODEL, machine=CPU, ranks=1, **knobs):
    return headroom.predict_headroom(model, spec_with(**knobs), machine, ranks, 4 * GIB)


def corrected(model=MODEL, **knobs):
    """The model once a run with these knobs took 5 MiB beyond its trace."""
    traced = model.predict(spec_with(**knobs)).traced_bytes
    beyond = {"forward_backward": 5 * MIB, "optimizer": 5 * MIB}
    known = Correction(run_id="r1", beyond_bytes=beyond, step_bytes=traced["forward_backward"])
    case = corrections.correction_key("t", spec_with(**knobs).knobs, 1)
    return msgspec.structs.replace(model, corrections=corrections.DeviceCorrections(by_case={case: known}))


@pytest.mark.parametrize(
    ("model", "strategy"), [(MODEL, "single"), (corrected(batch_size=5000), "single"), (MODEL, "ddp")]
)
def test_the_largest_batch_fits_and_the_next_one_does_not(model, strategy):
    limit = {"memory_limit": "200MiB", "strategy": strategy, "batch_size": 7}
    most = fit(model, **limit).max_batch
    assert fit(model, **{**limit, "batch_size": most}).fits is True
    above = fit(model, **{**limit, "batch_size": most + 1})
    assert (above.fits, above.max_batch) == (False, most)
    assert above.left_bytes < 0


def test_a_limit_of_a_cpu_has_to_have_a_margin_which_a_measured_run_makes_smaller():
    asked = {"memory_limit": "200MiB", "batch_size": 5000}
    assert fit(**asked).margin_bytes == UNCORRECTED_MARGIN_BYTES
    assert fit(corrected(batch_size=5000), **asked).margin_bytes == UNTOUCHED_BYTES
    further = fit(corrected(batch_size=5000), **{**asked, "batch_size": 100_000}).margin_bytes
    assert UNTOUCHED_BYTES < further < UNCORRECTED_MARGIN_BYTES, "the further away, the less is known"
    compiling = fit(**asked, compile="default")
    assert compiling.margin_bytes > 3 * UNCORRECTED_MARGIN_BYTES, "nobody has measured the compiler here"
    compiled = {**asked, "compile": "default"}
    assert fit(corrected(**compiled), **compiled).margin_bytes == UNTOUCHED_BYTES + headroom.COMPILER_BYTES
    free = fit(batch_size=5000)
    assert (free.margin_bytes, free.available and free.available.source) == (0, "free"), "it counts no address space"


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({"strategy": "dp", "devices": 2}, "strategy=dp copies the model to each of two or more GPUs"),
        ({"strategy": "ddp", "devices": 99}, "devices=99: at most 8 processes on a CPU"),
    ],
)
def test_what_has_no_devices_here_says_so_and_is_not_held_against_what_is_free_here(knobs, expected):
    found = fit(ranks=knobs["devices"] if knobs["strategy"] == "ddp" else 1, **knobs)
    assert found.refusal.message.startswith(expected)
    assert found.predicted.total_bytes > 0, "for somebody who plans for another machine"
    assert (found.available, found.fits, found.max_batch) == (None, None, None)
    limited = fit(**knobs, memory_limit="8GiB")
    assert limited.available is not None
    assert limited.fits is True


PLAN = replace(plans.PLAN, spec=spec_with(), memory_limit_bytes=(200 * MIB,))


def after_a_run_that_took_less(batch_size):
    """A tenth less than was traced."""
    spec = spec_with(batch_size=batch_size)
    traced = MODEL.predict(spec).traced_bytes["forward_backward"]
    known = corrections.Correction(
        run_id="r1", beyond_bytes={"forward_backward": -traced // 10, "optimizer": 0}, step_bytes=traced
    )
    case = corrections.correction_key("t", spec.knobs, 1)
    return msgspec.structs.replace(MODEL, corrections=corrections.DeviceCorrections(by_case={case: known}))


def test_the_growth_is_that_of_the_sizes_below_the_maximum():
    most = predicted_size(MODEL, PLAN, 200 * MIB).max_batch
    taught = after_a_run_that_took_less(most)
    limit = taught.predict(spec_with(batch_size=most)).total_bytes
    found = predicted_size(taught, PLAN, limit)
    below = [taught.predict(spec_with(batch_size=size)).total_bytes for size in (most // 2, most)]
    assert found.max_batch == most
    assert abs(found.bytes_per_sample - (below[1] - below[0]) / (most - most // 2)) < 0.02 * found.bytes_per_sample


def test_a_tracer_that_can_make_no_temporary_file_is_an_error_of_the_prediction_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(UserError, match="a temporary file cannot be made: No such file or directory"):
        trace_size_model(replace(PLAN, python=sys.executable), threading.Event())

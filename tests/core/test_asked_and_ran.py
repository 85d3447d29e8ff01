"""A run that trained something else than was asked says in which field."""

from typing import Any

import pytest

from trainfast_runner.records.run_file import ClockAnchor, RunFile
from trainfast_runner.records.worker_lines import ActualLine, WorkerLine
from trainfast_runner.results.asked_and_ran import first_difference


def asked(world_size: int, **knobs: Any) -> RunFile:
    return RunFile(
        run_id="one",
        preset="tiny-llama",
        model={"family": "llama"},
        data={},
        knobs={"precision": "fp32", "optimizer": "adamw", "tp_degree": 2, "reshard": "on", **knobs},
        device="cpu",
        world_size=world_size,
        python="python",
        argv=[],
        env={},
        cwd="/",
        boot_id="boot",
        clock=ClockAnchor(monotonic_ns=0, wall_ns=0),
        cache_dir="/",
    )


def ran(**fields: Any) -> dict[int, list[WorkerLine]]:
    return {0: [ActualLine(t_ns=1, **fields)]}


@pytest.mark.parametrize(
    ("strategy", "ranks", "fields"),
    [
        ("fsdp", 2, {"wrapper": "FSDPModule", "mesh": {"dp": 2}, "reshard": "on"}),
        ("tp", 2, {"wrapper": "DTensor", "mesh": {"tp": 2}, "reshard": None}),
        ("ddp+tp", 4, {"wrapper": "DTensor+DistributedDataParallel", "mesh": {"dp": 2, "tp": 2}}),
        ("fsdp+tp", 4, {"wrapper": "FSDPModule+DTensor", "mesh": {"dp": 2, "tp": 2}, "reshard": "on"}),
    ],
)
def test_a_sharded_run_that_is_what_was_asked(strategy: str, ranks: int, fields: dict[str, Any]) -> None:
    assert first_difference(asked(ranks, strategy=strategy), ran(world_size=ranks, **fields)) is None


@pytest.mark.parametrize(
    ("strategy", "fields", "expected"),
    [
        ("fsdp", {"wrapper": "DistributedDataParallel"}, "strategy=fsdp (wrapper): asked for FSDPModule, but rank 0"),
        ("fsdp", {"wrapper": "FSDPModule", "reshard": "off"}, "reshard: asked for on, but rank 0 ran off"),
        ("fsdp+tp", {"wrapper": "FSDPModule"}, "asked for DTensor+FSDPModule, but rank 0 ran FSDPModule"),
        ("ddp+tp", {"mesh": {"dp": 4, "tp": 1}}, "mesh: asked for {'dp': 2, 'tp': 2}"),
        ("naive-mp", {"wrapper": "none", "mesh": {"mp": 1}}, "mesh: asked for {'mp': 4}"),
    ],
)
def test_the_first_field_that_differs_is_named(strategy: str, fields: dict[str, Any], expected: str) -> None:
    difference = first_difference(asked(4, strategy=strategy), ran(**fields))
    assert difference is not None
    assert expected in difference


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_every_kernel_is_what_auto_asked_for(kernel: str) -> None:
    assert first_difference(asked(1, attention="auto"), ran(attention=kernel)) is None
    named = first_difference(asked(1, attention="flash"), ran(attention=kernel))
    assert named == f"attention=flash: asked for flash_attention_2, but rank 0 ran {kernel}"

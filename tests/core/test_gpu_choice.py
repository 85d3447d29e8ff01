"""A count of several GPUs takes those joined by NVLink where they have nearly as much free memory."""

from __future__ import annotations

import pytest
import stand_in
from stand_in import Gpu, Machine

from trainfast_runner.machine.devices import detect_machine
from trainfast_runner.machine.gpus.choice import GpuChoice

GIB = 2**30
PAIRS = ((0, 1), (2, 3))


def chosen(free_gib: list[float], count: int, pairs: tuple[tuple[int, int], ...] = PAIRS, links: int = 4) -> GpuChoice:
    """The choice among GPUs with that much free memory, joined in pairs by NVLinks."""
    ends = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
    gpus = [
        Gpu(
            uuid=f"GPU-{index}",
            bus=index + 1,
            memory_used=80 * GIB - int(free * GIB),
            memory_total=80 * GIB,
            memory_reserved=0,
            links=(ends[index] + 1,) * links if index in ends else (),
        )
        for index, free in enumerate(free_gib)
    ]
    with stand_in.installed(Machine(gpus)):
        machine = detect_machine({"torch": "2.13.0", "torch.version.cuda": "13.0"}, environment={})
    return machine.named_or_counted_gpus(count)


def indexes(choice: GpuChoice) -> list[int]:
    return [gpu.index for gpu in choice.gpus]


def test_a_linked_pair_is_taken_instead_of_the_freest_within_ten_percent() -> None:
    choice = chosen([76, 79, 80, 74], 2)
    assert indexes(choice) == [0, 1]
    assert choice.reason == (
        "GPUs 0 and 1: linked by NVLink (NV4), instead of GPUs 1 and 2, which have 4 % more free memory"
    )


@pytest.mark.parametrize(
    ("free_gib", "count", "taken"),
    [
        ([60, 79, 80, 60], 2, [1, 2]),
        ([80, 79, 70, 60], 2, [0, 1]),
        ([80, 80, 80, 80], 2, [0, 1]),
        ([76, 79, 80, 74], 3, [0, 1, 2]),
        ([76, 79, 80, 74], 1, [2]),
    ],
)
def test_the_freest_are_taken_where_they_are_linked_or_no_linked_set_is_nearly_as_free(
    free_gib: list[float], count: int, taken: list[int]
) -> None:
    choice = chosen(free_gib, count)
    assert indexes(choice) == taken
    assert choice.reason is None


def test_without_nvlink_the_freest_are_taken() -> None:
    assert indexes(chosen([76, 79, 80, 74], 2, links=0)) == [1, 2]

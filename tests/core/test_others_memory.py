"""Other processes that take memory of the device while a batch search tries a size."""

from __future__ import annotations

from trainfast_runner.records.tick import DeviceProcess, DeviceReading, HostReading, Tick
from trainfast_runner.search.batch.disturbances import others_growth_text

MIB = 1 << 20
SECOND = 1_000_000_000


def tick(t_s: int, *processes: tuple[int, int]) -> Tick:
    listed = [DeviceProcess(pid=pid, memory_used_bytes=used * MIB) for pid, used in processes]
    device = DeviceReading(index=0, uuid="GPU-0", processes=listed)
    return Tick(t_ns=t_s * SECOND, host=HostReading(), devices=[device], missing={}, sample_us=1)


def test_a_process_of_others_that_grows_during_a_probe_voids_it() -> None:
    ours = tick(1, (10, 500), (99, 200))
    text = others_growth_text([ours, tick(3, (10, 900), (99, 700))], {10}, {"GPU-0"}, 2 * SECOND)
    assert text == "process 99 took 500 MiB of GPU 0 meanwhile"
    assert others_growth_text([ours, tick(3, (10, 9000), (99, 210))], {10}, {"GPU-0"}, 2 * SECOND) is None
    # It grew before the probe began.
    assert (
        others_growth_text([tick(1, (10, 1), (99, 700)), tick(3, (10, 1), (99, 700))], {10}, {"GPU-0"}, 2 * SECOND)
        is None
    )
    # In a container the driver's ids are not ours: nobody can be told apart.
    assert others_growth_text([tick(1, (7, 1)), tick(3, (7, 900))], {10}, {"GPU-0"}, 2 * SECOND) is None
    assert others_growth_text([ours, tick(3, (10, 1), (99, 700))], {10}, {"GPU-1"}, 2 * SECOND) is None


def test_a_process_that_comes_during_a_probe_voids_it() -> None:
    text = others_growth_text([tick(1, (10, 500)), tick(3, (10, 500), (42, 300))], {10}, {"GPU-0"}, 2 * SECOND)
    assert text == "process 42 took 300 MiB of GPU 0 meanwhile"

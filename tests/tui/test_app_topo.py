"""The topology screen: the matrix, and its meaning, at any size."""

import stand_in
from recorded import a_run
from stand_in import Gpu, Machine
from still import a_snapshot, has, running

from trainfast_runner.machine.telemetry.topology import read_topology
from trainfast_tui.text.topology import peer_lines, silent_lines

ISLANDS = Machine(
    [
        Gpu(
            uuid=f"GPU-{index}",
            bus=index,
            node=index // 4,
            links=tuple(b for b in range(8) if b != index and b // 4 == index // 4),
        )
        for index in range(8)
    ]
)


async def opened(home, machine, size, **options):
    with stand_in.installed(machine):
        async with running(home, size=size, **options) as (app, pilot):
            await pilot.show(a_snapshot(a_run(home)))
            await pilot.press("T")

            def is_shown():
                text = app.text
                return "Asking the driver" not in text and ("for training" in text or size[1] <= 40)

            await pilot.until_true(is_shown, "the topology")
            text = app.text
            assert "next run" in await pilot.press("T"), "the same key leads back"
            return text


async def test_the_matrix_and_what_it_means(home):
    text = await opened(home, ISLANDS, (120, 48))
    row = next(line for line in text.splitlines() if line.startswith("GPU5"))
    assert row.split() == ["GPU5", *["SYS"] * 4, "NV1", "X", "NV1", "NV1"]
    has(text, "NV#   over # bonded NVLinks", "pp across the groups sends the least")
    assert "o back" not in text, "Esc is the key that the footer shows"


async def test_it_fits_the_smallest_terminal_and_ascii(home):
    text = await opened(home, ISLANDS, (80, 24), ascii=True)
    assert text.isascii()
    assert "GPU7" in text


def test_a_gpu_that_does_not_answer_is_shown_whole_and_claimed_for_nothing():
    lost = Gpu(uuid="GPU-2", bus=2)
    lost.lost = (0.0, 9.0)
    with stand_in.installed(Machine([Gpu(uuid="GPU-0"), Gpu(uuid="GPU-1", bus=1), lost])):
        topology = read_topology()
    assert peer_lines(topology) == ["Every GPU that answers can read every other one's memory."]
    assert silent_lines(topology) == [f"GPU2 does not answer: {topology.devices[2].error}"]
    assert silent_lines(topology)[0].endswith("a reboot usually brings it back")


async def test_without_a_gpu_it_says_why(home):
    assert "No GPU to show" in await opened(home, Machine([]), (80, 48))

"""How GPUs are connected: the matrix from NVML's own answers, and what it is said to mean."""

import stand_in
import stand_in_machine
from stand_in import Gpu, Machine, gpus

from trainfast_runner.machine.telemetry.topology import interconnect, link_advice, read_topology


def seen(machine):
    with stand_in.installed(machine):
        return read_topology()


def two(**settings):
    """Two GPUs on buses 0 and 1."""
    found = gpus(2, **settings)
    found[1].bus = 1
    return found


def test_bonded_links_are_counted_for_each_peer_and_all_over_a_switch():
    one, other = two()
    one.links, other.links = (1, 1, None, 1), (0, 0, None, 0)
    topology = seen(Machine([one, other]))
    assert topology.matrix == [["X", "NV3"], ["NV3", "X"]]
    assert [device.nvlinks for device in topology.devices] == [3, 3]
    assert interconnect(topology).all_nvlink
    assert "are about equal" in " ".join(link_advice(topology))
    machine = Machine([Gpu(uuid=f"GPU-{index}", bus=index, links=("switch",) * 18) for index in range(4)])
    assert {sign for row in seen(machine).matrix for sign in row} == {"X", "NV18"}
    for gpu in machine.gpus:
        gpu.peer_access = 5
    assert {sign for row in seen(machine).matrix for sign in row} == {"X", "PHB"}, "partitions do not see each other"


def test_without_nvlink_the_pcie_path_decides_and_pp_is_preferred():
    near, far = two()
    far.node = 1
    topology = seen(Machine([near, far]))
    assert topology.matrix == [["X", "SYS"], ["SYS", "X"]]
    assert [device.nvlinks for device in topology.devices] == [None, None]
    text = " ".join(link_advice(topology))
    assert "pp beats tp and zero" in text
    assert "131 s" in text
    assert "SYS pairs cross the link between the CPU sockets" in text


def test_peers_that_cannot_read_each_other_are_named_and_no_gpu_is_one_sentence():
    topology = seen(Machine(two(peer_access=1)))
    assert topology.p2p == [[None, "the chipset does not support it"], ["the chipset does not support it", None]]
    assert "NCCL copies through host memory" in " ".join(link_advice(topology))
    topology = seen(Machine([]))
    assert (topology.devices, topology.matrix) == ([], [])
    [sentence] = link_advice(topology)
    assert "lists no GPU" in sentence


def test_a_lost_gpu_and_an_old_driver_lose_only_their_own_answers():
    lost = two()
    lost[1].lost = (0.0, 9.0)
    topology = seen(Machine(lost))
    assert topology.matrix == [["X", "?"], ["?", "X"]]
    assert "GPU is lost" in (topology.devices[1].error or "")
    assert link_advice(topology)[:2] == [
        "GPU 1 does not answer: the rest is about the others.",
        "One GPU: strategy=single; nothing has to be sent to another.",
    ]
    names = {name for name in stand_in_machine.FUNCTIONS if "NvLink" in name or "P2P" in name}
    old = seen(Machine(two(), absent=frozenset(names)))
    assert (old.matrix, old.p2p) == ([["X", "PHB"], ["PHB", "X"]], [[None, None], [None, None]])


def test_a_binding_without_the_ends_of_links_counts_them_alone():
    one, other = two()
    one.links, other.links = (1, 1), (0, 0)
    absent = frozenset({"nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetNvLinkRemotePciInfo"})
    topology = seen(Machine([one, other], absent=absent))
    assert [device.nvlinks for device in topology.devices] == [2, 2]

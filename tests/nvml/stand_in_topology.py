"""The functions of the stand-in for libnvidia-ml for buses, NUMA nodes and NVLinks."""

from typing import Any

from stand_in_machine import INVALID_ARGUMENT, NOT_SUPPORTED, SUCCESS, Gpu, Machine, gpu_call, gpu_of, machine_call, put


@gpu_call("nvmlDeviceGetPciInfo_v3")
def _pci_info(gpu: Gpu, _seconds: float, info: Any) -> int:
    info._obj.busId = b"00000000:%02X:00.0" % gpu.bus
    return SUCCESS


@gpu_call("nvmlDeviceGetCpuAffinity")
def _cpu_affinity(gpu: Gpu, _seconds: float, _words: Any, mask: Any) -> int:
    mask._obj[0] = 0xFFFFFFFF << 32 * gpu.node
    return SUCCESS


@gpu_call("nvmlDeviceGetMemoryAffinity")
def _memory_affinity(gpu: Gpu, _seconds: float, _words: Any, mask: Any, _scope: Any) -> int:
    mask._obj[0] = 1 << gpu.node
    return SUCCESS


@machine_call("nvmlDeviceGetTopologyCommonAncestor")
def _common_ancestor(machine: Machine, one: Any, other: Any, level: Any) -> int:
    a, b = (gpu_of(machine, handle) for handle in (one, other))
    return put(level, 30 if a.node == b.node else 50)


@machine_call("nvmlDeviceGetP2PStatus")
def _peer_status(machine: Machine, one: Any, other: Any, _capability: Any, status: Any) -> int:
    return put(status, max(gpu_of(machine, handle).peer_access for handle in (one, other)))


@gpu_call("nvmlDeviceGetNvLinkState")
def _link_state(gpu: Gpu, _seconds: float, link: Any, is_active: Any) -> int:
    if link >= len(gpu.links):
        return INVALID_ARGUMENT if gpu.links else NOT_SUPPORTED
    return put(is_active, int(gpu.links[link] is not None))


@gpu_call("nvmlDeviceGetNvLinkRemoteDeviceType")
def _link_end_kind(gpu: Gpu, _seconds: float, link: Any, kind: Any) -> int:
    return put(kind, 2 if gpu.links[link] == "switch" else 0)


@gpu_call("nvmlDeviceGetNvLinkRemotePciInfo_v2")
def _link_end(gpu: Gpu, _seconds: float, link: Any, info: Any) -> int:
    end = gpu.links[link]
    info._obj.busId = b"00000000:%02X:00.0" % (end if isinstance(end, int) else 0xF0)
    return SUCCESS

"""The functions of the stand-in for libnvidia-ml for buses, NUMA nodes and NVLinks."""

from stand_in_machine import INVALID_ARGUMENT, NOT_SUPPORTED, SUCCESS, gpu_call, gpu_of, machine_call, put


@gpu_call("nvmlDeviceGetPciInfo_v3")
def _pci_info(gpu, _seconds, info):
    info._obj.busId = b"00000000:%02X:00.0" % gpu.bus
    return SUCCESS


@gpu_call("nvmlDeviceGetCpuAffinity")
def _cpu_affinity(gpu, _seconds, _words, mask):
    mask._obj[0] = 0xFFFFFFFF << 32 * gpu.node
    return SUCCESS


@gpu_call("nvmlDeviceGetMemoryAffinity")
def _memory_affinity(gpu, _seconds, _words, mask, _scope):
    mask._obj[0] = 1 << gpu.node
    return SUCCESS


@machine_call("nvmlDeviceGetTopologyCommonAncestor")
def _common_ancestor(machine, one, other, level):
    a, b = (gpu_of(machine, handle) for handle in (one, other))
    return put(level, 30 if a.node == b.node else 50)


@machine_call("nvmlDeviceGetP2PStatus")
def _peer_status(machine, one, other, _capability, status):
    return put(status, max(gpu_of(machine, handle).peer_access for handle in (one, other)))


@gpu_call("nvmlDeviceGetNvLinkState")
def _link_state(gpu, _seconds, link, is_active):
    if link >= len(gpu.links):
        return INVALID_ARGUMENT if gpu.links else NOT_SUPPORTED
    return put(is_active, int(gpu.links[link] is not None))


@gpu_call("nvmlDeviceGetNvLinkRemoteDeviceType")
def _link_end_kind(gpu, _seconds, link, kind):
    return put(kind, 2 if gpu.links[link] == "switch" else 0)


@gpu_call("nvmlDeviceGetNvLinkRemotePciInfo_v2")
def _link_end(gpu, _seconds, link, info):
    end = gpu.links[link]
    info._obj.busId = b"00000000:%02X:00.0" % (end if isinstance(end, int) else 0xF0)
    return SUCCESS

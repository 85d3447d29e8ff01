"""The machine behind the stand-in for libnvidia-ml: its GPUs, its clock, and the register of its C functions."""

import ctypes
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED = 0, 1, 2, 3
NOT_FOUND = 6
INSUFFICIENT_SIZE, TIMEOUT, FUNCTION_NOT_FOUND, GPU_IS_LOST = 7, 10, 13, 15
MIB = 1024**2
SW_THERMAL = 0x20


@dataclass
class Gpu:
    """One GPU; a heat ramp makes its temperature and its thermal slowdown functions of the machine's time."""

    name: str = "NVIDIA Stand-In 80GB"
    uuid: str = ""
    compute_capability: tuple[int, int] = (8, 0)
    memory_total: int = 81920 * MIB
    memory_used: int = 1024 * MIB
    memory_reserved: int = 512 * MIB
    utilization: tuple[int, int] = (97, 41)
    temperature: float = 50.0
    heats_per_s: float = 0.0
    thermal_above: float = 87.0
    slowdown: int = 92
    shutdown: int = 95
    gpu_max: int = 87
    memory_max: int = 95
    memory_temperature: int = 60
    fan: int = 30
    power_mw: int = 250_000
    limit_mw: int = 400_000
    energy_mj: int = 5_000_000
    energy_share: float = 1.0
    """The share of the true energy that the counter counts."""
    clocks: dict[int, int] = field(default_factory=lambda: {1: 1410, 2: 1593})
    max_clocks: dict[int, int] = field(default_factory=lambda: {1: 1980, 2: 1593})
    reasons: int = 0
    supported_reasons: int = 0x1FF
    violation_ns: Callable[[int, float], int] = lambda _field, seconds: 0
    """The duration counters by field id; those of single causes are asked for as 269 to 271 wherever they stand."""
    cause_numbers: int | None = 269
    """The first field id of the counters of single causes: 269, 251, or None without any."""
    pcie_bytes: Callable[[float], int] = lambda seconds: 0
    """Sent and received by that second; the counter has 32 bits."""
    nvlink_kib: Callable[[float], int] = lambda seconds: 0
    ecc: tuple[int, int] = (0, 0)
    remapped: tuple[int, int, int, int] = (0, 0, 0, 0)
    mig: bool = False
    instances: tuple["Gpu", ...] = ()
    """Its MIG instances, with UUIDs that begin with MIG-."""
    numbers: tuple[int, int] | None = None
    """The GPU instance and the compute instance of a MIG instance."""
    pcie: tuple[int, int] = (4, 16)
    pcie_max: tuple[int, int] = (4, 16)
    bus: int = 0
    """Its PCI bus number."""
    node: int = 0
    """Its NUMA node; between nodes the common ancestor is the system, within one the host bridge."""
    links: tuple[int | str | None, ...] = ()
    """The end of each NVLink: a bus number, "switch", or None for a link that is down."""
    peer_access: int = 0
    """Its answer for every other GPU, as `nvmlGpuP2PStatus_t`."""
    processes: dict[int, int] = field(default_factory=dict)
    claimed_processes: int = 0
    """The number of processes it claims, if that is more."""
    lost: tuple[float, float] | None = None
    """The seconds of the machine's time from and to which the GPU does not answer."""
    unsupported: frozenset[str] = frozenset()
    """C functions, and field ids as "field 82", that answer NotSupported."""
    slow_s: float = 0.0
    """Duration of each look at the temperature."""
    hangs: threading.Event | None = None
    """The event that a look at the temperature waits for."""


def gpus(count, **settings):
    """`count` alike GPUs with the UUIDs GPU-0, GPU-1, ..."""
    return [Gpu(uuid=f"GPU-{index}", **settings) for index in range(count)]


@dataclass
class Machine:
    """The GPUs, the machine's clock in seconds, and what its driver lacks."""

    gpus: list[Gpu]
    clock: Callable[[], float] = lambda: 0.0
    absent: frozenset[str] = frozenset()
    """C functions that this driver does not export."""
    init_code: int = SUCCESS
    init_hangs: threading.Event | None = None
    """The event that nvmlInit waits for."""
    forgets: bool = False
    """Every call answers Uninitialized until nvmlInit is called again."""
    calls: dict[str, int] = field(default_factory=dict)
    xids: queue.SimpleQueue[tuple[int, ...]] = field(default_factory=queue.SimpleQueue)
    """Xid errors to come, as (GPU's position, number)."""


FUNCTIONS = {}


def counted(machine, name, function, *arguments):
    machine.calls[name] = machine.calls.get(name, 0) + 1
    if machine.forgets and not name.startswith("nvmlInit"):
        return UNINITIALIZED
    return function(machine, *arguments)


def machine_call(name):
    def register(function):
        FUNCTIONS[name] = function
        return function

    return register


def gpu_call(name):
    """Registers a function of one GPU: it gets the `Gpu` and the machine's time, and answers only when it may."""

    def register(function):
        def checked(machine, handle, *arguments):
            gpu = gpu_of(machine, handle)
            seconds = machine.clock()
            if is_lost(gpu, seconds):
                return GPU_IS_LOST
            if name in gpu.unsupported or (gpu.numbers is not None and name not in OF_AN_INSTANCE):
                return NOT_SUPPORTED
            return function(gpu, seconds, *arguments)

        FUNCTIONS[name] = checked
        return function

    return register


FIRST_HANDLE, FIRST_INSTANCE, MAX_INSTANCES = 0x1000, 0x2000, 7
OF_AN_INSTANCE = (
    *("nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"),
    *("nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetComputeRunningProcesses_v3"),
)
"""The functions that the driver answers for the handle of a MIG instance."""


def gpu_of(machine, handle):
    number = ctypes.cast(handle, ctypes.c_void_p).value or 0
    if number >= FIRST_INSTANCE:
        gpu, place = divmod(number - FIRST_INSTANCE, MAX_INSTANCES)
        return machine.gpus[gpu].instances[place]
    return machine.gpus[number - FIRST_HANDLE]


def is_lost(gpu, seconds):
    return gpu.lost is not None and gpu.lost[0] <= seconds < gpu.lost[1]


def temperature_of(gpu, seconds):
    return gpu.temperature + gpu.heats_per_s * seconds


def put(reference, value):
    """Writes through a `byref` pointer."""
    reference._obj.value = value
    return SUCCESS

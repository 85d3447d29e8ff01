"""A stand-in for libnvidia-ml behind the real `pynvml`, which keeps its own packing, fallbacks and error mapping.

`StandIn(machine)` answers the C functions; `installed` puts it where `pynvml` keeps the loaded library. A function
that the machine does not have is a missing symbol, as in an old driver.
"""

import contextlib
import functools

import pynvml
import stand_in_functions
from stand_in_machine import FUNCTIONS, MIB, Gpu, Machine, counted, gpus

__all__ = ["MIB", "Gpu", "Machine", "StandIn", "gpus", "installed"]
REGISTERED = stand_in_functions
"""Importing it fills the register of functions."""


class StandIn:
    """Python functions with the signatures of nvml.h, looked up by name as ctypes would."""

    def __init__(self, machine):
        self._machine = machine

    def __getattr__(self, name):
        function = FUNCTIONS.get(name)
        if function is None or name in self._machine.absent:
            raise AttributeError(name)
        # A partial takes the `restype` that pynvml sets on some functions.
        return functools.partial(counted, self._machine, name, function)


@contextlib.contextmanager
def installed(machine):
    """Makes `pynvml` talk to `machine` instead of a driver."""
    before = pynvml.nvmlLib
    pynvml.nvmlLib = StandIn(machine)
    pynvml._nvmlGetFunctionPointer_cache.clear()
    try:
        yield machine
    finally:
        pynvml.nvmlLib = before
        pynvml._nvmlGetFunctionPointer_cache.clear()

from collections.abc import Callable
from pathlib import Path

import pytest
import shared_object
import stand_in
from stand_in import Machine

from trainfast_runner.machine.telemetry.nvml import Nvml
from trainfast_runner.records.tick import DeviceReading

SECOND_NS = 1_000_000_000

Look = Callable[[float], tuple[list[DeviceReading], dict[str, str]]]


@pytest.fixture
def watch():
    """`watch(machine)` puts the machine behind pynvml and returns a function that samples it at a second."""
    opened = []

    def start(machine: Machine) -> Look:
        clock = {"s": 0.0}
        machine.clock = lambda: clock["s"]
        context = stand_in.installed(machine)
        context.__enter__()
        nvml = Nvml()
        opened.append((nvml, context))

        def look(at_s: float) -> tuple[list[DeviceReading], dict[str, str]]:
            clock["s"] = at_s
            return nvml.sample(int(at_s * SECOND_NS))

        return look

    yield start
    for nvml, context in opened:
        nvml.close()
        context.__exit__(None, None, None)


@pytest.fixture(scope="session")
def nvml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the compiled stand-in library."""
    return shared_object.build(tmp_path_factory.mktemp("nvml"))

import pytest
import stand_in

from trainfast_runner.machine.telemetry.nvml import Nvml

SECOND_NS = 1_000_000_000


@pytest.fixture
def watch():
    """`watch(machine)` puts the machine behind pynvml and returns a function that samples it at a second."""
    opened = []

    def start(machine):
        clock = {"s": 0.0}
        machine.clock = lambda: clock["s"]
        context = stand_in.installed(machine)
        context.__enter__()
        nvml = Nvml()
        opened.append((nvml, context))

        def look(at_s):
            clock["s"] = at_s
            return nvml.sample(int(at_s * SECOND_NS))

        return look

    yield start
    for nvml, context in opened:
        nvml.close()
        context.__exit__(None, None, None)

"""The tracer sees the GPUs that the run sees, and holds none while a search measures what is free on them."""

import sys
import threading
from dataclasses import replace

import pytest

from plans import PLAN
from trainfast_runner.errors import UserError
from trainfast_runner.machine.warm_python import WARM, WarmPython, WarmPythons
from trainfast_runner.memory.tracing import trace_model
from trainfast_runner.records.home import Home
from trainfast_runner.running import launch
from trainfast_runner.search import batch_conductor as conductor
from trainfast_runner.search.batch_conductor import BatchConductor, BatchPlan, open_batch
from trainfast_runner.search.conductor import SearchCaller, conduct
from trainfast_runner.search.searches import SearchOptions
from trainfast_runner.settings.spec import resolve

SERVES_WHAT_IT_SEES = """#!{python}
import importlib, json, os, runpy, sys
runpy.run_path(sys.argv[1])
standby = importlib.import_module("trainfast_worker.standby")
def answers(requests):
    for number, _ in enumerate(requests):
        seen = [os.environ.get(name) for name in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES")]
        yield {{"request": number, "untraceable": f"{{seen}} from {{os.getppid()}}"}}
standby._import_for_answers, standby._answers = lambda requests, asker: None, answers
standby.wait(json.loads(sys.argv[3]))
"""


@pytest.fixture
def python(tmp_path, monkeypatch):
    """A training Python whose tracer says which GPUs it sees."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "bin" / "python"
    file.parent.mkdir()
    file.write_text(SERVES_WHAT_IT_SEES.format(python=sys.executable))
    file.chmod(0o755)
    return str(file)


def test_one_warm_tracer_serves_runs_on_different_gpus(python, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    servers = set()
    try:
        for device, gpus, seen in (
            ("cuda", ["GPU-b", "GPU-a"], "['PCI_BUS_ID', 'GPU-b,GPU-a']"),
            ("cuda", [], "[None, '1']"),
            ("cpu", [], "['PCI_BUS_ID', '']"),
            ("cuda", ["GPU-b"], "['PCI_BUS_ID', 'GPU-b']"),
        ):
            with pytest.raises(UserError) as raised:
                trace_model(resolve("tiny-llama", []), device, python, gpus=gpus)
            assert f"{seen} from " in raised.value.message
            servers.add(raised.value.message.rpartition(" from ")[2])
    finally:
        WARM.close()
    assert len(servers) == 1


def test_two_threads_that_ask_first_at_once_get_one_process(python, monkeypatch):
    warm, found = WarmPythons(), []
    other = threading.Thread(target=lambda: found.append(warm._answering(python, {})))

    class SlowlyMade(WarmPython):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            if not other.ident:
                other.start()
                other.join(0.5)  # without a lock the other thread gets a process of its own meanwhile

    monkeypatch.setattr("trainfast_runner.machine.warm_python.WarmPython", SlowlyMade)
    found.append(warm._answering(python, {}))
    other.join(60)
    warm.close()
    assert found == [found[0]] * 2


def test_the_tracer_has_ended_before_a_warm_process_measures_what_is_free_on_a_gpu(tmp_path, monkeypatch):
    order = []
    launched = threading.Event()

    def trace(plan, cancelled):
        launched.wait(0.5)  # whoever starts a process beside the trace does so at once
        order.append("traced")
        raise UserError("not needed here", key="model")

    def start(plan, home, on_wait):
        order.append("started")
        launched.set()
        raise UserError("enough")

    monkeypatch.setattr(conductor, "trace_size_model", trace)
    monkeypatch.setattr(launch, "start", start)
    monkeypatch.setattr(launch, "keep_standby", lambda plan, home: order.append("kept"))
    home = Home(tmp_path)
    spec = resolve("tiny-llama", ["memory_limit=1GiB"])
    plan = replace(PLAN, spec=spec, device="cuda", memory_limit_bytes=(1 << 30,))
    batch_plan, options = BatchPlan(plan), SearchOptions()
    with pytest.raises(UserError, match="enough"):
        conduct(BatchConductor, open_batch(batch_plan, home, options), batch_plan, home, options, SearchCaller())
    assert order == ["kept", "traced", "started"]

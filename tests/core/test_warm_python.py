"""One process for many answers: it stays warm, stops when told, and never outlives who started it."""

import os
import queue
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from cli.command import until
from trainfast_runner.errors import UserError
from trainfast_runner.machine import training_python
from trainfast_runner.machine.training_python import ProgramCancelled
from trainfast_runner.machine.warm_python import WARM, WarmPythons
from trainfast_runner.memory.tracing import trace_model
from trainfast_runner.settings.spec import resolve

# One process for all of them, and the first test sees it start.
pytestmark = pytest.mark.xdist_group("warm-tracer")

PATIENCE_S = 120
SMALL = ("model.hidden_size=32", "model.num_hidden_layers=1", "model.vocab_size=512", "seq_len=16")
KILLED = """
import sys
from trainfast_runner.memory.tracing import trace_model
from trainfast_runner.settings.spec import resolve
trace_model(resolve("tiny-llama", sys.argv[1:]))
"""


def small(*settings):
    return resolve("tiny-llama", [*SMALL, *settings])


def servers_of(pid):
    """The warm Pythons that this process started."""
    return [one for one in psutil.Process(pid).children() if "standby" in one.cmdline()]


@pytest.fixture(scope="module", autouse=True)
def one_environment():
    with pytest.MonkeyPatch.context() as patch:
        # A process starts anew in another environment, and these two change with each test.
        of_tests = ("PYTEST_CURRENT_TEST", "XDG_CACHE_HOME")
        inherited = training_python.own_environment()
        kept = {name: value for name, value in inherited.items() if name not in of_tests}
        patch.setattr(training_python, "own_environment", kept.copy)
        yield
    WARM.close()
    assert servers_of(os.getpid()) == []


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.long
@pytest.mark.ci
def test_the_second_trace_imports_nothing():
    heard = []
    first = trace_model(small(), on_traced=heard.append)
    assert [one.importing for one in heard][:2] == [sys.executable, ""]
    [server] = servers_of(os.getpid())
    heard.clear()
    second = trace_model(small("precision=bf16"), on_traced=heard.append)
    assert {one.importing for one in heard} == {""}
    assert [one.pid for one in servers_of(os.getpid())] == [server.pid]
    assert (first.parameters, first.attention) == (second.parameters, "sdpa, because llama has sdpa")


def test_a_model_that_cannot_be_built_leaves_the_process_warm_and_a_failing_fork_is_an_error():
    trace_model(small())
    with pytest.raises(UserError, match="no_such_field"):
        trace_model(small("model.no_such_field=1"))
    assert WARM.is_warm(sys.executable)
    with pytest.raises(UserError, match=r"cannot describe the model: TypeError: .*no_such"):
        WARM.ask(sys.executable, {"part": "inspect", "count": False, "attention": False, "no_such": 1})


def test_a_trace_that_is_given_up_ends_and_the_process_stays():
    trace_model(small())
    [server] = servers_of(os.getpid())
    cancelled = threading.Event()

    def give_up():
        until(lambda: bool(server.children()), "the process")
        cancelled.set()

    thread = threading.Thread(target=give_up)
    thread.start()
    with pytest.raises(ProgramCancelled):
        trace_model(resolve("gpt2-xl"), cancelled=cancelled)
    thread.join()
    assert server.children(recursive=True) == []
    assert WARM.is_warm(sys.executable)
    assert trace_model(small("checkpointing=full")).parameters > 0


@pytest.mark.ci
@pytest.mark.long
def test_a_process_that_died_is_replaced():
    trace_model(small())
    [server] = servers_of(os.getpid())
    server.send_signal(signal.SIGKILL)
    until(lambda: not WARM.is_warm(sys.executable), "the process")
    trace_model(small("optimizer=sgd"))
    assert WARM.is_warm(sys.executable)


def test_a_request_larger_than_the_sockets_buffer_can_be_given_up_while_the_process_reads_nothing():
    warm, cancelled, caught = WarmPythons(), threading.Event(), queue.SimpleQueue[ProgramCancelled]()
    request = {"padding": "x" * (1 << 20)}

    def ask():
        with pytest.raises(ProgramCancelled) as raised:
            next(warm.ask_each(sys.executable, [request], cancelled, os.environ))
        caught.put(raised.value)

    before = servers_of(os.getpid())
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    [server] = until(lambda: [one for one in servers_of(os.getpid()) if one not in before], "the process")
    server.suspend()
    cancelled.set()
    try:
        assert caught.get(timeout=PATIENCE_S)
        until(lambda: server.status() == psutil.STATUS_ZOMBIE, "the process to be ended")
    finally:
        warm.close()
        thread.join(PATIENCE_S)


@pytest.mark.parametrize("traces", [False, pytest.param(True, marks=[pytest.mark.ci, pytest.mark.long])])
def test_nothing_outlives_an_app_that_is_killed(traces):
    app = subprocess.Popen([sys.executable, "-c", KILLED, "model.num_hidden_layers=64"])
    try:
        [server] = until(lambda: servers_of(app.pid), "the process")
        if traces:
            until(lambda: len(server.children(recursive=True)) > 1, "the process")
        family = [server, *server.children(recursive=True)]
    finally:
        app.send_signal(signal.SIGKILL)
        app.wait()

    def alive():
        return [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]

    assert until(lambda: not alive(), "the process to end with its app")

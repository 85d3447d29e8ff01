"""The next run's memory, predicted beside the event loop, and the work that gives way to what is measured."""

import queue
import threading
import time
from dataclasses import replace

import pytest
from recorded import GIB, MIB, a_gpu, a_run, a_tick, now, own_supervisor, with_start, write_lines
from still import CPU, MIDDLE, a_live_run, a_snapshot, running
from traced import Tracer

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import Machine
from trainfast_runner.memory.headroom import UNCORRECTED_MARGIN_BYTES, AvailableMemory
from trainfast_runner.records.tick import DeviceReading
from trainfast_runner.search import advice
from trainfast_runner.search.advice import Situation
from trainfast_runner.settings.spec import resolve
from trainfast_tui.control import background_work
from trainfast_tui.control.background_work import NO_TRACE_NOW, BackgroundWork, Predictor, request_for
from trainfast_tui.control.messages import NextRunPredicted, SituationGathered
from trainfast_tui.live.snapshot import SearchKind
from trainfast_tui.next_run.sources import NextRunMemory, next_run_from_preset


@pytest.fixture
def tracer(monkeypatch):
    """Knows models by their sequence length."""
    return Tracer(lambda spec: spec.knobs["seq_len"], 128).stand_in(monkeypatch)


def wait_for(condition):
    """Until it holds; a deadline says what never came."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Answers:
    """Messages that a predictor posts, in order."""

    def __init__(self, home):
        self._posted: queue.Queue[object] = queue.Queue()
        self.predictor = Predictor(self._posted.put, None, home)

    def ask(self, *settings, free_bytes=4 * GIB, may_trace=True):
        self.predictor.request(
            background_work.PredictionRequest(resolve("tiny-llama", settings), CPU, free_bytes, may_trace)
        )

    def next(self):
        message = self._posted.get(timeout=60)
        assert isinstance(message, NextRunPredicted), message
        return message.memory


def test_a_model_that_was_traced_before_is_answered_without_a_trace(home, tracer):
    answers = Answers(home)
    answers.ask("seq_len=128", "batch_size=12", "memory_limit=1GiB")
    found = answers.next().fit
    assert (found.predicted.total_bytes, found.predicted.activations_bytes) == (220 * MIB, 120 * MIB)
    assert found.available == AvailableMemory(GIB, "memory_limit", from_memory_limit=True)
    assert found.margin_bytes == UNCORRECTED_MARGIN_BYTES
    assert found.left_bytes == (1024 - 220) * MIB - UNCORRECTED_MARGIN_BYTES
    assert found.max_batch == 89, "100 MiB, 10 a sample, and the margin of 32"
    assert tracer.traced == []


def test_an_unknown_model_is_traced_and_then_answered(home, tracer):
    answers = Answers(home)
    answers.ask("seq_len=64")
    view = answers.next()
    assert view.reason == "tracing the model…"
    assert view.since_ns is not None
    tracer.go.set()
    assert answers.next().fit is not None
    assert tracer.traced == [64]


def test_the_newest_question_is_answered_by_the_trace_of_an_older_one(home, tracer):
    answers = Answers(home)
    answers.ask("seq_len=64")
    assert answers.next().since_ns is not None
    answers.ask("seq_len=64", "batch_size=2")
    tracer.go.set()
    assert answers.next().spec.knobs["batch_size"] == 2
    assert tracer.traced == [64], "it is the same trace"


def test_a_known_model_is_answered_while_another_is_traced(home, tracer):
    answers = Answers(home)
    answers.ask("seq_len=64")
    answers.next()
    answers.ask("seq_len=128", "batch_size=2")
    assert answers.next().spec.knobs["batch_size"] == 2


def test_a_trace_nobody_waits_for_is_given_up_for_the_one_that_is_wanted(home, tracer):
    answers = Answers(home)
    answers.ask("seq_len=64")
    answers.next()
    wait_for(lambda: tracer.traced == [64])
    answers.ask("seq_len=32")
    assert answers.next().since_ns is not None
    wait_for(lambda: tracer.traced == [64, 32])
    assert tracer.cancelled == [64]
    tracer.go.set()
    assert answers.next().fit is not None


def test_a_run_that_starts_ends_the_trace(home, tracer):
    answers = Answers(home)
    answers.ask("seq_len=64")
    answers.next()
    wait_for(lambda: tracer.traced == [64])
    answers.ask("seq_len=64", may_trace=False)
    assert answers.next() == NextRunMemory(reason=NO_TRACE_NOW)
    wait_for(lambda: tracer.cancelled == [64])
    answers.ask("seq_len=64")
    assert answers.next().since_ns is not None, "after the run it is traced"
    wait_for(lambda: tracer.traced == [64, 64])


def test_a_model_the_tracer_cannot_follow_says_why_and_is_not_tried_again(home, tracer):
    tracer.refusal = UserError("the tracer does not follow its kernels")
    tracer.go.set()
    answers = Answers(home)
    answers.ask("seq_len=64")
    while (view := answers.next()).since_ns is not None:
        pass
    assert view == NextRunMemory(reason="no prediction: the tracer does not follow its kernels", failed=True)
    answers.ask("seq_len=64", "memory_limit=none")
    assert answers.next().failed
    assert tracer.traced == [64]


def test_batch_1_that_does_not_fit_is_batch_zero_and_no_limit_is_none(home, tracer):
    answers = Answers(home)
    answers.ask("seq_len=128", "memory_limit=64MiB")
    found = answers.next().fit
    assert found.max_batch == 0
    answers.ask("seq_len=128", free_bytes=None)
    found = answers.next().fit
    assert (found.available, found.max_batch) == (None, None)


def test_what_a_live_run_holds_is_free_again_for_the_next_one(home, hold):
    gpus = (a_gpu(0), a_gpu(1))
    machine = Machine(device="cuda", gpus=gpus, nvml_gpus=gpus, cores=2)
    ended = a_snapshot(a_run(home, gpus=2), ticks=(a_tick(30, gpus=2, live=False),))
    idle = request_for(next_run_from_preset("tiny-llama"), machine, ended, may_trace=True)
    assert [gpu.memory_free_bytes for gpu in idle.machine.gpus] == [78 * GIB, 77 * GIB]
    directory = a_run(home, "20261121-060000-tiny-llama-0001", gpus=2, with_result=False)
    hold(with_start(directory, used_before_bytes={gpus[0].uuid or "": GIB}))
    live = request_for(next_run_from_preset("tiny-llama"), machine, a_snapshot(directory, second=23), may_trace=False)
    assert [gpu.memory_free_bytes for gpu in live.machine.gpus] == [(78 + 60) * GIB, 77 * GIB]
    tick = a_tick(30, live=True)
    assert tick.host.run is not None
    assert live.free_bytes is not None
    assert live.free_bytes > (tick.host.memory_available_bytes or 0), "the run's own memory counts as free"


async def test_every_turn_of_a_knob_asks_once_and_a_live_run_forbids_the_trace(home, hold):
    ended = a_snapshot(a_run(home))
    async with running(home, ended, size=MIDDLE) as (app, pilot):
        requests = app.session.requests
        asked = len(requests)
        assert requests[-1].free_bytes is not None, "a limit becomes known"
        await pilot.show(ended)
        assert len(requests) == asked, "a snapshot without news asks nothing"
        await pilot.press("right")
        assert (len(requests), requests[-1].spec.knobs["batch_size"], requests[-1].may_trace) == (asked + 1, 16, True)
        assert requests[-1].free_bytes is not None
        live = a_live_run(home, hold, run_id="20261121-060000-tiny-llama-0001")
        await pilot.show(a_snapshot(live, second=23))
        assert not requests[-1].may_trace


@pytest.mark.parametrize("device", ["cpu", "cuda"])
async def test_a_run_that_starts_keeps_its_own_trace_until_it_trains(home, hold, device):
    """But not on a GPU, where a trace is a process with memory of its own."""
    gpus = (DeviceReading(index=0, uuid="GPU-0", memory_free_bytes=78 * GIB),) if device == "cuda" else ()
    live = a_live_run(home, hold)
    async with running(home, machine=replace(CPU, device=device, gpus=gpus)) as (app, pilot):
        for state, may_trace in (("starting", device == "cpu"), ("running", False)):
            write_lines(live / "events.jsonl", [own_supervisor(), now(state)])
            await pilot.show(a_snapshot(live, second=23))
            assert app.session.requests[-1].may_trace == may_trace, state


def test_no_facts_are_gathered_while_a_search_measures(home, monkeypatch):
    go = threading.Event()

    def gather(*_):
        go.wait(60)
        return Situation()

    monkeypatch.setattr(advice, "gather", gather)
    Tracer(lambda spec: "any", "any").stand_in(monkeypatch)
    monkeypatch.setattr(BackgroundWork, "_keep_standby", lambda *_, **__: None)
    posted = queue.Queue()
    work = BackgroundWork(home, posted.put, None)
    next_run = next_run_from_preset("tiny-llama")
    snapshot = a_snapshot(a_run(home))
    work.update(next_run, CPU, snapshot, SearchKind.BATCH, is_device_used=True, has_other_live_run=False)
    assert "trainfast-advice" not in [thread.name for thread in threading.enumerate()]
    go.set()
    work.update(next_run, CPU, snapshot, None, is_device_used=False, has_other_live_run=False)
    while not isinstance(posted.get(timeout=60), SituationGathered):
        pass

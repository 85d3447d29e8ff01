"""After a run out of memory: the screen says why, and which changes fit as soon as each has been traced."""

import json
import queue
import sys
import tempfile
import threading
from dataclasses import replace

import pytest
from recorded import GIB, MIB, a_run, an_oom_run, with_end
from still import a_snapshot, has, running
from tests.plans import PLAN
from traced import Tracer

from trainfast_runner.memory import tracing
from trainfast_runner.records.result import OomChange, OomExplanation
from trainfast_runner.records.run_directory import read_result
from trainfast_tui.cli import launching
from trainfast_tui.cli.launching import predict_memory, with_traced_changes
from trainfast_tui.control.messages import OomExplained
from trainfast_tui.control.run_control import OomExplainer
from trainfast_tui.panels.ending_panel import with_same_keys

WHY = OomExplanation(
    phase="backward",
    rank=0,
    grown="activations",
    grown_bytes=900 * MIB,
    needed_bytes=1200 * MIB,
    limit_bytes=GIB,
    missing_bytes=176 * MIB,
    others=["process 4711 held 2.00 GiB"],
    changes=[
        OomChange(
            settings={"batch_size": "64", "grad_accum": "64"},
            saves="needs 840 MiB of 1,024 MiB",
            costs="little; the global batch stays",
            predicted_bytes=840 * MIB,
        ),
        OomChange(settings={"checkpointing": "full"}, saves="activations to one layer", costs="20-30 % slower"),
    ],
)


@pytest.mark.parametrize("size", [(160, 48), (80, 24)])
async def test_the_ending_says_what_had_grown_what_was_missing_and_who_else_was_there(home, size):
    async with running(home, a_snapshot(with_end(an_oom_run(home), oom=WHY)), size=size) as (app, pilot):
        text = app.text
        words = " ".join(" ".join(line.split("│")[0] for line in text.splitlines()).split())
        has(words, "Memory ran out while the activations were growing (predicted to peak at 900 MiB).")
        has(words, "The predicted peak, without any margin, is 1.17 GiB of 1.00 GiB: 176 MiB too much.")
        has(words, "Others on the device: process 4711 held 2.00 GiB.", "1 batch_size = 64, grad_accum = 64")
        has(words, "2 checkpointing = full")
        before = app.session.next_run.spec.knobs
        await pilot.press("1")
        assert (app.knobs["batch_size"], app.knobs["grad_accum"]) == (64, 64), "the key sets every knob of the change"
        await pilot.press("2")
        assert app.knobs == {**before, "batch_size": 64, "grad_accum": 64, "checkpointing": "full"}


async def test_what_is_traced_meanwhile_goes_before_the_result_and_says_how_much_is_left(home):
    directory = an_oom_run(home)
    async with running(home, a_snapshot(directory), size=(160, 48)) as (app, pilot):
        assert "Tracing" not in app.text
        text = await pilot.post(OomExplained(directory.name, WHY, 2))
        has(text, "Tracing which changes would fit, 2 to go…", "needs 840 MiB of 1,024 MiB")
        assert "Tracing" not in await pilot.show(a_snapshot(a_run(home))), "it is about the other run"


@pytest.fixture
def tracer(monkeypatch):
    """Knows models by all but their batch."""
    batch = ("batch_size", "grad_accum")
    return Tracer(lambda spec: {k: v for k, v in spec.knobs.items() if k not in batch}).stand_in(monkeypatch)


def test_each_trace_makes_the_explanation_better(home, tracer):
    posted = queue.Queue()
    explainer = OomExplainer(posted.put, None)
    run = a_snapshot(an_oom_run(home)).run
    explainer.explain_if_oom(run, may_trace=True)
    first = posted.get(timeout=60)
    assert isinstance(first, OomExplained)
    assert first.explanation.needed_bytes is None
    assert first.traces_left > 1
    explainer.explain_if_oom(run, may_trace=True)
    tracer.go.set()
    last = first
    while last.traces_left:
        found = posted.get(timeout=60)
        assert isinstance(found, OomExplained)
        assert found.traces_left < last.traces_left
        last = found
    assert last.explanation.needed_bytes == (100 + 10 * 4096) * MIB
    change = last.explanation.changes[0]
    assert (change.settings, change.predicted_bytes) == ({"batch_size": "64", "grad_accum": "64"}, 740 * MIB)
    assert posted.empty(), "looking again at the same run starts nothing"


@pytest.mark.parametrize("as_json", [False, True])
def test_f15_the_command_prints_the_verdict_before_it_traces_and_the_advice_has_a_deadline(
    home, tracer, monkeypatch, capsys, as_json
):
    directory, before_trace = an_oom_run(home), []

    def trace(*arguments, **options):
        before_trace.append("".join(capsys.readouterr()))
        yield from tracer.trace_all(*arguments, **options)

    monkeypatch.setattr(tracing, "trace_models", trace)
    monkeypatch.setattr(launching, "TRACES_WITHIN_S", 0.2)
    result = read_result(directory)
    assert result is not None
    assert launching.print_out_of_memory(directory, result, None, as_json) == 3
    assert "out of memory: " in before_trace[0]
    advice = capsys.readouterr().out
    assert len(tracer.cancelled) == 1, "the trace ended with the wait for it"
    if as_json:
        assert [change["settings"] for change in json.loads(advice)["oom"]["changes"]]
    else:
        assert before_trace[0].splitlines()[1].startswith("steps ")
        assert "out of memory: " not in advice
        assert "the cheapest knobs that free memory, by estimate:" in advice


def test_a_run_that_starts_ends_the_tracing(home, tracer):
    posted = queue.Queue()
    explainer = OomExplainer(posted.put, None)
    run = a_snapshot(an_oom_run(home)).run
    explainer.explain_if_oom(run, may_trace=True)
    posted.get(timeout=60)
    explainer.explain_if_oom(run, may_trace=False)
    last = posted.get(timeout=60)
    assert isinstance(last, OomExplained)
    assert last.traces_left == 0
    assert len(tracer.cancelled) == 1


def test_change_on_the_screen_keeps_its_key_while_more_are_traced():
    def change(**settings):
        return OomChange(settings=settings, saves="", costs="")

    shown = [change(batch_size="4"), change(checkpointing="full"), change(precision="bf16")]
    traced = [change(checkpointing="full"), change(batch_size="6"), change(precision="bf16")]
    assert with_same_keys(traced, shown) == (traced[0], traced[2], traced[1])
    assert with_same_keys(traced, []) == tuple(traced), "the cheapest is first when nothing was shown"


def test_without_a_folder_for_the_tracers_file_estimates_are_kept_and_a_run_starts_without_a_prediction(
    home, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # without a cached trace
    directory = an_oom_run(home)
    result = read_result(directory)
    assert result is not None
    assert with_traced_changes(directory, result, None).oom.changes
    predict_memory(replace(PLAN, python=sys.executable), home, threading.Event())
    missing = "memory is not predicted: a temporary file cannot be made: No such file or directory; try freeing some"
    assert missing in capsys.readouterr().err

"""The batch that is predicted for a search, what is missing where none fits, and memory that others take meanwhile."""

import sys
import tempfile
import threading
from dataclasses import replace

import msgspec
import pytest
from layered_model import model_of, spec_with

import plans
from trainfast_runner.memory import corrections
from trainfast_runner.records.result import OomExplanation
from trainfast_runner.records.tick import DeviceProcess, DeviceReading, HostReading, Tick
from trainfast_runner.search.batch.answer import missing_bytes
from trainfast_runner.search.batch.conductor import others_growth_text
from trainfast_runner.search.batch.decide import SizePrediction, predict_size
from trainfast_runner.search.batch_journal import Probe

MIB = 1 << 20
PLAN = replace(plans.PLAN, spec=spec_with(), memory_limit_bytes=(200 * MIB,))
MODEL = msgspec.structs.replace(model_of(12), trace="t")


def after_a_run_that_took_less(batch_size):
    """A tenth less than was traced."""
    spec = spec_with(batch_size=batch_size)
    traced = MODEL.predict(spec).traced_bytes["forward_backward"]
    known = corrections.Correction(
        run_id="r1", beyond_bytes={"forward_backward": -traced // 10, "optimizer": 0}, step_bytes=traced
    )
    case = corrections.correction_key("t", spec.knobs, 1)
    return msgspec.structs.replace(MODEL, corrections=corrections.DeviceCorrections(by_case={case: known}))


def test_what_a_run_taught_does_not_look_like_a_bend_of_the_model():
    most = SizePrediction(MODEL).against(PLAN, 200 * MIB).max_batch
    assert most > 1000
    corrected = SizePrediction(after_a_run_that_took_less(most)).against(PLAN, 200 * MIB)
    untaught = SizePrediction(MODEL).against(PLAN, 200 * MIB)
    assert corrected.linear_from == untaught.linear_from < most // 8, "small sizes tell the slope as they did"
    assert corrected.max_batch > most


def test_the_growth_is_that_of_the_sizes_below_the_maximum():
    most = SizePrediction(MODEL).against(PLAN, 200 * MIB).max_batch
    taught = after_a_run_that_took_less(most)
    limit = taught.predict(spec_with(batch_size=most)).total_bytes
    found = SizePrediction(taught).against(PLAN, limit)
    below = [taught.predict(spec_with(batch_size=size)).total_bytes for size in (most // 2, most)]
    assert found.max_batch == most
    assert abs(found.bytes_per_sample - (below[1] - below[0]) / (most - most // 2)) < 0.02 * found.bytes_per_sample


def test_a_search_goes_on_where_the_tracer_can_make_no_temporary_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    prediction = predict_size(replace(PLAN, python=sys.executable), threading.Event())
    assert prediction.model is None
    assert prediction.reason == "a temporary file cannot be made: No such file or directory"


@pytest.mark.parametrize(
    ("expected", "peak", "missing"),
    [
        (OomExplanation(missing_bytes=70 * MIB, asked_bytes=MIB, limit_bytes=100 * MIB), 90 * MIB, 70 * MIB),
        (OomExplanation(asked_bytes=MIB, limit_bytes=100 * MIB), 130 * MIB, 30 * MIB),
        (OomExplanation(asked_bytes=MIB, limit_bytes=100 * MIB), 90 * MIB, MIB),
        (OomExplanation(asked_bytes=MIB), None, MIB),
        (OomExplanation(), 90 * MIB, None),
    ],
    ids=["predicted", "reached beyond the limit", "asked for", "nothing but what was asked for", "nothing"],
)
def test_what_is_missing(expected, peak, missing):
    failed = Probe(batch_size=1, outcome="oom", run_id="r", seconds=1.0, peak_allocated_bytes=peak)
    assert missing_bytes(expected, failed) == missing


SECOND = 1_000_000_000


def tick(t_s, *processes):
    listed = [DeviceProcess(pid=pid, memory_used_bytes=used * MIB) for pid, used in processes]
    device = DeviceReading(index=0, uuid="GPU-0", processes=listed)
    return Tick(t_ns=t_s * SECOND, host=HostReading(), devices=[device], missing={}, sample_us=1)


def test_a_process_of_others_that_grows_during_a_probe_voids_it():
    ours = tick(1, (10, 500), (99, 200))
    text = others_growth_text([ours, tick(3, (10, 900), (99, 700))], {10}, {"GPU-0"}, 2 * SECOND)
    assert text == "process 99 took 500 MiB of GPU 0 meanwhile"
    assert others_growth_text([ours, tick(3, (10, 9000), (99, 210))], {10}, {"GPU-0"}, 2 * SECOND) is None
    # It grew before the probe began.
    assert (
        others_growth_text([tick(1, (10, 1), (99, 700)), tick(3, (10, 1), (99, 700))], {10}, {"GPU-0"}, 2 * SECOND)
        is None
    )
    # In a container the driver's ids are not ours: nobody can be told apart.
    assert others_growth_text([tick(1, (7, 1)), tick(3, (7, 900))], {10}, {"GPU-0"}, 2 * SECOND) is None
    assert others_growth_text([ours, tick(3, (10, 1), (99, 700))], {10}, {"GPU-1"}, 2 * SECOND) is None


def test_a_process_that_comes_during_a_probe_voids_it():
    text = others_growth_text([tick(1, (10, 500)), tick(3, (10, 500), (42, 300))], {10}, {"GPU-0"}, 2 * SECOND)
    assert text == "process 42 took 300 MiB of GPU 0 meanwhile"

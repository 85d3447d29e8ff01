"""The batch that is predicted for a search."""

import sys
import tempfile
import threading
from dataclasses import replace

import msgspec
import pytest
from layered_model import model_of, spec_with

import plans
from trainfast_runner.errors import UserError
from trainfast_runner.memory import corrections
from trainfast_runner.search.batch_conductor import predicted_size, trace_size_model

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


def test_the_growth_is_that_of_the_sizes_below_the_maximum():
    most = predicted_size(MODEL, PLAN, 200 * MIB).max_batch
    taught = after_a_run_that_took_less(most)
    limit = taught.predict(spec_with(batch_size=most)).total_bytes
    found = predicted_size(taught, PLAN, limit)
    below = [taught.predict(spec_with(batch_size=size)).total_bytes for size in (most // 2, most)]
    assert found.max_batch == most
    assert abs(found.bytes_per_sample - (below[1] - below[0]) / (most - most // 2)) < 0.02 * found.bytes_per_sample


def test_a_tracer_that_can_make_no_temporary_file_is_an_error_of_the_prediction_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(UserError, match="a temporary file cannot be made: No such file or directory"):
        trace_size_model(replace(PLAN, python=sys.executable), threading.Event())

"""Bounds on the speed of candidates by their FLOPs."""

from __future__ import annotations

from trainfast_runner.machine.calibration import Ceiling
from trainfast_runner.search.best.planning.plan_preset import plan_preset_best
from trainfast_runner.search.best.planning.request import BestRequest
from trainfast_runner.search.best.survey.flops_bounds import with_bounds
from trainfast_runner.search.options import SearchOptions
from trainfast_runner.settings.spec import resolve

CEILING = Ceiling(device="cpu", name="", tflops={"fp32": 1.0}, copy_gb_per_s=10.0, operation_us=10.0)


def test_the_flops_of_one_sample_length_bound_no_candidate_of_another() -> None:
    """A continued search may begin with a candidate whose seq_len is not the preset's."""
    asked = BestRequest(vary={"seq_len": [32, 64]}, objective="tokens_per_s")
    best_plan = plan_preset_best(resolve("tiny-llama", ["devices=cpu", "seq_len=32"]), asked, SearchOptions())
    bounded = with_bounds(best_plan.space, best_plan.survey, 1e9, 64, CEILING)
    assert {one.knobs["seq_len"]: one.least_s_per_sample is not None for one in bounded.candidates} == {
        32: False,
        64: True,
    }

"""The difference of a run's first losses from those of a run with plain levers."""

import msgspec
import pytest

from on_disk import put, run_file
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import read_records
from trainfast_runner.results.comparison import loss_difference, loss_difference_of
from trainfast_runner.results.doubts import doubts
from trainfast_runner.settings.knobs import defaults

PLAIN = defaults()
OLD, NEW = "20261101-100000-tiny-llama-aaaa", "20261102-100000-tiny-llama-bbbb"


def tolerance_of(knobs, plain, redraws=False):
    found = loss_difference(knobs, plain, [(1.0, 1.0)], redraws=redraws)
    return None if found is None else found.tolerance


TOLERANCES = [
    ({}, None), ({"loss": "chunked"}, 1e-5), ({"loss": "chunked", "checkpointing": "every-2"}, 1e-5),
    ({"loss": "chunked", "attention": "eager"}, 1e-3), ({"loss": "chunked", "steps": 7, "workers": 3}, 1e-5),
    ({"loss": "chunked", "lr": 0.5}, None), ({"loss": "chunked", "method": "lora"}, None),
    ({"allocator": "expandable"}, None),
]  # fmt: skip


@pytest.mark.parametrize(("knobs", "tolerance"), TOLERANCES)
def test_the_tolerance_is_the_largest_of_the_levers_where_nothing_else_differs(knobs, tolerance):
    assert tolerance_of({**PLAIN, **knobs}, PLAIN) == tolerance


def test_half_precision_has_its_own_tolerance_and_the_greatest_difference_is_of_five_steps():
    half = {**PLAIN, "precision": "bf16"}
    assert tolerance_of({**half, "loss": "chunked"}, half) == 1e-2
    assert tolerance_of({**PLAIN, "attention": "eager"}, PLAIN, redraws=True) is None
    assert tolerance_of({**PLAIN, "loss": "chunked"}, PLAIN, redraws=True) == 1e-5

    def greatest(*pairs):
        found = loss_difference({**PLAIN, "loss": "chunked"}, PLAIN, pairs, redraws=False)
        return None if found is None else (found.greatest, found.steps)

    assert greatest((2.0, 2.0), (4.04, 4.0), (None, 5.0)) == (pytest.approx(0.01), 2)
    assert greatest(*[(1.0, 1.0)] * 5, (9.0, 1.0)) == (0.0, 5)
    assert greatest() is None


def ran(home, run_id, losses, state="finished", lr=0.1, dropout=False, **knobs):
    """Write a run with these losses; return its directory."""
    directory = put(home / "runs" / run_id / "run.json", run_file(run_id, knobs={**PLAIN, **knobs}))
    steps = [
        {"t_ns": n, "step": n, "samples": 8, "lr": lr, "loss": loss, "step_ms": 1.0} for n, loss in enumerate(losses, 1)
    ]
    put(directory / "steps.jsonl", *steps)
    put(directory / "worker.jsonl", {"t_ns": 1, "kind": "actual", "dropout": dropout})
    put(directory / "result.json", Result(run_id=run_id, state=state))
    return directory


def difference(directory):
    return loss_difference_of(directory, read_records(directory))


def test_a_run_is_compared_with_the_newest_plain_one(tmp_path):
    ran(tmp_path, OLD, [8.0, 7.0])
    found = difference(ran(tmp_path, NEW, [8.0, 7.07, 6.0], loss="chunked"))
    assert (found.against, found.steps, found.tolerance, found.greatest) == (OLD, 2, 1e-5, pytest.approx(0.01))
    result = Result(run_id=NEW, state="finished", loss_difference=found)
    [doubt] = doubts(result)
    assert doubt.kind == "other_loss"
    assert OLD in doubt.text
    assert "0.01" in doubt.text
    alike = msgspec.structs.replace(found, greatest=1e-6)
    assert doubts(msgspec.structs.replace(result, loss_difference=alike)) == []


@pytest.mark.parametrize(
    "earlier", [{"state": "stopped"}, {"lr": 0.2}, {"seed": 5}, {"loss": "chunked"}, {"checkpointing": "full"}]
)
def test_nothing_compares_with_a_run_that_is_not_the_plain_one(tmp_path, earlier):
    ran(tmp_path, OLD, [8.0, 7.0], **earlier)
    assert difference(ran(tmp_path, NEW, [8.0, 7.0], loss="chunked")) is None


def test_a_plain_run_has_no_difference_and_one_that_draws_other_dropout_none_either(tmp_path):
    ran(tmp_path, OLD, [8.0, 7.0])
    assert difference(ran(tmp_path, NEW, [8.0, 7.0])) is None
    assert difference(ran(tmp_path, NEW, [8.0, 7.0], compile="default", dropout=True)) is None
    assert difference(ran(tmp_path, NEW, [8.0, 7.0], compile="default")).greatest == 0

"""A pipeline that cannot run is refused before launch, with the nearest that can."""

import pytest

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import Machine
from trainfast_runner.settings import device_counts
from trainfast_runner.settings.compatibility.check import check
from trainfast_runner.settings.compatibility.facts import Facts
from trainfast_runner.settings.spec import resolve
from trainfast_runner.worker.shared.parallel_plans import PIPELINE_OBJECTIVES
from trainfast_runner.worker.strategies import pipeline_stages

CPU = Machine(device="cpu", gpus=(), nvml_gpus=(), cores=2, no_gpu_reason="no driver")
LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "rope_parameters": {}, "vocab_size": 4096}


def facts(*settings: str, preset: str = "tiny-llama", **config: object) -> Facts:
    return Facts(resolve(preset, settings), CPU, {**LLAMA, **config}, {}, "/env/bin/python")


@pytest.mark.parametrize(
    ("settings", "key", "expected"),
    [
        (["strategy=pp", "devices=4"], "devices", "pp_degree=2 runs on 2 devices, not on devices=4; try devices=2"),
        (["strategy=ddp+pp", "devices=3"], "devices", "a multiple of 2 devices, at least 4"),
        (["strategy=ddp+pp", "devices=2"], "devices", "strategy=pp with devices=2"),
        (["strategy=pp", "pp_degree=8"], "pp_degree", "more than the model's 4 layers"),
        (["strategy=pp", "pp_degree=4", "pp_schedule=interleaved"], "pp_schedule", "makes 8 stages"),
        (["strategy=pp", "batch_size=6"], "micro_batches", "batch_size=6 cannot be cut into micro_batches=4"),
        (
            ["strategy=pp", "pp_schedule=1f1b", "micro_batches=1"],
            "micro_batches",
            "needs at least pp_degree=2 micro-batches",
        ),
        (
            ["strategy=pp", "pp_schedule=interleaved", "batch_size=5", "micro_batches=5"],
            "micro_batches",
            "micro_batches=5 does not split; try micro_batches=1, or pp_schedule=gpipe",
        ),
        (["strategy=pp", "compile=default"], "compile", "compile=default does not work with strategy=pp"),
        (["strategy=pp", "engine=trainer"], "engine", "not strategy=pp"),
        (["pp_schedule=1f1b"], "pp_schedule", "does nothing with strategy=single"),
        (["strategy=pp", "tp_degree=2"], "tp_degree", "does nothing with strategy=pp"),
    ],
)
def test_what_cannot_run_is_refused(settings: list[str], key: str, expected: str) -> None:
    with pytest.raises(UserError) as refused:
        check(facts(*settings))
    assert refused.value.key == key
    assert expected in refused.value.line()


def test_a_family_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(UserError, match="the model is t5"):
        check(facts("strategy=pp", model_type="t5"))
    with pytest.raises(UserError, match=r"not for data\.objective=causal-lm"):
        check(facts("strategy=pp", model_type="bert"))


def test_what_runs_is_let_through_on_as_many_processes_as_it_needs() -> None:
    for settings, processes, batch in (
        (["strategy=pp"], 2, 8),
        (["strategy=pp", "pp_degree=4", "devices=4", "grad_accum=2"], 4, 16),
        (["strategy=pp", "micro_batches=1"], 2, 8),
        (["strategy=pp", "pp_schedule=interleaved"], 2, 8),
        (["strategy=ddp+pp", "pp_schedule=1f1b", "precision=fp16"], 4, 16),
    ):
        asked = facts(*settings)
        check(asked)
        assert asked.rank_count == processes
        assert device_counts.global_batch(asked.knobs, asked.rank_count) == batch


def test_launcher_and_worker_cut_the_same_families() -> None:
    assert set(PIPELINE_OBJECTIVES) == set(pipeline_stages.LAYOUTS)

"""The GPUs of a best-fit search: chosen once, whichever has the most free memory later."""

import pytest
import stand_in
from stand_in import Gpu, Machine

from trainfast_runner.errors import UserError
from trainfast_runner.running.planning import plan_run
from trainfast_runner.search.best.question import best_key, plan_preset_best
from trainfast_runner.search.best_journal import BestRequest
from trainfast_runner.search.searches import candidate_spec
from trainfast_runner.settings.spec import resolve

ASKED = BestRequest(vary={"strategy": ["single", "ddp"]})


def four(*used_gib):
    return Machine([Gpu(uuid=f"GPU-{index}", bus=index + 1, memory_used=used_gib[index] << 30) for index in range(4)])


def planned(python, machine, *settings):
    with stand_in.installed(machine):
        return plan_preset_best(resolve("tiny-llama", ["devices=2", *settings]), ASKED, python)


def test_a_search_keeps_the_gpus_that_were_the_freest_when_it_began(python):
    best = planned(python, four(9, 1, 8, 2))
    assert best.question.device_uuids == ["GPU-1", "GPU-3"]
    assert best.plan.device_uuids == ["GPU-1"], "the baseline is single"
    with stand_in.installed(four(1, 9, 1, 9)):
        for strategy, uuids in (("ddp", ["GPU-1", "GPU-3"]), ("single", ["GPU-1"])):
            spec = candidate_spec(best.survey.spec, {"strategy": strategy})
            found = plan_run(spec, python, best.question.device_uuids[: len(uuids)])
            assert found.device_uuids == uuids


def test_the_same_command_continues_a_search_though_other_gpus_are_free_by_now(python):
    assert best_key(planned(python, four(9, 1, 8, 2))) == best_key(planned(python, four(1, 9, 1, 9)))


def test_a_gpu_of_the_search_that_is_gone_is_named(python):
    best = planned(python, four(9, 1, 8, 2))
    with stand_in.installed(Machine([Gpu(uuid="GPU-0"), Gpu(uuid="GPU-1")])), pytest.raises(UserError) as refused:
        plan_run(candidate_spec(best.survey.spec, {"strategy": "ddp"}), python, best.question.device_uuids)
    assert "GPU GPU-3 is not available any more" in refused.value.line()


def test_gpus_that_the_person_named_stay_the_persons(python):
    assert planned(python, four(9, 1, 8, 2), "devices=0+2").question.device_uuids == ["GPU-0", "GPU-2"]

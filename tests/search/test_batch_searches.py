"""Searches before their first trial: what they look for, the GPUs they keep, a first process that ends."""

from types import SimpleNamespace
from typing import cast

import pytest
import stand_in
from stand_in import Gpu, Machine

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Result
from trainfast_runner.search import batch_conductor
from trainfast_runner.search import batch_conductor as conductor
from trainfast_runner.search.batch_conductor import BatchConductor, on_gpus, open_batch, plan_script_batch
from trainfast_runner.search.batch_journal import BatchQuestion, BatchSnapshot, Predicted, Probe
from trainfast_runner.search.conductor import SearchCaller, SearchRuns, WarmProcess
from trainfast_runner.search.searches import SearchOptions
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.spec import resolve


def untraced(_plan, _cancelled):
    """A trace that fails at once."""
    raise UserError("no trace", key="model")


@pytest.fixture
def conductor_of(tmp_path, monkeypatch):
    """Make the conductor of a new search, whose first process ends in a state."""
    home, options = Home(tmp_path), SearchOptions()
    batch_plan = batch_conductor.plan_spec_batch(resolve("tiny-llama", ()), None)
    monkeypatch.setattr(conductor, "trace_size_model", untraced)

    def make(state):
        result = Result(run_id="r1", state=state)
        process = SimpleNamespace(directory=tmp_path / "r1", ready=lambda: None, wait_for_end=lambda: result)

        def start_process(runs, *_):
            runs.process = cast("WarmProcess", process)
            return runs.process

        monkeypatch.setattr(SearchRuns, "start_process", start_process)
        return BatchConductor(open_batch(batch_plan, home, options), batch_plan, home, options, SearchCaller())

    return make


@pytest.mark.parametrize("state", ["stopped", "killed"])
def test_a_search_whose_first_process_is_stopped_before_it_is_ready_is_cancelled(conductor_of, state):
    conductor = conductor_of(state)
    assert conductor.run().state == "cancelled"
    conductor.close()
    assert not any(isinstance(line, Predicted | Probe) for line in conductor._lines)


def test_a_first_process_that_failed_is_an_error(conductor_of):
    conductor = conductor_of("failed")
    with pytest.raises(UserError, match="r1 ended failed"):
        conductor.run()
    conductor.close()


def two(*used_gib):
    return Machine([Gpu(uuid=f"GPU-{index}", bus=index + 1, memory_used=used_gib[index] << 30) for index in range(2)])


def planned(python, *settings):
    return batch_conductor.plan_spec_batch(resolve("tiny-llama", settings), python)


def opened(python, home, *settings):
    return open_batch(planned(python, *settings), home, SearchOptions())


def test_the_same_command_continues_a_batch_search_on_its_gpu_though_another_is_freer_by_now(python, tmp_path):
    home = Home(tmp_path / "home")
    with stand_in.installed(two(9, 1)):
        search = opened(python, home)
    question = BatchSnapshot.read(search).lines[0]
    assert isinstance(question, BatchQuestion)
    assert question.device_uuids == ["GPU-1"]
    with stand_in.installed(two(1, 9)):
        plan = planned(python).plan
        assert plan.device_uuids == ["GPU-0"]
        assert opened(python, home) == search
        continued = on_gpus(plan, question.device_uuids)
    assert (continued.device_uuids, continued.env["CUDA_VISIBLE_DEVICES"]) == (["GPU-1"], "GPU-1")
    assert continued.spec.knobs == plan.spec.knobs, "a run of the search is told by its knobs"


def test_a_gpu_of_a_batch_search_that_is_gone_is_named(python):
    with stand_in.installed(Machine([Gpu(uuid="GPU-0")])), pytest.raises(UserError) as refused:
        on_gpus(planned(python).plan, ["GPU-1"])
    assert "GPU GPU-1 is not available any more" in refused.value.line()


def test_a_batch_search_of_other_visible_gpus_is_another(python, tmp_path, monkeypatch):
    home = Home(tmp_path / "home")
    with stand_in.installed(two(1, 1)):
        first = opened(python, home)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert opened(python, home) != first
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        assert opened(python, home, "devices=0+") != first, "GPUs that the person named stay the person's"


UNREPORTED = Machine([Gpu(unsupported=frozenset({"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"}))])
"""A GPU that does not report its memory."""


def script_of(python, folder):
    """The preset of an empty script that names the flag of its batch size."""
    script = folder / "train.py"
    script.write_text("")
    return ScriptPreset(command=(python, str(script)), flag_words={"batch_size": "--bs {}"}, name="mine")


def test_a_search_on_a_gpu_of_unknown_free_memory_asks_for_a_limit_before_it_tries_a_size(tmp_path, python):
    script = script_of(python, tmp_path)
    with stand_in.installed(UNREPORTED):
        with pytest.raises(UserError) as refused:
            plan_script_batch(script, (), None)
        limited = plan_script_batch(script, ("memory_limit=1GiB",), None).plan
    assert refused.value.line() == "the free memory of the GPU is unknown; try --set memory_limit=…"
    assert limited.memory_limit_bytes == (1 << 30,)


def test_memory_that_the_driver_reserves_is_not_free(tmp_path, python):
    with stand_in.installed(Machine([Gpu()])):
        plan = plan_script_batch(script_of(python, tmp_path), (), None).plan
    used, reserved = 1024, 512
    assert (
        batch_conductor.free_gpu_bytes(plan)
        == (81920 - used - reserved) * stand_in.MIB - batch_conductor.CONTEXT_WITHOUT_KERNELS_BYTES
    )

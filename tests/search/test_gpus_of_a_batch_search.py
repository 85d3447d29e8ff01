"""The GPU of a batch search: chosen once, whichever has the most free memory later."""

from __future__ import annotations

from pathlib import Path

import pytest
import stand_in
from stand_in import Gpu, Machine
from tests.core.test_planned_devices import a_cuda_python

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.search.batch.batch_plan import BatchPlan, plan_preset_batch
from trainfast_runner.search.batch.conductor import on_gpus
from trainfast_runner.search.batch.opening import open_batch
from trainfast_runner.search.journal.batch import BatchQuestion, read_batch_journal
from trainfast_runner.search.options import BatchSearchOptions
from trainfast_runner.settings.spec import resolve


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return a_cuda_python(tmp_path, monkeypatch)


def two(*used_gib: int) -> Machine:
    return Machine([Gpu(uuid=f"GPU-{index}", bus=index + 1, memory_used=used_gib[index] << 30) for index in range(2)])


def planned(python: str, *settings: str) -> BatchPlan:
    return plan_preset_batch(resolve("tiny-llama", settings), python, BatchSearchOptions())


def opened(python: str, home: Home, *settings: str) -> Path:
    return open_batch(planned(python, *settings), home, BatchSearchOptions())


def test_the_same_command_continues_a_batch_search_on_its_gpu_though_another_is_freer_by_now(
    python: str, tmp_path: Path
) -> None:
    home = Home(tmp_path / "home")
    with stand_in.installed(two(9, 1)):
        search = opened(python, home)
    question = read_batch_journal(search)[0]
    assert isinstance(question, BatchQuestion)
    assert question.device_uuids == ["GPU-1"]
    with stand_in.installed(two(1, 9)):
        plan = planned(python).plan
        assert plan.device_uuids == ["GPU-0"]
        assert opened(python, home) == search
        continued = on_gpus(plan, question.device_uuids)
    assert (continued.device_uuids, continued.env["CUDA_VISIBLE_DEVICES"]) == (["GPU-1"], "GPU-1")
    assert continued.spec.knobs == plan.spec.knobs, "a run of the search is told by its knobs"


def test_a_gpu_of_a_batch_search_that_is_gone_is_named(python: str) -> None:
    with stand_in.installed(Machine([Gpu(uuid="GPU-0")])), pytest.raises(UserError) as refused:
        on_gpus(planned(python).plan, ["GPU-1"])
    assert "GPU GPU-1 is not available any more" in refused.value.line()


def test_a_batch_search_of_other_visible_gpus_is_another(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path / "home")
    with stand_in.installed(two(1, 1)):
        first = opened(python, home)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert opened(python, home) != first
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        assert opened(python, home, "devices=0+") != first, "GPUs that the person named stay the person's"

"""The memory that a script's batch search needs to know before its first probe."""

from __future__ import annotations

from pathlib import Path

import pytest
import stand_in
from stand_in import Gpu, Machine
from tests.core.test_planned_devices import a_cuda_python

from trainfast_runner.errors import UserError
from trainfast_runner.search.batch.batch_plan import plan_script_batch
from trainfast_runner.search.memory.limits import CONTEXT_WITHOUT_KERNELS_BYTES, free_gpu_bytes
from trainfast_runner.search.options import BatchSearchOptions
from trainfast_runner.settings.scripts.script_preset import ScriptPreset

UNREPORTED = Machine([Gpu(unsupported=frozenset({"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"}))])
"""A GPU that does not report its memory."""


def script_of(python: str, folder: Path) -> ScriptPreset:
    """The preset of an empty script that names the flag of its batch size."""
    script = folder / "train.py"
    script.write_text("")
    return ScriptPreset(command=(python, str(script)), flag_words={"batch_size": "--bs {}"}, name="mine")


def test_a_search_on_a_gpu_of_unknown_free_memory_asks_for_a_limit_before_it_tries_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = a_cuda_python(tmp_path, monkeypatch)
    script = script_of(python, tmp_path)
    with stand_in.installed(UNREPORTED):
        with pytest.raises(UserError) as refused:
            plan_script_batch(script, (), None, BatchSearchOptions())
        limited = plan_script_batch(script, ("memory_limit=1GiB",), None, BatchSearchOptions()).plan
    assert refused.value.line() == "the free memory of the GPU is unknown; try --set memory_limit=…"
    assert limited.memory_limit_bytes == (1 << 30,)


def test_memory_that_the_driver_reserves_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = a_cuda_python(tmp_path, monkeypatch)
    with stand_in.installed(Machine([Gpu()])):
        plan = plan_script_batch(script_of(python, tmp_path), (), None, BatchSearchOptions()).plan
    used, reserved = 1024, 512
    assert free_gpu_bytes(plan) == (81920 - used - reserved) * stand_in.MIB - CONTEXT_WITHOUT_KERNELS_BYTES

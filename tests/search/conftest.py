"""A training Python for the stand-in GPUs."""

import pytest
from tests.core.test_planned_devices import a_cuda_python


@pytest.fixture
def python(tmp_path, monkeypatch) -> str:
    return a_cuda_python(tmp_path, monkeypatch)

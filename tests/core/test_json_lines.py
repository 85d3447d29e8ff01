"""Files that several writers and readers share: whole or not there, and read as far as they are readable."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from trainfast_runner.records.json_lines import write_atomically

PATIENCE_S = 30.0


def test_threads_that_write_one_path_do_not_share_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both reach the rename before either is renamed: with one name for both, the second rename found no file."""
    both_written = threading.Barrier(2, timeout=PATIENCE_S)
    rename: Callable[[Path, Path], None] = os.rename
    errors: list[OSError] = []

    def rename_together(source: Path, target: Path) -> None:
        both_written.wait()
        rename(source, target)

    def write(content: bytes) -> None:
        try:
            write_atomically(tmp_path / "result.json", content)
        except OSError as error:
            errors.append(error)

    monkeypatch.setattr(os, "rename", rename_together)
    contents = [b"a" * 4096, b"b" * 8192]
    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert errors == []
    assert (tmp_path / "result.json").read_bytes() in contents
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]

"""A real sshd for the tests of more than one machine."""

from collections.abc import Iterator

import pytest

from nodes.sshd import NoSshd, Sshd, running


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """A running sshd; skips where none can be had."""
    try:
        server = running(tmp_path_factory.mktemp("sshd") / "files")
        started = server.__enter__()
    except NoSshd as error:
        pytest.skip(str(error))
    yield started
    server.__exit__(None, None, None)

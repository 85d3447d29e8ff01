"""The SIGTERM thread uses no GPU but its own rank's."""

import subprocess
import sys
import textwrap

import pytest

ON_THE_SECOND_GPU = """
    import os, signal, sys, threading
    from types import SimpleNamespace

    import torch

    # CUDA's own rule, played: each thread has a current device, the first GPU until it is set.
    current = threading.local()
    torch.cuda.set_device = lambda device: setattr(current, "index", device.index)

    from trainfast_runner.worker.training import keep_last_step_on_sigterm

    recorder = SimpleNamespace(flush=lambda timeout_s: print("asked on GPU", getattr(current, "index", 0), flush=True))
    log = SimpleNamespace(write=lambda *_, **__: None, phase="train", step=3)
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    keep_last_step_on_sigterm(recorder, log, device)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(60)
"""


@pytest.mark.ci
@pytest.mark.long
def test_the_sigterm_thread_asks_its_own_ranks_gpu():
    """Anything it asks CUDA elsewhere makes a context, of hundreds of MiB, on another rank's GPU."""
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ON_THE_SECOND_GPU)], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (143, "asked on GPU 1\n"), ended.stderr

"""One rank trains three steps on the CPU, its tensors counted: `python counted_rank.py PRESET [SETTING ...]`.

Prints the peak of the last step by phase. Unlike the memory of the process, the count has no caches of allocators.
"""

import itertools
import json
import os
import sys
import weakref
from collections import defaultdict

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainfast_runner.settings.spec import resolve
from trainfast_runner.worker.data.samples import random_samples
from trainfast_runner.worker.loop import forward_backward
from trainfast_runner.worker.model.build import build_model
from trainfast_runner.worker.model.model_config import resolve_config, vocab_size
from trainfast_runner.worker.model.optimizer import Objective
from trainfast_runner.worker.spec import knobs_of
from trainfast_runner.worker.strategies.base import make_strategy


class CountedBytes(TorchDispatchMode):
    """Counts live storages, whose sizes may change: FSDP frees and grows them in place."""

    def __init__(self):
        super().__init__()
        self.storages = {}
        self.phase = "start"
        self.peaks = defaultdict(int)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count(result)
        live = [storage.nbytes() for storage_ref in list(self.storages.values()) if (storage := storage_ref())]
        self.peaks[self.phase] = max(self.peaks[self.phase], sum(live))
        return result

    def count(self, value):
        """Count the storages of nested tensors; of a DTensor that of its slice."""
        if isinstance(value, list | tuple):
            for each in value:
                self.count(each)
        elif isinstance(value, torch.Tensor) and not value.is_meta:
            storage = getattr(value, "_local_tensor", value).untyped_storage()
            key = storage._cdata
            if key not in self.storages:
                self.storages[key] = weakref.ref(storage, lambda _, key=key: self.storages.pop(key))

    def enter(self, phase):
        self.phase = phase


def main(preset, *settings):
    spec = resolve(preset, settings)
    knobs, objective = knobs_of(spec.knobs), spec.data["objective"]
    config = resolve_config(spec.model)
    strategy = make_strategy(knobs, torch.device("cpu"))
    strategy.start()
    model = build_model(config, objective, knobs, torch.device("cpu"))
    samples = random_samples(vocab_size(config), objective, knobs.seq_len, 0, None, knobs.batch_size)
    batch = samples.__getitems__(list(range(knobs.batch_size)))
    with CountedBytes() as counted:
        strategy.prepare(model)
        for _ in range(3):
            counted.peaks.clear()
            counted.count(list(batch.values()))
            forward_backward(
                strategy, Objective(objective, knobs), itertools.repeat(batch, knobs.grad_accum), counted.enter
            )
            counted.enter("optimizer")
            strategy.optimizer_step()
    print(json.dumps(counted.peaks), flush=True)
    os._exit(0)  # DeepSpeed's threads


if __name__ == "__main__":
    main(*sys.argv[1:])

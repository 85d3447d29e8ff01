"""Assemble one rank's training: first everything that does not count as its memory, then the model, then the steps."""

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .data.batches import open_samples
from .invalid import InvalidInput
from .memory.allocator import Allocator, fullest_device_memory
from .memory.memory_meter import make_memory_meter
from .model.build import import_model_code
from .model.model_config import check_seq_len, resolve_config
from .records.record_file import RecordFile, WorkerLog
from .records.step_log import StepRecorder, make_clock
from .shared.host import search_lock, wait_policy
from .shared.memory_limit import KEPT, ORDINARY, STRICT, STRICT_IN_WARMUP
from .shared.process import exit_now, rank_suffix
from .shared.words import CONTROL_FILE, PROBE, TRIAL
from .spec import RankSpec
from .train_state import TrainState
from .warm import Order, ProbeRunner, TrialRunner, orders

NO_THREAD = "can't start new thread"
"""Python's error when the memory limit leaves no room for a thread stack; treated as out of memory."""


class Training:
    """One rank's training, or its part in a search, as the spec asks for it."""

    def __init__(self, run_dir: Path, spec: RankSpec, log: WorkerLog, allocator: Allocator) -> None:
        """Prepare everything that is not the training's own memory: data, loader processes, process group.

        Raises InvalidInput for a spec that cannot work.
        """
        self.run_dir, self.spec, self.log = run_dir, spec, log
        self.device = pick_device(spec.device)
        if self.device.type == "cpu":
            _record_cpu(spec, log, allocator)
        log.enter("data", f"opening {spec.data.kind} data")
        self.config = resolve_config(spec.model)
        check_seq_len(self.config, spec.data.objective, spec.knobs.seq_len)
        import_model_code(self.config, spec.data.objective)
        # Collections skip the imported objects: going through them takes longer than a switch between settings.
        gc.freeze()
        gc.enable()
        self.state = TrainState(spec, self.config, self.device)
        self.strategy = self.state.strategy
        self.samples = open_samples(spec, self.config, partial(log.enter, "data"), log.write)
        if spec.role not in (PROBE, TRIAL):  # these open loaders for settings of their own
            self.state.load(self.samples, spec.knobs.steps)
        self.strategy.enter_phase = log.enter
        self.state.start()
        self.memory = make_memory_meter(self.strategy.devices, spec.memory_limit_bytes, allocator)

    def run(self) -> None:
        """Build the model and train, or try batch sizes or settings. Raises the training's own error."""
        try:
            if self.spec.role == TRIAL:
                self._try_settings()
            else:
                self.log.enter("model", f"building {self.config.model_type} with random weights")
                self.memory.start(self.spec.strict_steps)
                if self.spec.role == PROBE:
                    self._probe()
                else:
                    self._train()
        except Exception as error:
            self.log.available = fullest_device_memory(self.strategy.devices, self.spec.memory_limit_bytes)
            self.memory.free_reserve()
            # If memory ran out, only this process knows how much it had by then.
            self.log.held_bytes = self.memory.peak_bytes()
            if self.device.type == "cpu" and self.spec.memory_limit_bytes is not None and NO_THREAD in str(error):
                raise MemoryError(f"{error}: memory_limit leaves no room for its stack") from error
            raise
        self.memory.free_reserve()
        self.strategy.stop()

    def build(self) -> StepRecorder:
        """Build the model, wrap it with its optimizer, and open the records of its steps."""
        self.state.build(self.samples)
        if self.log.rank == 0:
            for name, document in self.strategy.run_documents().items():
                (self.run_dir / name).write_text(json.dumps(document, indent=2) + "\n")
        steps = RecordFile(self.run_dir / f"steps{rank_suffix(self.log.rank)}.jsonl", complain=self.log.trouble)
        recorder = self.state.recorder(steps.write, self.log, self.memory, self.spec.knobs.timing_warmup)
        keep_last_step_on_sigterm(recorder, self.log, self.device)
        self.state.write_actual(self.log)
        return recorder

    def _train(self) -> None:
        """Take the steps. Every step that ended is on record, however the training ends."""
        recorder = self.build()
        self.log.enter("train")
        began_s = time.monotonic()
        recorder.clock = make_clock(self.device)
        try:
            self.state.engine.train(self.state.knobs, self.state.batches, recorder)
            recorder.flush()
        except BaseException:
            recorder.flush(timeout_s=STEP_LOG_TIMEOUT_S)
            raise
        self.log.write("finished", steps=self.spec.knobs.steps, seconds=time.monotonic() - began_s)

    def _probe(self) -> None:
        """Try the batch sizes that the parent orders, all on one model."""
        self.build()
        self.log.enter("train", "trying batch sizes")
        # From here on the parent may order.
        self.log.write("ready", room_bytes=self.memory.available_bytes())
        ProbeRunner(self.state, self.samples, self.memory, self.log).run(self._orders())
        self.log.write("finished", steps=0)

    def _try_settings(self) -> None:
        """Try the settings that the parent orders, each with a model of its own."""
        keep_last_step_on_sigterm(None, self.log, self.device)
        self.log.write("ready")
        trials = TrialRunner(self.spec, self.config, self.device, self.samples, self.memory, self.log)
        trials.run(self._orders())
        self.log.write("finished", steps=0)

    def _orders(self) -> Iterator[Order]:
        """The orders from the search that this run belongs to."""
        return orders(self.run_dir / CONTROL_FILE, search_lock(self.run_dir, str(self.spec.search_id)))


def _record_cpu(spec: RankSpec, log: WorkerLog, allocator: Allocator) -> None:
    """Write the `cpu` record: allocator, thresholds and threads that this CPU run's figures come from.

    Raises InvalidInput for a batch search under an allocator whose thresholds are the user's own.
    """
    if spec.role == PROBE and allocator.kept_reason is not None:
        raise InvalidInput(
            f"a batch search measures memory by malloc's thresholds, and {allocator.kept_reason}", key="LD_PRELOAD"
        )
    log.write(
        "cpu",
        allocator=allocator.name,
        thresholds=_thresholds(spec, allocator),
        kept_because=allocator.kept_reason,
        threads=torch.get_num_threads(),
        wait_policy=wait_policy(os.environ),
    )


def _thresholds(spec: RankSpec, allocator: Allocator) -> str:
    """Return the malloc thresholds of this CPU run, as a run records them."""
    if allocator.kept_reason is not None:
        return KEPT
    if spec.role == TRIAL or spec.strict_steps:
        return STRICT_IN_WARMUP
    return STRICT if spec.strict_steps is None else ORDINARY


def pick_device(name: str) -> torch.device:
    """This rank's device: the CPU, or the GPU at its place in CUDA_VISIBLE_DEVICES.

    Raises InvalidInput when torch sees no GPU.
    """
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidInput(
            f"device is {name}, and torch {torch.__version__} sees no CUDA device",
            key="devices",
            allowed=["cpu"],
            nearest="cpu",
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


STEP_LOG_TIMEOUT_S = 1.0
"""Seconds to wait for the figures of the last step."""
EXIT_SIGTERM = 128 + signal.SIGTERM
"""Exit code after SIGTERM, as a shell reports it."""


def keep_last_step_on_sigterm(recorder: StepRecorder | None, log: WorkerLog, device: torch.device) -> None:
    """Handle SIGTERM in a thread, because the main thread may wait in a collective for a rank that is gone.

    Without a recorder no step is kept. A new thread's device is the first GPU, where CUDA would make a context: the
    thread sets `device` first.
    """
    receiver, sender = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(receiver, True)
    owner = os.getpid()

    def watch() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        while os.read(receiver, 1) != bytes([signal.SIGTERM]):
            pass
        if recorder is not None:
            recorder.flush(timeout_s=STEP_LOG_TIMEOUT_S)
        log.write("signal", signal="SIGTERM", phase=log.phase, step=log.step)
        exit_now(EXIT_SIGTERM)

    def in_main_thread(_number: int, _frame: Any) -> None:
        # The thread above acts on the byte that the interpreter wrote; a forked child has no such thread.
        if os.getpid() != owner:
            os._exit(EXIT_SIGTERM)

    threading.Thread(target=watch, name="sigterm", daemon=True).start()
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, in_main_thread)

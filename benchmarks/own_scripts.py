"""The cost of the hooks of `run -- COMMAND` to a script, at each step.

    python -m benchmarks.own_scripts

The hooks' own time is CPU time of the thread that trains, in one process that takes the hooks off and puts them back
every few steps. Other load only ever adds to a block of steps: the figure is the difference between the least disturbed
tenth of the blocks with the hooks and of those without, the quartiles are of neighbours' differences. Beside them, in
blocks of its own, stands the least that any script can do to report a step: a hook that writes one line of JSON.
Whole runs are those of `script_speeds.py`.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.meter import Row, at_most, options, print_table

from trainfast_runner.running.scripts.script_plan import HOOKS_FOLDER

HOOKS_US = 15.0
PEER_US = 9.0
"""One line of JSON and one write a step, on the machine that the bound was set on (torch 2.13)."""
TRAINER_PERCENT = 0.3
ALTERNATION = """
import json, os, statistics, time, torch
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, TensorDataset, dataloader

torch.set_num_threads(1)
torch.manual_seed(0)

def switch_of(model):
    # A function that puts the hooks of this script's one model back, or takes them off.
    loader, timed = dataloader._BaseDataLoaderIter, dataloader._BaseDataLoaderIter.__next__
    places = [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
    places += [model._forward_pre_hooks, model._forward_hooks]
    hooks = [dict(place) for place in places]
    assert all(hooks), "the hooks are not there"
    def switch(on):
        for place, kept in zip(places, hooks):
            place.clear()
            place.update(kept if on else {})
        loader.__next__ = timed if on else timed.__wrapped__
    return switch

def print_blocks(times, order):
    print(json.dumps({side: [time for n, time in enumerate(times) if order[n % len(order)] == side] for side in order}))
"""
EMPTY = (
    ALTERNATION
    + """
from trainfast_door.script_run import current_run

STEPS, BLOCKS = 50, 2400
ORDER = ("hooks", "bare", "line", "line", "bare", "hooks")

class Still(torch.optim.SGD):
    def step(self, closure=None):
        pass

model = torch.nn.Linear(1, 1)
optimizer = Still(model.parameters(), lr=1.0)
batches = iter(DataLoader(TensorDataset(torch.ones(STEPS * (BLOCKS + 1), 1)), batch_size=1))

# Records are written ten times a second: here each block of steps writes its own.
flush = current_run().steps.flush

def step_us():
    begun_ns = time.thread_time_ns()
    for _ in range(STEPS):
        model(*next(batches))
        optimizer.step()
    flush()
    return (time.thread_time_ns() - begun_ns) / STEPS / 1e3

lines = os.open(os.path.join(os.environ["TRAINFAST_RUN"], "lines"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def write_line(optimizer, args, kwargs):
    os.write(lines, (json.dumps({"t_ns": time.monotonic_ns(), "optimizer": id(optimizer)}) + chr(10)).encode())

step_us()
switch, times = switch_of(model), []
for block in range(BLOCKS):
    side = ORDER[block % len(ORDER)]
    switch(side == "hooks")
    handle = optimizers.register_optimizer_step_post_hook(write_line) if side == "line" else None
    times.append(step_us())
    if handle:
        handle.remove()
print_blocks(times, ORDER)
"""
)
"""Prints the microseconds of steps, by block, that have a batch, a forward pass and an optimizer doing nothing."""
TRAINER = (
    ALTERNATION
    + """
import tempfile
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

STEPS, BLOCKS, WARMUP = 2, 3000, 20
ORDER = ("hooks", "bare", "bare", "hooks")

class Alternation(TrainerCallback):
    times, begun_ns = [], 0

    def on_step_end(self, args, state, control, **more):
        step = state.global_step - WARMUP
        if step < 0 or step % STEPS:
            return
        now_ns, block = time.thread_time_ns(), step // STEPS
        if step == 0:
            self.switch = switch_of(model)
            self.callbacks = list(trainer.callback_handler.callbacks)
        else:
            self.times.append((now_ns - self.begun_ns) / STEPS / 1e3)
        on = ORDER[block % len(ORDER)] == "hooks"
        self.switch(on)
        # The list that is being gone through stays as it is.
        kept = [callback for callback in self.callbacks if on or type(callback).__name__ != "TrainfastCallback"]
        trainer.callback_handler.callbacks = kept
        self.begun_ns = time.thread_time_ns()

config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
)
model = LlamaForCausalLM(config)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 512, (64, 64))]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=4, max_steps=WARMUP + STEPS * BLOCKS, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=500,
    )
    alternation = Alternation()
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[alternation])
    trainer.train()
print_blocks(alternation.times, ORDER)
"""
)
"""Prints the microseconds of a Trainer's steps, by block."""


def rows() -> list[Row]:
    """The budgets."""
    with tempfile.TemporaryDirectory() as folder:
        empty = _printed(EMPTY, _hooked(Path(folder, "empty")))
        trainer = _printed(TRAINER, _hooked(Path(folder, "trainer")))
    step_us, line_us = statistics.median(trainer["hooks"]), _added(empty, "line")
    beside = "the same, beside a hook that writes a line a step"
    return [
        _hooks_row("hooks of a step", empty, 1.0, HOOKS_US, "us"),
        at_most(
            beside, _added(empty, "hooks") / line_us, HOOKS_US / PEER_US, "x", digits=2, more=f" ({line_us:.2f} us)"
        ),
        _hooks_row(f"hooks of a Trainer's step, {step_us / 1e3:.1f} ms", trainer, 100 / step_us, TRAINER_PERCENT, "%"),
    ]


def _hooks_row(what: str, times: dict[str, list[float]], unit_us: float, most: float, unit: str) -> Row:
    """The time that the hooks add to a step, in units of `unit_us` a microsecond."""
    neighbours = [(hooked - bare) * unit_us for hooked, bare in zip(times["hooks"], times["bare"], strict=False)]
    low, _, high = statistics.quantiles(neighbours, n=4)
    more = f" (quartiles {low:.2f} to {high:.2f})"
    return at_most(what, _added(times, "hooks") * unit_us, most, unit, digits=2, more=more)


def _added(times: dict[str, list[float]], side: str) -> float:
    """The microseconds that this side adds to a step, in the least disturbed tenth of the blocks."""
    return statistics.quantiles(times[side], n=10)[0] - statistics.quantiles(times["bare"], n=10)[0]


def _hooked(directory: Path) -> dict[str, str]:
    """The environment of a script with the hooks, whose records go to this new directory."""
    directory.mkdir()
    (directory / "run.json").write_text(json.dumps({"script": {"timing_warmup": 3}}))
    return {**os.environ, "PYTHONPATH": str(HOOKS_FOLDER), "TRAINFAST_RUN": str(directory)}


def _printed(script: str, environment: dict[str, str]) -> Any:
    """The JSON that the script prints last."""
    command = [sys.executable, "-c", script, str(HOOKS_FOLDER)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    options(__doc__).parse_args()
    sys.exit(print_table(rows()))

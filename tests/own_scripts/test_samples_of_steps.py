"""The samples of each step of a script, by the batches whose forward passes reach a backward."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forking import Forks

# One process of the test run forks all of these scripts from one that has imported torch and transformers.
pytestmark = pytest.mark.xdist_group("hooked-scripts")
PATIENCE_S = 60.0
START = """
import time, torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
def rows(count):
    return TensorDataset(torch.randn(count, 8))
def sized(*sizes):
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return [list(range(end - size, end)) for size, end in zip(sizes, ends)]
def step(*batches):
    for x in batches:
        model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
def evaluate(loader, pause=0.0):
    for (x,) in loader:
        with torch.no_grad():
            model(x)
        time.sleep(pause)
"""
"""The lines before each script here."""


@dataclass
class Hooked:
    """The records of a script that ran with the hooks."""

    code: int
    steps: list[dict[str, Any]]
    lines: list[dict[str, Any]]
    troubles: list[str]

    @property
    def samples(self):
        return [step["samples"] for step in self.steps]

    def newest(self, kind):
        return [line for line in self.lines if line["kind"] == kind][-1]


Run = Callable[..., Hooked]


@pytest.fixture(scope="module")
def forks():
    """Processes that have imported torch, transformers and Accelerate."""
    forks = Forks(Path(__file__).with_name("hooked.py"))
    yield forks
    forks.close()


@pytest.fixture
def run(forks, tmp_path):
    """Run lines with the hooks, and return their records."""

    def run(lines, **script):
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"script": script, "device": "cpu"}))
        path = tmp_path / "train.py"
        path.write_text(START + lines)
        ended = forks.run([str(path)], [{"TRAINFAST_RUN": str(folder)}], tmp_path, PATIENCE_S)
        print(ended.err)
        records = {
            name: [json.loads(line) for line in (folder / name).read_text().splitlines()]
            for name in ("steps.jsonl", "worker.jsonl", "door.jsonl")
            if (folder / name).exists()
        }
        troubles = [line["detail"] for line in records["door.jsonl"] if line["kind"] == "trouble"]
        return Hooked(ended.code, records.get("steps.jsonl", []), records.get("worker.jsonl", []), troubles)

    return run


EVALUATIONS = {
    "after_each_epoch": ("", "evaluate(test)"),
    "before_training": ("evaluate(test)", ""),
    "of_one_batch_before_training": ("evaluate([next(iter(test))])", ""),
    "cut_short_before_training": ("for n, (x,) in enumerate(test):\n    if n == 2: break", ""),
    "with_gradients_in_evaluation_mode": ("", "model.eval()\n    for (x,) in test: model(x)\n    model.train()"),
    "of_one_batch_by_an_iterator_that_stays": ("batches = iter(test)", "evaluate([next(batches)])"),
    "of_the_training_data": ("evaluate(train)", "evaluate(train)"),
    "in_inference_mode": ("", "torch.inference_mode()(evaluate)(test)"),
    "on_tensors": ("evaluate([(torch.ones(100, 8),)])", "evaluate([(torch.ones(100, 8),)])"),
}


@pytest.mark.parametrize(("before", "after"), EVALUATIONS.values(), ids=EVALUATIONS)
def test_kind_b_batches_of_an_evaluation_are_in_no_step(run, before, after):
    lines = f"""
train, test = DataLoader(rows(16), batch_size=8), DataLoader(rows(256), batch_size=32)
{before}
for epoch in range(4):
    for (x,) in train: step(x)
    {after}
"""
    ran = run(lines)
    assert (ran.samples, ran.newest("script")["ran"]["batch_size"], ran.troubles) == ([8] * 8, 8, [])


def test_kind_b_an_evaluation_between_a_batch_and_its_forward_pass(run):
    ran = run("""
train, test = DataLoader(rows(48), batch_size=8), DataLoader(rows(64), batch_size=32)
for n, (x,) in enumerate(train):
    if n % 2 == 0: evaluate(test, pause=0.1)
    step(x)
""")
    assert ran.samples == [8] * 6
    assert ran.newest("script")["evaluation_seconds"] >= 0.6
    assert min(step["step_ms"] for step in ran.steps[2::2]) < 200, "an evaluation takes 200 ms"


@pytest.mark.parametrize("data", ["DataLoader(rows(64), batch_size=32)", "[(torch.ones(32, 8),)] * 2"])
def test_case_01_kind_b_the_time_of_an_evaluation_is_in_no_step(run, data):
    ran = run(f"""
train, test = DataLoader(rows(16), batch_size=8), {data}
for epoch in range(3):
    for (x,) in train: step(x)
    model.eval()
    evaluate(test, pause=0.1)
    model.train()
""")
    assert ran.samples == [8] * 6
    assert min(step["step_ms"] for step in ran.steps[2::2]) < 200, "an evaluation takes 200 ms"
    assert ran.newest("script")["evaluation_seconds"] >= 0.5
    assert ran.newest("script")["evaluation_seconds"] < 2


OOM = 'raise RuntimeError("DefaultCPUAllocator: can\'t allocate memory: you tried to allocate 77 bytes.")'
FAILURES = {
    "in_the_forward_of_an_evaluation": (
        f"""
def failing(module, inputs):
    if len(inputs[0]) == 32: {OOM}
for epoch in range(2):
    for (x,) in train: step(x)
    model[0].register_forward_pre_hook(failing)
    evaluate(test)
""",
        2,
        "evaluation",
    ),
    "after_the_evaluation_s_batches": (
        f"""
for (x,) in train: step(x)
for (x,) in test: pass
{OOM}
""",
        2,
        "evaluation",
    ),
    "before_training": (
        f"""
def validate():
    {OOM}
validate()
""",
        0,
        "evaluation",
    ),
    "in_the_training_s_forward": (
        f"""
def failing(module, inputs):
    {OOM}
for epoch in range(2):
    for (x,) in DataLoader(rows(16), batch_size=8): step(x)
    evaluate(test)
    model[1].register_forward_pre_hook(failing)
""",
        3,
        "forward",
    ),
}


@pytest.mark.parametrize(("lines", "step", "phase"), FAILURES.values(), ids=FAILURES)
def test_kind_b_an_error_in_an_evaluation_names_it(run, lines, step, phase):
    ran = run(f"train, test = DataLoader(rows(16), batch_size=8), DataLoader(rows(64), batch_size=32)\n{lines}")
    assert (ran.code, ran.newest("exception")["step"], ran.newest("exception")["phase"]) == (1, step, phase)


ACCUMULATED = [
    re.fullmatch(r"(\w+): (.*?)\n(.*)", case, re.DOTALL).groups()
    for case in re.split(r"^# ", Path(__file__).with_name("samples_of_steps.txt").read_text(), flags=re.MULTILINE)[1:]
]
"""The name of each script in that file, the samples of its steps, and its lines."""


@pytest.mark.parametrize(("samples", "lines"), [pytest.param(*case[1:], id=case[0]) for case in ACCUMULATED])
def test_kind_c_the_samples_of_a_step_are_those_of_its_batches(run, samples, lines):
    ran = run(lines)
    assert (ran.troubles, ran.samples) == ([], json.loads(samples))


TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
ids = torch.randint(0, 60, ({rows}, 8))
data = [{{"input_ids": row, "labels": row}} for row in ids]
model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=64, n_positions=8))
arguments = TrainingArguments("out", report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, **{fields})
{more}
Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data).train()
"""
EIGHTS = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
TRAINERS = {
    "short_epoch": (20, {**EIGHTS, "num_train_epochs": 4}, [20] * 4),
    "last_step_of_an_epoch": (100, {**EIGHTS, "num_train_epochs": 2}, [32, 32, 32, 4] * 2),
    "evaluation": (
        16,
        {
            "per_device_train_batch_size": 4,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "eval_on_start": True,
            "per_device_eval_batch_size": 16,
            "max_steps": 5,
        },
        [4] * 5,
    ),
}


@pytest.mark.parametrize(("rows", "fields", "samples"), TRAINERS.values(), ids=TRAINERS)
def test_case_02_the_trainer_s_batches_are_counted(run, rows, fields, samples):
    ran = run(TRAINER.format(rows=rows, fields=fields, more=""))
    assert (ran.samples, ran.newest("script")["ran"]["batch_size"]) == (samples, fields["per_device_train_batch_size"])
    assert ran.troubles == []


def test_kind_c_the_batch_that_the_trainer_finds_is_the_one_that_ran(run):
    failing = """
forward = model.forward
def limited(input_ids, **more):
    if len(input_ids) > 4: raise RuntimeError("CUDA out of memory.")
    return forward(input_ids, **more)
model.forward = limited
"""
    fields = {"per_device_train_batch_size": 5, "auto_find_batch_size": True, "max_steps": 4}
    ran = run(TRAINER.format(rows=64, fields=fields, more=failing))
    assert (len(set(ran.samples)), ran.newest("script")["ran"]["batch_size"]) == (1, ran.samples[0])
    assert ran.samples[0] in range(1, 5)


PREPARED = """
class Sizes(IterableDataset):
    def __iter__(self):
        return (torch.randn(size, 8) for size in (16, 17, 20, 13))
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, {loader})
for x in loader:
    accelerator.backward(model(x[0] if isinstance(x, list) else x).mean())
    optimizer.step()
    optimizer.zero_grad()
"""
LOADERS = {
    "batches_of_several_sizes": "DataLoader(rows(66), batch_sampler=sized(16, 17, 20, 13))",
    "iterable": "DataLoader(Sizes(), batch_size=None)",
}


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_kind_i_batches_that_accelerate_draws_ahead_are_in_their_own_steps(run, loader):
    ran = run(PREPARED.format(loader=loader))
    assert (ran.samples, ran.newest("script")["ran"]["batch_size"], ran.troubles) == ([16, 17, 20, 13], 16, [])


def test_case_05_kind_j_samples_that_the_user_gives_win_over_a_data_loader(run):
    ran = run("for (x,) in DataLoader(rows(32), batch_size=8): step(x)", samples_per_step=5)
    assert (ran.samples, ran.newest("script")["samples_from"]) == ([5] * 4, "--samples-per-step")


MANY_OPTIMIZERS = {
    "stepped_in_backward": """
optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
for p in optimizers: p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
for (x,) in DataLoader(rows(80), batch_size=4): model(x).mean().backward()
""",
    "stepped_after_backward": """
optimizers = [torch.optim.SGD([p], lr=0.1) for p in reversed(list(model.parameters()))]
for (x,) in DataLoader(rows(80), batch_size=4):
    model(x).mean().backward()
    for each in optimizers: each.step()
""",
    "two_of_one_model": """
first, second = (torch.optim.SGD([p for p in model.parameters() if p.dim() == size], lr=0.1) for size in (2, 1))
for (x,) in DataLoader(rows(80), batch_size=4):
    model(x).mean().backward()
    first.step()
    second.step()
""",
}


@pytest.mark.parametrize("lines", MANY_OPTIMIZERS.values(), ids=MANY_OPTIMIZERS)
def test_kind_k_many_optimizers_take_one_step_for_a_backward(run, lines):
    deep = "model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)), nn.Linear(8, 1))\n"
    ran = run(deep + lines)
    assert (ran.samples, ran.newest("actual")["parameters"], ran.troubles) == ([4] * 20, 12 * (8 * 8 + 8) + 8 + 1, [])


def test_loss_of_lightning_is_of_one_batch_where_it_accumulates(run):
    ran = run("""
import sys
from types import SimpleNamespace as Some
sys.modules["lightning.pytorch.callbacks"] = Some(Callback=object)
from trainfast_door.frameworks import callbacks_of_lightning
trainer = Some(global_step=0, estimated_stepping_batches=20, precision="32-true", gradient_clip_val=None)
trainer.accumulate_grad_batches = 4
module, (callback,) = Some(automatic_optimization=True), callbacks_of_lightning()
callback.on_train_start(trainer, module)
for step in range(1, 9):
    trainer.global_step = step
    callback.on_train_batch_end(trainer, module, {"loss": torch.tensor(3.0) / 4}, None, 0)
""")
    assert ({step["loss"] for step in ran.steps}, ran.troubles) == ({3.0}, [])
    assert ran.newest("script")["ran"] == {"precision": "fp32", "grad_accum": 4, "grad_clip": 0.0}


def test_compiled_layers_leave_the_precision_of_autocast_unknown(run):
    ran = run("""
model.compile(backend="eager")
for x in torch.ones(8, 2, 8):
    with torch.autocast("cpu", torch.bfloat16): loss = model(x).sum()
    loss.backward()
    optimizer.step()
""")
    actual = ran.newest("actual")
    assert (actual["compiled"], actual.get("compute_dtype")) == (True, None)
    assert "precision" not in ran.newest("script")["ran"]


def test_accumulation_by_a_flag_of_the_script_beside_accelerate_is_believed(run):
    lines = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, optimizer)
for batch in range(1, 17):
    accelerator.backward(model(torch.ones(2, 8)).sum())
    if batch % 2 == 0: optimizer.step()
"""
    ran = run(lines, flagged=["grad_accum"])
    assert (len(ran.steps), ran.newest("script")["framework"]) == (8, "accelerate")
    assert "grad_accum" not in ran.newest("script")["ran"]

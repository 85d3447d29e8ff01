"""Kind E: a batch search takes the longest samples first where the data set tells lengths, and says so where not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, dataloader

from own_scripts.conftest import preset_of, written
from trainfast_runner.door.trainfast_door import loader_hook
from trainfast_runner.search.batch_journal import BatchSnapshot
from trainfast_runner.search.journal import JournalFollower
from trainfast_tui.text.batch_words import batch_answer_lines

LENGTHS = [3 + number % 5 for number in range(100)]
LENGTHS[61], LENGTHS[90] = 64, 50
ROWS = [torch.ones(length) for length in LENGTHS]
SCRIPT = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument('--batch-size', type=int, default=8)
args = parser.parse_args()
rows = [torch.ones(4000 if i == 777 else 400 + i // 2) for i in range(1000)]
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): return iter(rows)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(256))
    def forward(self, x): return (x[..., None] * self.scale).relu()
net = Net()
optimizer = torch.optim.AdamW(net.parameters())
pad = lambda batch: torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
for batch in torch.utils.data.DataLoader(SOURCE, args.batch_size, collate_fn=pad):
    net(batch).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def run(monkeypatch):
    """A trial of a batch search in this process, before its first step."""
    trial = SimpleNamespace(settings=SimpleNamespace(longest_first=True, timing_warmup=2), taken=0, widths={})
    iterator_class = dataloader._BaseDataLoaderIter
    monkeypatch.setattr(iterator_class, "_next_index", iterator_class._next_index)
    loader_hook.take_longest_first(trial)
    return trial


class WithLengths(Dataset[Any]):
    """Samples that cannot be read by the look, whose lengths the data set names."""

    lengths = LENGTHS

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return torch.tensor([LENGTHS[index]])


class Stream(IterableDataset[Any]):
    """Samples without an order to choose from."""

    def __iter__(self):
        return iter(ROWS)


class Budget:
    """Batches of a script's own sampler: many short samples, or one long one."""

    def __iter__(self):
        yield list(range(20))
        yield [61]
        yield list(range(20, 60))


def widths(loader, batches=2):
    """The longest sample of each of the first batches."""
    first = zip(range(batches), loader, strict=False)
    return [max(map(_length, batch if isinstance(batch, list) else [batch])) for _, batch in first]


def _length(sample):
    if isinstance(sample, dict):
        return len(sample["input_ids"])
    sample = sample[0] if isinstance(sample, tuple) else sample
    return int(sample[0]) if sample.numel() == 1 else sample.numel()


@pytest.mark.parametrize(
    "dataset",
    [
        ROWS,
        [{"input_ids": row.tolist(), "labels": 1} for row in ROWS],
        [(row, number) for number, row in enumerate(ROWS)],
        WithLengths(),
    ],
    ids=["tensors", "dicts", "tuples", "lengths"],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_kind_e_first_batches_hold_the_longest_samples(run, dataset, workers):
    loader = DataLoader(dataset, 2, shuffle=True, num_workers=workers, collate_fn=list)
    assert widths(loader) == [64, 64]
    assert run.widths == {"longest_first": True, "looked_at": 100, "samples": 100}


def test_kind_e_timed_steps_take_ordinary_batches(run):
    batches = iter(DataLoader(ROWS, 2, collate_fn=list))
    assert _length(next(batches)[0]) == 64
    run.taken = 2
    assert [_length(sample) for sample in next(batches)] == LENGTHS[2:4]


def test_kind_e_samples_outside_the_sampler_are_not_taken(run):
    loader = DataLoader(ROWS, 2, sampler=SubsetRandomSampler([0, 1, 2, 3, 90]), collate_fn=list)
    assert widths(loader) == [50, 50]
    assert run.widths["samples"] == 5


def test_kind_e_the_widest_of_a_samplers_own_batches_comes_first(run):
    loader = DataLoader(ROWS, batch_sampler=Budget(), collate_fn=list)
    assert [len(batch) for batch in loader] == [40, 40, 40]
    run.taken = 2
    assert [len(batch) for batch in loader] == [20, 1, 40]


def test_kind_e_a_slow_look_ends_and_tells_what_it_saw(run, monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(loader_hook, "LOOK_NS", 30)
    monkeypatch.setattr(loader_hook, "monotonic_ns", lambda: next(clock))
    widths(DataLoader(ROWS, 2, collate_fn=list))
    assert 10 < run.widths["looked_at"] < 100 == run.widths["samples"]


@pytest.mark.parametrize("dataset", [Stream(), [torch.ones(4)] * 20], ids=["iterable", "equal"])
def test_kind_e_batches_stay_where_no_lengths_differ(run, dataset):
    assert widths(DataLoader(dataset, 2, collate_fn=list)) == widths(DataLoader(dataset, 2, collate_fn=list))
    assert not run.widths.get("longest_first")


@pytest.mark.long
@pytest.mark.ci
@pytest.mark.parametrize("source", ["rows", "Stream()"])
def test_case_07_batch_search_heeds_the_longest_sample(cli, work, source):
    preset_of(cli, *written(work, SCRIPT.replace("SOURCE", source)))
    done = cli("search", "max-batch", "mine", "--set", "memory_limit=128MiB", "--proof-steps=4", "--json")
    assert done.code == 0, done.json or done.err
    answer, search = done.json, JournalFollower(cli.home / "searches" / done.json["search_id"], BatchSnapshot).poll()
    printed = "\n".join(batch_answer_lines(search, search.ended))
    seen = answer["widths"]
    if source == "rows":
        assert answer["max_batch"] <= 6, "a sample of 4,000 values takes 4 MiB, and more in the backward"
        assert (seen["widest"], seen["longest_first"]) == (4000, True)
        assert "longest of all 1,000 samples" in printed
    else:
        assert answer["max_batch"] > 10
        assert seen["widest"] < 1000
        assert "the data set tells no lengths" in seen["note"]
        assert "a wider batch needs more memory" in printed

"""Samples of varying length: padded in the batch, counted without padding, the longest in the first step."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainfast_runner.worker.data.batches import GlobalOrder
from trainfast_runner.worker.data.corpus import CorpusRequest, open_corpus
from trainfast_runner.worker.data.samples import IGNORED_LABEL, CountedBatches, Masking, TextSamples, pieces_of


def texts(lengths, seq_len, **more):
    ids = np.arange(1, sum(lengths) + 1, dtype=np.uint16)
    return TextSamples(ids, pieces_of(np.array(lengths), seq_len), pad_id=0, **more)


def test_a_long_text_is_several_samples_and_one_token_is_none():
    samples = texts([3, 1, 10, 4], seq_len=4)
    rows = [samples.__getitems__([index])["input_ids"][0].tolist() for index in range(len(samples))]
    assert rows == [[1, 2, 3], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14], [15, 16, 17, 18]]


@given(st.lists(st.integers(0, 50), min_size=1), st.integers(2, 16))
def test_no_token_is_in_two_samples_and_none_is_longer_than_asked(lengths, seq_len):
    pieces = pieces_of(np.array(lengths), seq_len)
    covered = [at for start, n in zip(pieces.starts, pieces.lengths, strict=True) for at in range(start, start + n)]
    assert len(covered) == len(set(covered))
    assert sum(lengths) - len(covered) == sum(length % seq_len == 1 for length in lengths)
    assert all(2 <= n <= seq_len for n in pieces.lengths)


def test_padding_is_masked_no_target_and_not_counted_from_step_to_step():
    batch = texts([3, 5, 2], seq_len=8).__getitems__([0, 2])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [9, 10, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3], [9, 10, IGNORED_LABEL]]
    assert texts([3, 5, 2], seq_len=8, width=8).__getitems__([0, 2])["labels"].shape == (2, 8)
    samples = texts([3, 5, 2], seq_len=8)
    counted = CountedBatches(samples.__getitems__(numbers) for numbers in ([0, 1], [2], [1]))
    next(counted), next(counted)
    assert counted.take_tokens() == 10
    next(counted)
    assert counted.take_tokens() == 5


def test_a_masked_sample_is_the_same_beside_any_other():
    samples = texts([30, 50, 20], seq_len=64, masking=Masking(99, 100, (), seed=3))
    alone, beside = samples.__getitems__([0]), samples.__getitems__([1, 0])
    for name in ("input_ids", "labels"):
        assert torch.equal(alone[name][0], beside[name][1, :30])
    assert (alone["labels"] != IGNORED_LABEL).any()


def test_the_first_steps_take_the_longest_one_of_the_very_longest_each_and_then_the_order_is_as_ever():
    lengths = np.random.default_rng(0).permutation(np.arange(2, 102))
    micro_batches = [
        [lengths[number] for number in batch]
        for rank in (0, 1)
        for batch in list(GlobalOrder(100, 4, 2, rank, 2, steps=3, seed=0, lengths=lengths))[:2]
    ]
    assert sorted(length for batch in micro_batches for length in batch) == list(range(86, 102))
    assert sorted(max(batch) for batch in micro_batches) == [98, 99, 100, 101]
    lengths = np.arange(50)
    plain, longest_first = (list(GlobalOrder(50, 4, 1, 0, 1, 5, 7, given)) for given in (None, lengths))
    assert (longest_first[:2], longest_first[2:]) == ([[49, 48, 47, 46]] * 2, plain[2:])
    assert next(iter(GlobalOrder(3, 5, 1, 0, 1, 1, 0, np.array([2, 4, 3])))) == [1, 2, 0, 1, 2]


LENGTHS = np.random.default_rng(1).integers(2, 200, 100)


def steps_of(*, grouped, ranks=1, steps=24, seed=0):
    """The numbers of 8 samples for each step, two micro-batches of 4 on one rank or one on each of two."""
    by_rank = [list(GlobalOrder(100, 4, 2 // ranks, r, ranks, steps, seed, LENGTHS, grouped)) for r in range(ranks)]
    batches = [batch for step in zip(*by_rank, strict=True) for batch in step]
    return [[*first, *second] for first, second in zip(batches[::2], batches[1::2], strict=True)]


def test_grouped_takes_the_same_samples_in_each_window_with_less_padding_in_one_order_for_any_ranks():
    plain, grouped = (np.array(steps_of(grouped=grouped)) for grouped in (False, True))
    assert grouped[0].tolist() == plain[0].tolist(), "the longest"
    # An epoch has four windows at least: three steps of 8 of these 100 samples.
    windows, plain_windows = (np.sort(steps[3:].reshape(7, 24)) for steps in (grouped, plain))
    assert windows.tolist() == plain_windows.tolist()
    padded, less_padded = (LENGTHS[steps[3:] % 100].reshape(-1, 4).max(axis=1).sum() for steps in (plain, grouped))
    assert less_padded < 0.8 * padded
    alone = steps_of(grouped=True)
    assert alone == steps_of(grouped=True, ranks=2) == steps_of(grouped=True, steps=99)[:24]
    assert alone != steps_of(grouped=True, seed=1)


@pytest.fixture(scope="module")
def poem(tmp_path_factory):
    """Lines of 1 to 24 words, in one file."""
    path = tmp_path_factory.mktemp("text") / "poem.txt"
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "rain", "falls"]
    random = np.random.default_rng(0)
    lines = [" ".join(random.choice(words, size=random.integers(1, 25))) for _ in range(400)]
    path.write_text("\n\n".join(lines))
    return {"kind": "files", "paths": [str(path)], "texts": "lines"}


@pytest.mark.long
def test_lines_train_and_the_peak_comes_first(train, poem):
    run = train(data=poem, steps=8, samples="padded")
    assert run.code == 0, run.stderr[-3000:]
    tokens = [step["tokens"] for step in run.steps()]
    assert tokens[0] == max(tokens) > min(tokens) > 0
    assert run.losses()[-1] < run.losses()[0]
    assert run.record("data")["samples"] <= 400
    mean = round(run.record("data")["tokens"] / run.record("data")["samples"])
    multiplied = run.record("actual")["parameters"] - 1024 * 64
    assert run.record("actual")["model_flops_per_sample"] == mean * (6 * multiplied + 6 * 2 * 64 * 2 * mean)


@pytest.mark.long
@pytest.mark.parametrize(
    "knobs",
    [
        {"samples": "grouped", "ranks": 2, "strategy": "ddp", "batch_size": 2, "grad_accum": 2},
        {"samples": "padded", "ranks": 2, "strategy": "tp"},
        {"samples": "padded", "ranks": 2, "strategy": "pp"},
        {"samples": "grouped", "engine": "trainer", "batch_size": 4, "grad_accum": 2},
    ],
    ids=lambda knobs: knobs.get("strategy", knobs.get("engine")),
)
def test_unequal_lengths_weigh_the_same_however_they_are_shared(train, poem, knobs):
    run = train(data=poem, steps=8, **knobs)
    alone = train(data=poem, steps=8, samples=knobs["samples"])
    assert run.losses() == pytest.approx(alone.losses(), rel=1e-4), run.stderr[-3000:]


@pytest.mark.long
@pytest.mark.parametrize("objective", ["masked-lm", "sequence-classification"])
def test_an_encoder_does_not_see_padding(train, poem, objective):
    data = {**poem, "objective": objective}
    alone = train(model="bert", data=data, samples="padded", steps=3, batch_size=1, grad_accum=8)
    together = train(model="bert", data=data, samples="padded", steps=3)
    assert alone.losses() == pytest.approx(together.losses(), rel=1e-4), alone.stderr[-3000:]


@pytest.mark.long
def test_documents_of_a_folder(train, tmp_path):
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text("one two three " * (1 + number % 5))
    data = {"kind": "files", "paths": [str(path) for path in sorted(tmp_path.iterdir())]}
    run = train(data=data, steps=3, batch_size=4, samples="padded")
    assert run.code == 0, run.stderr[-3000:]
    assert run.record("data")["source"] == "12 text files"


@pytest.mark.parametrize(("special", "end"), [({}, []), ({"eos_token": "z"}, [2]), ({"sep_token": "b"}, [1])])
def test_a_text_ends_with_the_end_token_that_its_tokenizer_has(tmp_path, special, end):
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "z": 2}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "words.json"), **special)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text("a b a")
    request = CorpusRequest("files", [str(tmp_path / "text.txt")], vocab=8, tokenizer=str(tmp_path / "tokenizer"))
    corpus = open_corpus(request, tmp_path / "cache", print)
    assert corpus.special_ids == end
    ids = (corpus.folder / "ids.bin").read_bytes()
    assert ids == b"".join(token.to_bytes(2, "little") for token in [0, 1, 0, *end])

"""The cache of token ids."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainfast_runner.worker.data.corpus import CorpusRequest, open_corpus
from trainfast_runner.worker.data.tokenize_text import build


@pytest.mark.parametrize(("special", "end"), [({}, []), ({"eos_token": "z"}, [2]), ({"sep_token": "b"}, [1])])
def test_a_text_ends_with_the_end_token_that_its_tokenizer_has(tmp_path, special, end):
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "z": 2}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "words.json"), **special)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text("a b a")
    request = CorpusRequest("files", [str(tmp_path / "text.txt")], vocab=8, tokenizer=str(tmp_path / "tokenizer"))
    corpus = open_corpus(request, tmp_path / "cache", lambda folder: build(request, folder))
    assert (corpus.special_ids, corpus.tokens) == (end, 3 + len(end))
    ids = (corpus.folder / "ids.bin").read_bytes()
    assert ids == b"".join(token.to_bytes(2, "little") for token in [0, 1, 0, *end])

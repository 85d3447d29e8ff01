"""A small model, and the worker's knobs with the defaults of the table, as `run.json` and trace requests have them."""

import tempfile
from unittest.mock import patch

from trainfast_runner.memory import tracing
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.worker.spec import knobs_of


def llama(**fields):
    """The fields of a small model, with others or more of them."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {"family": "llama", **sizes, "vocab_size": 1024, "max_position_embeddings": 128, **fields}


def gpt2(**fields):
    """The fields of a small GPT-2 without dropout, with others or more of them."""
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1024, "n_positions": 128}
    return {"family": "gpt2", **sizes, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0), **fields}


def knob_values(**overrides):
    """A value for each knob of the table: the overrides, and the defaults of all others."""
    return {**defaults(), **overrides}


def worker_knobs(**overrides):
    """The typed knobs of the worker with the overrides, and the defaults of all others."""
    return knobs_of(knob_values(**overrides))


def trace_uncached(spec, *, whole=False):
    """The model of a run on the CPU, traced anew; `whole` traces every block."""
    ask = tracing.WARM.ask_each

    def ask_whole(executable, requests, *others):
        return ask(executable, [{**request, "whole": whole} for request in requests], *others)

    with (
        tempfile.TemporaryDirectory() as cache,
        patch.dict("os.environ", XDG_CACHE_HOME=cache),
        patch.object(tracing.WARM, "ask_each", ask_whole),
    ):
        return tracing.trace_model(spec)

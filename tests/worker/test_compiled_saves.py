"""A compiled step's kept tensors, as traced, beside those that torch's own partitioner keeps."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from trainfast_runner.worker.memory_trace import step_timeline
from trainfast_runner.worker.memory_trace.compiled_saves import CompiledSaves
from trainfast_runner.worker.memory_trace.live_bytes import LiveBytes

SMALL = {
    "gpt2": {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 100},
    "llama": {
        **{"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 160, "vocab_size": 100},
        **{"num_attention_heads": 2, "num_key_value_heads": 1},
    },
}
BATCH, LENGTH, WIDTH = 4, 128, 64


def block_of(model_type):
    """A block of the model, and the arguments that its forward takes beside the hidden states."""
    config = AutoConfig.for_model(model_type, **SMALL[model_type])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    if model_type == "gpt2":
        return model.transformer.h[0], {}
    cosines = torch.zeros(1, LENGTH, WIDTH // 2)
    return model.model.layers[0], {"position_embeddings": (cosines, cosines)}


def kept_by_torch(block, keywords):
    """Bytes of the tensors that torch's partitioner keeps, but for parameters and inputs."""
    forward = torch.compile(block.forward, backend="aot_eager_decomp_partition", dynamic=False)
    hidden = torch.zeros(BATCH, LENGTH, WIDTH, requires_grad=True)
    output = forward(hidden, **keywords)
    saved = (output[0] if isinstance(output, tuple) else output).grad_fn.saved_tensors
    given = {one.data_ptr() for one in (*block.parameters(), hidden, *keywords.get("position_embeddings", ()))}
    return sum(
        {one.data_ptr(): one.untyped_storage().nbytes() for one in saved if one.data_ptr() not in given}.values()
    )


def kept_by_trace(block, keywords):
    """Live bytes of the traced block after its forward, but for its output."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        step_timeline._replace_with_empty(block, torch.device("cpu"))
        keywords = {name: tuple(map(fake.from_tensor, values)) for name, values in keywords.items()}
        hidden = torch.zeros(BATCH, LENGTH, WIDTH, requires_grad=True)
        live_bytes = LiveBytes("cpu")
        live_bytes.saves = CompiledSaves(live_bytes)
        live_bytes.count_all([*block.parameters(), hidden, *keywords.get("position_embeddings", ())], 0)
        before = sum(live_bytes.live)
        with live_bytes, live_bytes.saves:
            live_bytes.begin("forward", 1, "0:0")
            output = block(hidden, **keywords)
            live_bytes.begin("forward", 1, "")
        size = (output[0] if isinstance(output, tuple) else output).untyped_storage().nbytes()
        return sum(live_bytes.live) - before - size


@pytest.mark.parametrize("model_type", SMALL)
def test_what_is_kept_is_what_torchs_partitioner_keeps(model_type):
    real = kept_by_torch(*block_of(model_type))
    assert kept_by_trace(*block_of(model_type)) == pytest.approx(real, rel=0.02)

"""The tiny model and data that the Hugging Face scripts beside it train."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_model():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


def tiny_data(count=256, length=8):
    rows = torch.randint(0, 64, (count, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]

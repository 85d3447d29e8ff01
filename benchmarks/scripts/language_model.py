"""The model, the data and the clock of the two scripts that call the Hugging Face Trainer."""

import time

import torch
from sizes import LENGTH, SEQUENCES, STEPS, VOCABULARY
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback


class StepEnds(TrainerCallback):
    ends = []

    def on_step_end(self, args, state, control, **more):
        self.ends.append(time.perf_counter())


def small_model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
        )
    )


def rows():
    return [{"input_ids": row, "labels": row} for row in torch.randint(0, VOCABULARY, (SEQUENCES * STEPS, LENGTH))]

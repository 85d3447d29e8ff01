"""A Trainer whose arguments are in the script, and a callback that keeps the time."""

import json
import tempfile
import time

import torch
from sizes import LENGTH, SEQUENCES, STEPS, VOCABULARY
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class StepEnds(TrainerCallback):
    ends = []

    def on_step_end(self, args, state, control, **more):
        self.ends.append(time.perf_counter())


def train(arguments):
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, VOCABULARY, (SEQUENCES * STEPS, LENGTH))]
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[StepEnds()]).train()
    print(json.dumps(StepEnds.ends))


if __name__ == "__main__":
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    with tempfile.TemporaryDirectory() as folder:
        train(TrainingArguments(folder, per_device_train_batch_size=SEQUENCES, num_train_epochs=1, **quiet))

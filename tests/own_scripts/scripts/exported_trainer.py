"""A Trainer on exported TrainingArguments, by the file beside it or by flags; MODEL and SEQ_LEN say the rest."""

import json
import os
import sys

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 16

    def __getitem__(self, place):
        row = torch.arange(place, place + int(os.environ["SEQ_LEN"])) % 512
        return {"input_ids": row, "labels": row}


if any(word.startswith("--deepspeed") for word in sys.argv):
    import deepspeed

    # Only inference calls it, and its C++ takes minutes to compile on a busy machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
model = LlamaForCausalLM(LlamaConfig(**json.loads(os.environ["MODEL"])))
if len(sys.argv) > 1:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
else:
    import training_args

    args = training_args.args
    if hasattr(training_args, "with_adapters"):
        model = training_args.with_adapters(model)
args.save_strategy = "no"
trainer = Trainer(model=model, args=args, train_dataset=Rows())
trainer.train()
print(f"took {trainer.state.global_step} steps", flush=True)

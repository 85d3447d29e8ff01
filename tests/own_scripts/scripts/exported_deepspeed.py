"""A loop with a DeepSpeed engine, whose json is a flag, as DeepSpeed's own examples have it."""

import argparse
import json
import os

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

# Only inference calls it, and its C++ takes minutes to compile on a busy machine.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed", required=True, help="the json")
args = parser.parse_args()
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**json.loads(os.environ["MODEL"])))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=args.deepspeed)
while True:
    batch = torch.randint(512, (engine.train_micro_batch_size_per_gpu(), int(os.environ["SEQ_LEN"])))
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    engine.step()

"""A loop of one's own with a DeepSpeed engine, ZeRO stage 1, and flags."""

import argparse

import deepspeed
import torch
from torch import nn

# Only inference calls it, and its C++ takes minutes to compile on a busy machine.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--save", help="the folder for a checkpoint after every step")
args = parser.parse_args()
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
config = {
    "train_micro_batch_size_per_gpu": args.batch_size,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
while engine.global_steps < args.steps:
    inputs, targets = torch.randn(args.batch_size, 16), torch.randn(args.batch_size, 1)
    loss = nn.functional.mse_loss(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
    if args.save:
        engine.save_checkpoint(args.save)
print(f"took {engine.global_steps} steps", flush=True)

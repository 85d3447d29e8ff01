"""A loop of one's own with a DeepSpeed engine, ZeRO stage 1."""

import deepspeed
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(16):
    loss = nn.functional.mse_loss(engine(torch.randn(4, 16)), torch.randn(4, 1))
    engine.backward(loss)
    engine.step()
print(f"took {engine.global_steps} steps", flush=True)

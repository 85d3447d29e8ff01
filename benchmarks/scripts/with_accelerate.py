"""A loop of one's own with accelerate, which accumulates gradients over two batches."""

import json
import time

import torch
from accelerate import Accelerator
from sizes import BATCH, DEPTH, STEPS, WIDTH
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(BATCH * STEPS, WIDTH)), batch_size=BATCH // 2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
ends = []
for (batch,) in loader:
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.mse_loss(model(batch), batch))
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        ends.append(time.perf_counter())
print(json.dumps(ends))

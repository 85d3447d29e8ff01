"""A loop of one's own with accelerate, which accumulates gradients over two batches."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
data = DataLoader(TensorDataset(torch.randn(96, 16), torch.randn(96, 1)), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
taken = 0
for inputs, targets in data:
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        taken += accelerator.sync_gradients
print(f"took {taken} steps", flush=True)

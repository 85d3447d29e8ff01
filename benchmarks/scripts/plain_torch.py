"""A training with torch alone: argparse, a DataLoader, a loop."""

import argparse
import json
import time

import torch
from sizes import BATCH, DEPTH, STEPS, WIDTH
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=BATCH)
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
loader = DataLoader(TensorDataset(torch.randn(args.batch_size * STEPS, WIDTH)), batch_size=args.batch_size)
ends = []
for (batch,) in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), batch).backward()
    optimizer.step()
    ends.append(time.perf_counter())
print(json.dumps(ends))

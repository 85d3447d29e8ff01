"""A training whose memory grows by half a megabyte a sample, with flags for batch, accumulation and data workers."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=4)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--save", default="model.pt")
args = parser.parse_args()


class Rows(Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, place):
        return torch.full((64,), place / len(self))


torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(Rows(), batch_size=args.bs, num_workers=args.workers)
model = nn.Sequential(nn.Linear(64, 32768), nn.ReLU(), nn.Linear(32768, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
taken = 0
for place, rows in enumerate(loader, start=1):
    model(rows).square().mean().backward()
    if place % args.accum == 0:
        optimizer.step()
        optimizer.zero_grad()
        torch.save(model.state_dict(), args.save)
        taken += 1
    if taken == args.steps:
        break
print(f"took {taken} steps", flush=True)

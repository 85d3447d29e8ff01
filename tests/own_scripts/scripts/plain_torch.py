"""A training as people write it with torch alone: argparse, a DataLoader, a loop."""

import argparse
import os
import signal
import time
from itertools import pairwise

import torch
from sibling import hidden_size
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--chdir", help="a script that goes elsewhere first")
parser.add_argument("--handle-signals", action="store_true", help="a script with handlers of its own")
parser.add_argument("--catch-exit", action="store_true", help="a script that catches SystemExit")
parser.add_argument("--pause", type=float, default=0.0, help="seconds of every step")
parser.add_argument("--huge", action="store_true", help="a batch that no machine holds")
parser.add_argument("--save", help="the file for the whole model")
args = parser.parse_args()

if args.chdir:
    os.chdir(args.chdir)
if args.handle_signals:
    signal.signal(signal.SIGTERM, lambda *_: print("saved", flush=True) or os._exit(0))
torch.manual_seed(0)
torch.set_num_threads(1)
data = TensorDataset(torch.randn(400, 16), torch.randn(400, 1))
loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
model = nn.Sequential(nn.Linear(16, hidden_size), nn.ReLU(), nn.Linear(hidden_size, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
taken, ends = 0, []
while taken < args.steps:
    for inputs, targets in loader:
        time.sleep(args.pause)
        if args.huge:
            inputs = inputs[:1].expand(1 << 44, 16)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        try:
            optimizer.step()
        except SystemExit:
            if not args.catch_exit:
                raise
        taken += 1
        ends.append(time.perf_counter())
        if taken == args.steps:
            break
if args.save:
    torch.save(model, args.save)
times = [round(1e3 * (end - begin), 3) for begin, end in pairwise(ends)]
print(f"took {taken} steps, ms of each but the first:", *times, flush=True)

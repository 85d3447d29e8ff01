"""A loop in the style of nanoGPT: no DataLoader, get_batch from memory, DistributedDataParallel under torchrun."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

block_size, batch_size, gradient_accumulation_steps, max_iters = 8, 4, 2, 10


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

    def forward(self, idx, targets):
        logits = self.head(self.embedding(idx))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch():
    starts = torch.randint(len(data) - block_size - 1, (batch_size,))
    pairs = [(data[i : i + block_size], data[i + 1 : i + 1 + block_size]) for i in starts]
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
torch.set_num_threads(1)
data = torch.randint(64, (1000,))
model = DistributedDataParallel(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(max_iters):
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        _, loss = model(*get_batch())
        (loss / gradient_accumulation_steps).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print(f"rank {rank} took {max_iters} steps", flush=True)
dist.destroy_process_group()

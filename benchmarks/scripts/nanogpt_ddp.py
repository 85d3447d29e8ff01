"""A loop in the style of nanoGPT: get_batch from memory, DistributedDataParallel, two ranks under torchrun."""

import json
import os
import time

import torch
import torch.distributed as dist
from sizes import LENGTH, SEQUENCES, STEPS, VOCABULARY
from torch import nn
from torch.nn.parallel import DistributedDataParallel

gradient_accumulation_steps = 2


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 128), nn.Linear(128, VOCABULARY)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, idx, targets):
        logits = self.head(self.blocks(self.embedding(idx)))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch():
    starts = torch.randint(len(data) - LENGTH - 1, (SEQUENCES,))
    pairs = [(data[i : i + LENGTH], data[i + 1 : i + 1 + LENGTH]) for i in starts]
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


dist.init_process_group("gloo")
torch.manual_seed(int(os.environ["RANK"]))
data = torch.randint(VOCABULARY, (10_000,))
model = DistributedDataParallel(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ends = []
for _ in range(STEPS // 3):
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        _, loss = model(*get_batch())
        (loss / gradient_accumulation_steps).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    ends.append(time.perf_counter())
if dist.get_rank() == 0:
    print(json.dumps(ends))
dist.destroy_process_group()

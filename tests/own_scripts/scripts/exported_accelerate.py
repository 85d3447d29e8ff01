"""A loop with accelerate, which takes its device and precision from `accelerate launch`."""

import json
import os

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

accelerator = Accelerator()
model = LlamaForCausalLM(LlamaConfig(**json.loads(os.environ["MODEL"])))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = torch.randint(512, (256, int(os.environ["SEQ_LEN"])))
loader = torch.utils.data.DataLoader(rows, batch_size=int(os.environ["BATCH_SIZE"]))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
while True:
    for batch in loader:
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()

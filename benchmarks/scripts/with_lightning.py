"""A LightningModule of one's own, with a callback that keeps the time."""

import json
import time

import lightning
import torch
from sizes import BATCH, DEPTH, STEPS, WIDTH
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))

    def training_step(self, batch, place):
        return nn.functional.mse_loss(self.layers(batch[0]), batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class StepEnds(lightning.Callback):
    ends = []

    def on_train_batch_end(self, *_):
        self.ends.append(time.perf_counter())


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(BATCH * STEPS, WIDTH)), batch_size=BATCH)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(max_epochs=1, accelerator="auto", callbacks=[StepEnds()], **quiet)
trainer.fit(Regression(), loader)
print(json.dumps(StepEnds.ends))

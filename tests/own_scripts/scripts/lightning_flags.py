"""A LightningModule with flags, whose Trainer logs, saves checkpoints and leaves precision to its defaults."""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--max-steps", type=int, default=10)
parser.add_argument("--ranks", type=int, default=1, help="processes that Lightning starts itself")
args = parser.parse_args()


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, place):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, place):
        inputs, targets = batch
        self.log("val_loss", nn.functional.mse_loss(self.layers(inputs), targets))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
torch.set_num_threads(1)
rows = TensorDataset(torch.randn(400, 16), torch.randn(400, 1))
trainer = lightning.Trainer(
    max_steps=args.max_steps,
    val_check_interval=5,
    log_every_n_steps=1,
    accelerator="cpu",
    devices=args.ranks,
    strategy="ddp" if args.ranks > 1 else "auto",
)
trainer.fit(Regression(), DataLoader(rows, batch_size=args.batch_size), DataLoader(rows, batch_size=100))
print(f"took {trainer.global_step} steps", flush=True)

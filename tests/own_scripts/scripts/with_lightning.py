"""A LightningModule of one's own."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, place):
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
torch.set_num_threads(1)
data = DataLoader(TensorDataset(torch.randn(80, 16), torch.randn(80, 1)), batch_size=4)
trainer = lightning.Trainer(
    max_steps=10, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_checkpointing=False
)
trainer.fit(Regression(), data)
print(f"took {trainer.global_step} steps", flush=True)

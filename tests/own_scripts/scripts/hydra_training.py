"""A plain training whose settings are a Hydra configuration."""

from dataclasses import dataclass

import hydra
import torch
from hydra.core.config_store import ConfigStore
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    batch_size: int = 4
    lr: float = 1e-3
    max_steps: int = 12


ConfigStore.instance().store(name="config", node=Config)


@hydra.main(version_base=None, config_path=None, config_name="config")
def train(config):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    taken = 0
    for (inputs,) in DataLoader(TensorDataset(torch.randn(4096, 16)), batch_size=config.batch_size):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        taken += 1
        if taken == config.max_steps:
            break
    print(f"took {taken} steps", flush=True)


train()

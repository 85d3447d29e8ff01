"""A training loop as a user writes it, timed: no part of the product is imported, nor any of its settings made.

    python -m benchmarks.plain_loop PRESET --steps 30 --warmup 5 [--batch-size N] [--precision bf16]

PRESET, a shipped preset of text or a file, names the model, the data's objective and the knobs; the loop prints one
JSON object with its samples/s. It trains on the GPU where torch sees one.
"""

import json
import statistics
import time
import tomllib
from pathlib import Path
from typing import Any

from benchmarks import meter


def main() -> None:
    """Train, print samples/s: the median over the steps after the warm-up."""
    parser = meter.options(__doc__, steps=30, warmup=5, batch_size=0, precision="fp32")
    parser.add_argument("preset", type=Path)
    asked = parser.parse_args()
    shipped = Path(__file__).parents[1] / "presets" / f"{asked.preset}.toml"
    preset = tomllib.loads((shipped if shipped.exists() else asked.preset).read_text())
    preset["knobs"]["batch_size"] = asked.batch_size or preset["knobs"]["batch_size"]
    print(json.dumps(train(preset, asked.steps, asked.warmup, asked.precision)))


def train(preset: dict[str, Any], steps: int, warmup: int, precision: str) -> dict[str, float]:
    """The loop: random tokens (of a masked model 15 % are targets), forward, loss, backward, step."""
    import torch
    import transformers

    fields, objective = dict(preset["model"]), preset["data"]["objective"]
    config = transformers.AutoConfig.for_model(fields.pop("family"), **fields)
    is_masked = objective == "masked-lm"
    head = transformers.AutoModelForMaskedLM if is_masked else transformers.AutoModelForCausalLM
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = head.from_config(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    shape = (preset["knobs"]["batch_size"], preset["knobs"]["seq_len"])
    times_s = []
    for _ in range(steps):
        began_s = time.perf_counter()
        ids = torch.randint(5, config.vocab_size, shape)
        labels = torch.where(torch.rand(shape) < 0.15, ids, -100) if is_masked else ids
        batch = {"input_ids": ids.to(device, non_blocking=True), "labels": labels.to(device, non_blocking=True)}
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times_s.append(time.perf_counter() - began_s)
    return {"samples_per_s": shape[0] / statistics.median(times_s[warmup:]), "steps": steps - warmup}


if __name__ == "__main__":
    main()

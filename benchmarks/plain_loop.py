"""A training loop as a user writes it, timed: no part of the product is imported, nor any of its settings made.

    python benchmarks/plain_loop.py PRESET.toml --steps 30 --warmup 5 [--batch-size N] [--precision bf16]

PRESET.toml, or a shipped preset by its name, names the model, the data's kind and the knobs; the loop prints one JSON
object with its samples/s. It trains on the GPU where torch sees one.
"""

import argparse
import glob
import io
import json
import statistics
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main() -> None:
    """Train, print samples/s: the median over the steps after the warm-up."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("preset", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--batch-size", type=int, help="instead of the preset's")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16 by autocast")
    options = parser.parse_args()
    shipped = Path(__file__).parents[1] / "presets" / f"{options.preset}.toml"
    preset = tomllib.loads((shipped if shipped.exists() else options.preset).read_text())
    preset["knobs"]["batch_size"] = options.batch_size or preset["knobs"]["batch_size"]
    print(json.dumps(train(preset, options.steps, options.warmup, options.precision)))


def train(preset: dict[str, Any], steps: int, warmup: int, precision: str = "fp32") -> dict[str, float]:
    """The loop: data, forward, loss, backward, step."""
    import torch
    import transformers

    fields = dict(preset["model"])
    config = transformers.AutoConfig.for_model(fields.pop("family"), **fields)
    heads = {
        "causal-lm": transformers.AutoModelForCausalLM,
        "masked-lm": transformers.AutoModelForMaskedLM,
        "image-classification": transformers.AutoModelForImageClassification,
    }
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = heads[preset["data"]["objective"]].from_config(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    times_s = []
    batches = images(preset, config) if preset["data"]["kind"] == "jpeg" else tokens(preset, config)
    for _ in range(steps):
        began_s = time.perf_counter()
        batch = {name: values.to(device, non_blocking=True) for name, values in next(batches).items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times_s.append(time.perf_counter() - began_s)
    median_s = statistics.median(times_s[warmup:])
    return {"samples_per_s": preset["knobs"]["batch_size"] / median_s, "steps": steps - warmup}


def tokens(preset: dict[str, Any], config: Any) -> Iterator[dict[str, Any]]:
    """Batches of random tokens; of a masked model 15 % of them are targets."""
    import torch

    knobs, objective = preset["knobs"], preset["data"]["objective"]
    shape = (knobs["batch_size"], knobs["seq_len"])
    while True:
        ids = torch.randint(5, config.vocab_size, shape)
        labels = ids
        if objective == "masked-lm":
            labels = torch.where(torch.rand(shape) < 0.15, ids, -100)
        yield {"input_ids": ids, "labels": labels}


def images(preset: dict[str, Any], config: Any) -> Iterator[dict[str, Any]]:
    """Batches of JPEG files, each a random crop of 8 to 100 % of the picture, mirrored half of the time."""
    import numpy
    import torch
    from PIL import Image

    files = sorted(file for pattern in preset["data"]["paths"] for file in glob.glob(pattern))
    random = numpy.random.default_rng(0)
    size = config.image_size
    while True:
        pixels = []
        for file in random.choice(files, preset["knobs"]["batch_size"]):
            with Image.open(io.BytesIO(Path(file).read_bytes())) as picture:
                side = int(min(picture.size) * random.uniform(0.08, 1.0) ** 0.5)
                left, top = (int(random.integers(length - side + 1)) for length in picture.size)
                box = (left, top, left + side, top + side)
                crop = picture.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box)
            if random.random() < 0.5:
                crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            pixels.append((numpy.asarray(crop, dtype=numpy.float32) / 255 - 0.5) / 0.5)
        values = numpy.ascontiguousarray(numpy.stack(pixels).transpose(0, 3, 1, 2))
        labels = torch.zeros(len(pixels), dtype=torch.long)
        yield {"pixel_values": torch.from_numpy(values), "labels": labels}


if __name__ == "__main__":
    main()

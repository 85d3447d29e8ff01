"""Images that are really decoded, and text for an encoder and a decoder."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

VIT = {
    "family": "vit", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 8, "num_labels": 3,
}  # fmt: skip
T5 = {
    "family": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2,
    "vocab_size": 1024, "dropout_rate": 0.0,
}  # fmt: skip
JPEG = {"kind": "jpeg", "objective": "image-classification"}
VISION = {"model": VIT, "data": JPEG, "batch_size": 8, "lr": 1e-3, "steps": 5}


@pytest.fixture(scope="module")
def image_paths(tmp_path_factory):
    """Twelve small files of noise in two folders."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for kind in ("cats", "dogs"):
        (folder / kind).mkdir()
        for number in range(6):
            pixels = random.integers(0, 256, (40, 50 + number, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / kind / f"{number}.jpg")
    return sorted(str(path) for path in folder.rglob("*.jpg"))


def test_workers_and_ranks_see_the_same_images(train, image_paths):
    data = {**JPEG, "paths": image_paths}
    alone = train(**{**VISION, "data": data})
    assert alone.code == 0, alone.stderr
    helped = train(**{**VISION, "data": data}, workers=2)
    assert (helped.record("actual")["loader_workers_alive"], helped.losses()) == (2, alone.losses())
    both = train(**{**VISION, "data": data, "batch_size": 4}, ranks=2, strategy="ddp")
    assert both.losses() == pytest.approx(alone.losses(), rel=1e-4)
    text = alone.record("data")
    assert (text["synthetic"], text["samples"]) == (False, 12)
    # 16 patches and the class token a sample.
    assert [step["tokens"] for step in alone.steps()] == [8 * 17] * 5


def test_more_folders_than_classes_are_refused(train, image_paths):
    refused = train(**{**VISION, "model": {**VIT, "num_labels": 1}, "data": {**JPEG, "paths": image_paths}})
    assert (refused.code, refused.record("invalid")["key"]) == (2, "model.num_labels")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_named_in_one_line(train, tmp_path, workers):
    image = tmp_path / "cats" / "0.jpg"
    image.parent.mkdir()
    image.write_bytes(b"no image")
    refused = train(**{**VISION, "data": {**JPEG, "paths": [str(image)]}}, workers=workers)
    assert refused.code == 2
    invalid = refused.record("invalid")
    assert invalid["key"] == "data.paths"
    assert invalid["message"].startswith(f"{image}: cannot identify image file")
    assert "\n" not in invalid["message"]


@pytest.mark.ci
def test_a_crop_depends_on_seed_index_and_epoch_alone(image_paths):
    from trainfast_runner.worker.data.samples import image_samples

    config = SimpleNamespace(model_type="vit", image_size=16, num_channels=3, num_labels=2)
    samples, others = (image_samples(image_paths, config, seed, Path(), print) for seed in (3, 4))
    first, other = samples.__getitems__([2, 7]), samples.__getitems__([7, 2])
    assert first["pixel_values"].shape == (2, 3, 16, 16)
    assert torch.equal(first["pixel_values"], other["pixel_values"].flip(0))
    assert first["labels"].tolist() == [0, 1]
    assert first["pixel_values"].abs().max() <= 1
    next_epoch = samples.__getitems__([2 + len(samples)])
    assert not torch.equal(next_epoch["pixel_values"][0], first["pixel_values"][0])
    assert next_epoch["labels"].tolist() == [0]
    assert not torch.equal(others.__getitems__([2])["pixel_values"][0], first["pixel_values"][0])


@pytest.mark.ci
def test_images_are_drawn_alike_and_once(tmp_path, monkeypatch):
    from trainfast_runner.worker.data import samples as images

    monkeypatch.setattr(images, "IMAGE_COUNT", 12)
    notices = []
    config = SimpleNamespace(model_type="vit", image_size=16, num_channels=3, num_labels=1000)
    drawn = images.image_samples([], config, 0, tmp_path, notices.append)
    assert drawn.synthetic
    assert [path.read_bytes()[:3] for path in drawn.paths] == [b"\xff\xd8\xff"] * 12
    assert sorted(set(drawn.classes.tolist())) == list(range(10))
    assert images.drawn_images(tmp_path, notices.append)[0] == drawn.paths
    assert notices == ["drawing 12 JPEG files of 320x240, once"]
    assert images.draw_image(5).tobytes() == images.draw_image(5).tobytes()
    # Too smooth an image would cost nothing to decode.
    assert sum(path.stat().st_size for path in drawn.paths) / 12 > 15_000


@pytest.mark.ci
def test_an_encoder_decoder_learns_the_second_half(train):
    run = train(model=T5, data={"objective": "seq2seq"}, lr=3e-2, steps=12)
    assert run.code == 0, run.stderr
    assert run.losses()[-1] < 0.9 * run.losses()[0]
    both = train(model=T5, data={"objective": "seq2seq"}, lr=3e-2, steps=12, ranks=2, strategy="ddp", batch_size=4)
    assert both.losses() == pytest.approx(run.losses(), rel=1e-4)


@pytest.mark.ci
def test_halves_of_a_row_and_the_shifted_input():
    from trainfast_runner.worker.data.samples import EncoderDecoderSplit

    batch = EncoderDecoderSplit(encoder_tokens=2, start_id=0)(np.array([[5, 6, 7, 8, 9]]))
    assert (batch["input_ids"].tolist(), batch["labels"].tolist()) == ([[5, 6]], [[7, 8, 9]])
    assert batch["decoder_input_ids"].tolist() == [[0, 7, 8]]


def test_a_model_of_any_size_trains_on_images(train, image_paths):
    resnet = {"family": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "num_labels": 2}
    run = train(**{**VISION, "model": resnet, "data": {**JPEG, "paths": image_paths}, "batch_size": 4, "steps": 4})
    assert run.code == 0, run.stderr
    assert run.steps()[0]["tokens"] == 0
    assert run.record("actual")["model_flops_per_sample"] is None

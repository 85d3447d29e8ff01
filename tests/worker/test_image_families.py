"""Every image classifier of transformers is traced at the size of the images that the loader makes for it."""

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
from worker_knobs import knob_values

from trainfast_runner.worker.data import samples as images
from trainfast_runner.worker.data.samples import image_samples
from trainfast_runner.worker.invalid import InvalidInput
from trainfast_runner.worker.memory_trace.step_timeline import read_request, trace_step
from trainfast_runner.worker.model.model_config import FREE_IMAGE_SIZE, image_shape, resolve_config, tokens_per_sample

REFUSED = {
    "imagegpt": "by their input_ids",  # reads colour clusters as token ids
    "shieldgemma2": "by their input_ids",  # reads a policy's text beside the image
    "siglip2": "by their spatial_shapes",  # reads patches that its own processor has cut
    "dinat": "requires the natten library",
    "timm_wrapper": "requires the timm library",
}
"""Families that no bare configuration and no plain pixels will do for."""
SMALL = {
    "mobilenet_v1": {"image_size": 64},
    "mobilenet_v2": {"image_size": 64},
    "mobilevit": {"image_size": 64},
    "mobilevitv2": {"image_size": 64},
    "efficientnet": {"image_size": 64, "num_block_repeats": [1] * 7},
    "perceiver": {"num_self_attends_per_block": 1, "num_latents": 8, "d_latents": 64},
    "textnet": {"image_size": [64, 64]},
    "levit": {"depths": [1, 1, 1], "key_dim": [16, 16, 16]},
}


def small(family):
    """The family's configuration with a layer a stage, where its fields have such names."""
    config = CONFIG_MAPPING[family]()
    fields = {"depths": [1] * len(config.depths)} if isinstance(getattr(config, "depths", None), list | tuple) else {}
    if isinstance(getattr(config, "num_hidden_layers", None), int) and "depths" not in fields:
        fields["num_hidden_layers"] = 1
    if hasattr(config, "vision_config"):
        fields = {"vision_config": {"num_hidden_layers": 1}}
    return {"family": family, **fields, **SMALL.get(family, {})}


def traced(model):
    knobs = knob_values(seq_len=256)
    about = {"part": "step", "model": model, "objective": "image-classification", "device": "cpu"}
    return trace_step(read_request({**about, "knobs": knobs}), 0)


PREDICTED = sorted(set(MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES) - set(REFUSED))
OF_EACH_KIND = ("resnet", "clip", "deit", "pp_lcnet")
"""No size of its own; a vision model inside; several classes for the head; a head whose scores have another name."""


@pytest.mark.parametrize(
    "family", [name if name in OF_EACH_KIND else pytest.param(name, marks=pytest.mark.long) for name in PREDICTED]
)
def test_an_image_family_is_predicted(family):
    assert traced(small(family))["segments"]


def test_a_family_without_a_size_is_predicted_at_the_size_of_its_data(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "IMAGE_COUNT", 12)
    config = resolve_config({"family": "resnet"})
    loaded = image_samples([], config, 0, tmp_path, lambda what: None)
    assert loaded.__getitems__([0])["pixel_values"].shape == (1, 3, FREE_IMAGE_SIZE, FREE_IMAGE_SIZE)
    assert image_shape(config) == (3, FREE_IMAGE_SIZE)
    assert tokens_per_sample(config, "image-classification", 256) == 0
    with pytest.raises(InvalidInput, match="reads images of 64 x 32, and the loader makes squares"):
        image_shape(resolve_config({"family": "textnet", "image_size": [64, 32]}))


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_an_image_family_that_needs_more_says_so(family):
    with pytest.raises(InvalidInput, match=REFUSED[family]):
        traced({"family": family})

"""Facts about a training Python and a model, before a launch, and configurations that make no model."""

import importlib.metadata
import os
import sys
from contextlib import closing

import pytest
import torch
from worker_knobs import worker_knobs

from trainfast_runner.machine.warm_python import WarmPythons
from trainfast_runner.worker.invalid import InvalidInput
from trainfast_runner.worker.model.build import build_model
from trainfast_runner.worker.model.inspection import inspect
from trainfast_runner.worker.model.model_config import check_family, check_seq_len, resolve_config

UNTAGGED_CPU = "__version__ = '2.13.0'\ncuda: str | None = None\nhip: str | None = None\n"
UNTAGGED_CUDA = "__version__ = '2.13.0'\ncuda = '13.0'\nhip = None\n"
ROCM = "__version__ = '2.13.0+rocm7.0'\ncuda = None\nhip = '7.0.51831'\n"


def ask(model, objective, folder=None):
    """The answer of a Python that finds packages in the folder first."""
    environment = os.environ if folder is None else {**os.environ, "PYTHONPATH": str(folder)}
    request = {"part": "inspect", "model": model, "objective": objective, "count": False, "attention": False}
    with closing(WarmPythons()) as warm:
        return next(warm.ask_each(sys.executable, [request], environment=environment))


def test_versions_fields_overrides_and_the_models_own_count():
    answer = ask({"family": "bert", "hidden_size": 96}, "masked-lm")
    assert answer["versions"]["torch"]
    assert answer["versions"]["transformers"]
    assert (answer["config"]["hidden_size"], answer["config"]["num_hidden_layers"]) == (96, 12)
    assert "error" not in answer
    answer = inspect("inspect", {"family": "gpt2"}, "causal-lm", count=True, attention=False)
    assert answer["parameters"] == 124_439_808
    found = ask({}, "")["versions"]
    assert (found["torch"], found["torch.version.cuda"]) == (importlib.metadata.version("torch"), torch.version.cuda)
    assert found["torch.version.hip"] == torch.version.hip
    assert (found["torch.version.cuda"] is not None) == torch.backends.cuda.is_built()


@pytest.mark.parametrize(
    ("file", "cuda", "hip"),
    [(UNTAGGED_CPU, None, None), (UNTAGGED_CUDA, "13.0", None), (ROCM, None, "7.0.51831"), ("", None, None)],
)
def test_rocm_and_untagged_builds_are_distinguished(tmp_path, file, cuda, hip):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('torch is not imported for this')\n")
    (package / "version.py").write_text(file)
    found = ask({}, "", tmp_path)["versions"]
    assert (found["torch.version.cuda"], found["torch.version.hip"]) == (cuda, hip)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [("llama", "num_hidden_layers", 0), ("llama", "vocab_size", -1), ("gpt2", "n_layer", -3), ("gpt2", "n_embd", 0)],
)
def test_a_size_below_one_is_no_model(family, field, value):
    with pytest.raises(InvalidInput, match=f"{field}={value}: a size of {family} is at least 1") as refused:
        resolve_config({"family": family, field: value})
    assert refused.value.key == f"model.{field}"


@pytest.mark.parametrize(
    ("model", "field", "most"),
    [
        ({"family": "llama", "num_hidden_layers": 10**9}, "num_hidden_layers", 2_000),
        ({"family": "gpt2", "n_embd": 10**12}, "n_embd", 2**31 - 1),
        ({"family": "swin", "depths": [2, 10**9]}, "depths", 2_000),
        ({"family": "mixtral", "num_local_experts": 10**6}, "num_local_experts", 2_000),
    ],
)
def test_f07_a_size_beyond_every_model_is_refused_with_the_largest_allowed(model, field, most):
    with pytest.raises(InvalidInput, match=f"{field}=[0-9,]+ is too large") as refused:
        resolve_config(model)
    assert (refused.value.key, refused.value.allowed) == (f"model.{field}", [f"at most {most:,}"])


def test_f07_a_stored_configuration_has_the_same_bounds_and_labels_count_no_parts(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "num_hidden_layers": 1000000000}')
    with pytest.raises(InvalidInput, match=r"config.json.num_hidden_layers=1,000,000,000 is too large"):
        resolve_config({"path": str(tmp_path)})
    stored = '{"model_type": "vit", "id2label": {"0": "a"}, "label2id": {"ballplayer, baseball player": 9000}}'
    (tmp_path / "config.json").write_text(stored)
    assert resolve_config({"path": str(tmp_path)}).model_type == "vit"
    assert resolve_config({"family": "switch_transformers", "expert_capacity": 4096}).expert_capacity == 4096


def test_positions_without_an_end_limit_no_sequence_and_others_each_half_of_a_seq2seq_sample():
    check_seq_len(resolve_config({"family": "xlnet"}), "causal-lm", 100_000)
    with pytest.raises(InvalidInput, match="seq_len=100000 needs 100000 positions, and the model has 1024"):
        check_seq_len(resolve_config({"family": "gpt2"}), "causal-lm", 100_000)
    config = resolve_config({"family": "bart", "max_position_embeddings": 64})
    check_seq_len(config, "seq2seq", 128)
    with pytest.raises(InvalidInput, match="seq_len=130 needs 65 positions, and the model has 64") as refused:
        check_seq_len(config, "seq2seq", 130)
    assert refused.value.nearest == "128"


def test_a_family_without_this_head_or_attention_says_which_it_has():
    config = resolve_config({"family": "deberta-v2"})
    with pytest.raises(InvalidInput, match="deberta-v2 has no causal-lm head") as refused:
        build_model(config, "causal-lm", worker_knobs(attention="eager"), torch.device("cpu"))
    assert (refused.value.key, refused.value.allowed) == ("data.objective", ["masked-lm", "sequence-classification"])
    config = resolve_config({"family": "xlnet", "n_layer": 1, "d_model": 16, "n_head": 2, "d_inner": 16})
    with pytest.raises(InvalidInput, match="xlnet has no attention=sdpa") as refused:
        build_model(config, "causal-lm", worker_knobs(attention="sdpa"), torch.device("meta"))
    assert refused.value.nearest == "auto"


OTHER_KINDS = [
    ("whisper", "seq2seq"), ("whisper", "causal-lm"), ("wav2vec2", "causal-lm"), ("qwen2_audio", "seq2seq"),
    ("musicgen", "causal-lm"), ("encodec", "masked-lm"), ("llava", "causal-lm"), ("blip-2", "seq2seq"),
    ("detr", "image-classification"), ("sam", "image-classification"), ("videomae", "image-classification"),
    ("vit_mae", "image-classification"), ("patchtst", "causal-lm"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "objective"), OTHER_KINDS)
def test_kind_l_a_family_of_another_kind_is_refused(family, objective):
    with pytest.raises(InvalidInput, match=f"^{family} is not supported; text models ") as refused:
        check_family(resolve_config({"family": family}), objective)
    assert refused.value.nearest is None, "no advice that leads astray"
    assert refused.value.allowed == []


def test_kind_l_a_diffusion_pipeline_is_refused_by_its_kind(tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(InvalidInput, match="diffusion models are not supported"):
        resolve_config({"path": str(tmp_path)})

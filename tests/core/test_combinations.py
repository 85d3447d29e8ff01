"""Settings that cannot work on this machine are refused before launch, both sides named."""

from dataclasses import replace

import pytest

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import Machine
from trainfast_runner.machine.gpus.visible import visible_devices
from trainfast_runner.records.tick import DeviceReading
from trainfast_runner.settings import device_counts
from trainfast_runner.settings.compatibility.check import check
from trainfast_runner.settings.compatibility.facts import Facts
from trainfast_runner.settings.spec import resolve

GIB = 2**30


def gpu(index: int, free_gib: int = 20, capability: str = "8.6") -> DeviceReading:
    return DeviceReading(
        index=index, uuid=f"GPU-{index}", name="Card", memory_free_bytes=free_gib * GIB, compute_capability=capability
    )


CPU = Machine(device="cpu", gpus=(), nvml_gpus=(), cores=2, no_gpu_reason="no driver")
TWO = Machine(device="cuda", gpus=(gpu(0, 10), gpu(1, 20)), nvml_gpus=(gpu(0), gpu(1)), cores=8)
OLD = replace(TWO, gpus=(gpu(0, capability="7.0"),), nvml_gpus=(gpu(0),))
WATCHED = replace(CPU, nvml_gpus=(gpu(0), gpu(1)))


def facts(where: Machine, *settings: str, preset: str = "tiny-llama", **config: object) -> Facts:
    spec = resolve(preset, settings)
    return Facts(spec, where.used_by(spec.knobs["devices"]), config, {"bitsandbytes": None}, "/env/bin/python")


def test_a_kernel_that_the_model_has_not_is_refused_before_launch() -> None:
    asked = replace(
        facts(CPU, "attention=sdpa", model_type="gemma2", vocab_size=4096), attentions=("auto", "eager", "flash")
    )
    with pytest.raises(UserError, match="gemma2 has no attention=sdpa") as refused:
        check(asked)
    assert refused.value.key == "attention"
    assert refused.value.advice == "attention=auto, which takes eager"
    check(replace(asked, spec=resolve("tiny-llama", ["attention=eager"])))


@pytest.mark.parametrize(
    ("where", "settings", "key", "expected"),
    [
        (CPU, ["steps=3"], "timing_warmup", "leaves no step of steps=3"),
        (CPU, ["tp_degree=4"], "tp_degree", "does nothing with strategy=single"),
        (CPU, ["devices=2"], "strategy", "strategy=single trains on one device and devices=2"),
        (CPU, ["strategy=ddp", "devices=9"], "devices", "at most 8 processes on a CPU"),
        (CPU, ["devices=0+1"], "devices", "names GPUs and a run here has none (no driver)"),
        (CPU, ["watch=0"], "watch", "there is no GPU 0 and no other one here"),
        (CPU, ["precision=tf32"], "precision", "tensor cores"),
        (CPU, ["optimizer=adamw-8bit"], "optimizer", "/env/bin/python -m pip install bitsandbytes"),
        (CPU, ["memory_limit=1GiB+2GiB"], "memory_limit", "names 2 ranks and the run has 1"),
        (TWO, ["strategy=ddp", "devices=4"], "devices", "devices=4, but there are 2"),
        (TWO, ["strategy=ddp", "devices=0+2"], "devices", "there is no GPU 2"),
        (CPU, ["optimizer=paged-adamw-8bit"], "optimizer", "optimizer=paged-adamw-8bit"),
        (CPU, ["attention=flash"], "attention", "attention=sdpa"),
        (TWO, ["attention=flash"], "attention", "/env/bin/python -m pip install flash-attn"),
        (CPU, ["engine=trainer"], "engine", "/env/bin/python -m pip install accelerate"),
        (OLD, ["precision=bf16"], "precision", "compute capability 8.0"),
        (OLD, ["precision=tf32"], "precision", "has 7.0"),
    ],
)
def test_what_cannot_work_is_refused(where: Machine, settings: list[str], key: str, expected: str) -> None:
    with pytest.raises(UserError) as refused:
        check(facts(where, *settings))
    assert refused.value.key == key
    assert expected in refused.value.line()


@pytest.mark.parametrize(
    ("where", "settings"),
    [
        (CPU, []),
        (CPU, ["strategy=ddp", "devices=2", "memory_limit=1GiB+2GiB"]),
        (CPU, ["precision=bf16"]),
        (TWO, ["precision=bf16"]),
        (TWO, ["strategy=ddp"]),
        (TWO, ["strategy=ddp", "p2p=off"]),
        (TWO, ["strategy=dp", "p2p=off"]),
        (WATCHED, ["watch=0+1"]),
    ],
)
def test_what_works_is_let_through(where: Machine, settings: list[str]) -> None:
    check(facts(where, *settings))


@pytest.mark.parametrize(
    "config",
    [
        {"max_position_embeddings": 64},
        {"max_position_embeddings": 64, "rope_theta": 10000.0},
        {"text_config": {"max_position_embeddings": 64}},
    ],
)
def test_a_sequence_beyond_the_models_positions_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"model\.max_position_embeddings=64") as refused:
        check(facts(CPU, **config))
    assert refused.value.as_json()["nearest"] == "seq_len=64, or model.max_position_embeddings=128"


def test_each_half_of_a_seq2seq_sample_needs_positions_and_relative_ones_have_no_end() -> None:
    seq2seq = "data.objective=seq2seq"
    check(facts(CPU, seq2seq, "seq_len=128", max_position_embeddings=64))
    with pytest.raises(UserError, match="seq_len=130") as refused:
        check(facts(CPU, seq2seq, "seq_len=130", max_position_embeddings=64))
    assert refused.value.as_json()["nearest"] == "seq_len=128, or model.max_position_embeddings=65"
    check(facts(CPU, seq2seq, "seq_len=1024", n_positions=512, relative_attention_num_buckets=32))


def test_a_vocabulary_too_small_for_bytes_is_refused_where_a_tokenizer_is_trained() -> None:
    with pytest.raises(UserError, match="needs at least 300"):
        check(facts(CPU, vocab_size=5))
    check(facts(CPU, "data.kind=random", vocab_size=5))


@pytest.mark.parametrize("field", ["num_attention_heads", "n_head"])
def test_heads_that_do_not_divide_the_hidden_size_are_refused_by_the_name_of_their_field(field: str) -> None:
    with pytest.raises(UserError, match=rf"hidden size 64 is not divisible by model\.{field}=7") as refused:
        check(facts(CPU, hidden_size=64, **{field: 7}))
    assert refused.value.key == f"model.{field}"
    assert refused.value.as_json()["nearest"] == f"model.{field}=8"


def test_single_takes_the_gpu_with_most_free_memory_and_ddp_all() -> None:
    assert [one.index for one in TWO.default_gpus("single").gpus] == [1]
    assert [one.index for one in TWO.default_gpus("ddp").gpus] == [0, 1]
    assert [one.index for one in TWO.named_or_counted_gpus("0+").gpus] == [0]


@pytest.mark.parametrize(
    ("variable", "left"),
    [(None, [0, 1, 2]), ("", []), ("-1", []), ("2,0", [2, 0]), ("GPU-1", [1]), ("0,9,1", [0])],
)
def test_cuda_visible_devices_is_honoured(variable: str | None, left: list[int]) -> None:
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    found = visible_devices([gpu(0), gpu(1), gpu(2)], environment, cuda_order=list)
    assert [one.index for one in found] == left


def test_the_global_batch_counts_data_parallel_ranks() -> None:
    spec = resolve("tiny-llama", ["batch_size=4", "grad_accum=2", "strategy=ddp"])
    assert device_counts.global_batch(spec.knobs, 2) == 16
    assert device_counts.global_batch({**spec.knobs, "strategy": "single"}, 1) == 8


LLAMA = {"model_type": "llama", "vocab_size": 4096, "base_model_tp_plan": {"layers.*.self_attn.q_proj": "colwise"}}


@pytest.mark.parametrize(
    ("where", "settings", "config", "key", "expected"),
    [
        (CPU, ["strategy=dp"], {}, "strategy", "two or more GPUs from one process, and a run here has none"),
        (CPU, ["strategy=naive-mp"], {}, "strategy", "try strategy=pp"),
        (OLD, ["strategy=dp"], {}, "devices", "and devices=auto is one"),
        (CPU, ["strategy=fsdp", "optimizer=adafactor"], {}, "optimizer", "reads whole matrices"),
        (CPU, ["strategy=tp"], {"model_type": "t5"}, "strategy", "has no plan for t5"),
        (
            CPU,
            ["strategy=fsdp+tp"],
            {**LLAMA, "base_model_tp_plan": {"a": "local"}},
            "strategy",
            "cuts layers as local, which is not done here",
        ),
        (CPU, ["strategy=tp"], {**LLAMA, "num_attention_heads": 3}, "tp_degree", "does not divide the model's 3 heads"),
        (
            CPU,
            ["strategy=tp", "tp_degree=4"],
            {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2},
            "tp_degree",
            "does not divide the model's 2 key-value heads",
        ),
        (CPU, ["strategy=tp", "devices=4"], LLAMA, "devices", "try devices=2, or tp_degree=4"),
        (CPU, ["strategy=ddp+tp", "devices=3"], LLAMA, "devices", "needs a multiple of 2 devices, at least 4"),
        (CPU, ["strategy=fsdp+tp", "devices=2"], LLAMA, "devices", "strategy=tp with devices=2"),
        (CPU, ["reshard=off", "strategy=ddp"], {}, "reshard", "does nothing with strategy=ddp"),
        (TWO, ["p2p=off"], {}, "p2p", "p2p=off does nothing with strategy=single"),
        (TWO, ["p2p=off", "strategy=naive-mp"], {}, "p2p", "try p2p=on, or strategy=pp with p2p=off"),
        (CPU, ["p2p=off", "strategy=ddp"], {}, "p2p", "this run is on the CPU; try p2p=on"),
    ],
)
def test_what_a_sharded_model_cannot_do_is_refused(
    where: Machine, settings: list[str], config: dict[str, object], key: str, expected: str
) -> None:
    with pytest.raises(UserError) as refused:
        check(Facts(resolve("tiny-llama", settings), where, config, {"bitsandbytes": "0.49"}, "python"))
    assert refused.value.key == key
    assert expected in refused.value.line()


@pytest.mark.parametrize(
    ("where", "settings", "processes", "devices", "global_batch"),
    [
        (CPU, ["strategy=tp"], 2, 2, 8),
        (CPU, ["strategy=tp", "tp_degree=4"], 4, 4, 8),
        (CPU, ["strategy=ddp+tp"], 4, 4, 16),
        (CPU, ["strategy=fsdp+tp", "devices=8"], 8, 8, 32),
        (CPU, ["strategy=fsdp"], 2, 2, 16),
        (TWO, ["strategy=tp"], 2, 2, 8),
        (TWO, ["strategy=dp"], 1, 2, 16),
        (TWO, ["strategy=naive-mp"], 1, 2, 8),
    ],
)
def test_processes_devices_and_the_global_batch_are_distinguished(
    where: Machine, settings: list[str], processes: int, devices: int, global_batch: int
) -> None:
    asked = Facts(resolve("tiny-llama", settings), where, LLAMA, {}, "python")
    check(asked)
    assert (asked.rank_count, asked.device_count) == (processes, devices)
    assert device_counts.global_batch(asked.knobs, asked.device_count) == global_batch


@pytest.mark.parametrize(
    ("settings", "key", "expected"),
    [
        (["engine=trainer", "strategy=fsdp"], "engine", "not strategy=fsdp"),
        (["engine=accelerate", "strategy=fsdp"], "engine", "not strategy=fsdp"),
        (["engine=accelerate", "precision=fp16"], "precision", "silently trains in fp32"),
        (["engine=trainer", "compile=default"], "compile", "compile=default with engine=native"),
        (["compile=default", "strategy=fsdp", "devices=2"], "compile", "compile=default with strategy=ddp"),
        (["optimizer=paged-adamw-8bit"], "optimizer", "optimizer=adamw-8bit"),
    ],
)
def test_techniques_that_would_do_something_else_are_refused(settings: list[str], key: str, expected: str) -> None:
    asked = facts(CPU, *settings)
    with pytest.raises(UserError) as refused:
        check(replace(asked, versions={"accelerate": "1", "bitsandbytes": "1"}))
    assert refused.value.key == key
    assert expected in refused.value.line()


def test_compiling_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"PATH has no g\+\+; install with: apt-get install g\+\+; try compile=off"):
        check(facts(CPU, "compile=default"))


BERT_CONFIG = {"model_type": "bert", "vocab_size": 1000, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        (LLAMA, ["data.kind=random"], "samples of data.kind=random are all of one length"),
        (
            BERT_CONFIG,
            ["data.objective=masked-lm", "strategy=pp", "devices=2"],
            "data.objective=masked-lm needs a padding mask, and strategy=pp passes none on",
        ),
        ({**BERT_CONFIG, "is_encoder_decoder": True}, ["data.objective=seq2seq"], "cuts packed samples in two halves"),
    ],
)
def test_samples_of_varying_length_where_they_cannot_be_are_refused(
    config: dict[str, object], settings: list[str], expected: str
) -> None:
    settings = [*settings, "data.samples=lines"]
    with pytest.raises(UserError) as refused:
        check(Facts(resolve("tiny-llama", settings), CPU, config, {}, "python"))
    assert refused.value.key == "data.samples"
    assert expected in refused.value.line()
    causal = ["data.samples=lines", "strategy=pp", "devices=2"]
    check(Facts(resolve("tiny-llama", causal), CPU, LLAMA, {}, "python"))

"""The advice: which strategy for which model on which machine, and what else there is to say."""

import pytest

from trainfast_runner.machine import cpu
from trainfast_runner.machine.devices import Machine
from trainfast_runner.machine.telemetry.topology import Interconnect
from trainfast_runner.memory.headroom import ModelSize, bytes_per_parameter, model_size, state_bytes
from trainfast_runner.records.tick import DeviceReading
from trainfast_runner.search.advice import Situation, advise
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.spec import resolve

GIB = 2**30
CPU = Machine(device="cpu", gpus=(), nvml_gpus=(), cores=2)
SMALL = ModelSize(355_000_000, 51_000_000)
LARGE = ModelSize(8_030_000_000, 525_000_000)
HUGE_LAYER = ModelSize(60_000_000_000, 6_000_000_000)
HUGE = ModelSize(405_000_000_000, 3_200_000_000)
ALL_NVLINK = Interconnect(islands=((0, 1, 2, 3),), slowest="NV18")
TWO_ISLANDS = Interconnect(islands=((0, 1), (2, 3)), slowest="SYS")
ONLY_PCIE = Interconnect(islands=((0,), (1,), (2,), (3,)), slowest="PHB")


def gpus(count, gib=24):
    found = tuple(
        DeviceReading(index=index, uuid=f"GPU-{index}", name="Card", memory_total_bytes=gib * GIB)
        for index in range(count)
    )
    return Machine(device="cuda", gpus=found, nvml_gpus=found, cores=8)


def advice_on(machine, situation, *settings, preset="tiny-llama"):
    spec = resolve(preset, settings)
    return {one.knob: one for one in advise(spec, resolve(preset).knobs, machine, situation)}


@pytest.mark.parametrize(
    ("machine", "size", "links", "value", "expected"),
    [
        (CPU, SMALL, None, "single", "on a CPU the processes of other strategies share its 2 cores"),
        (gpus(1), SMALL, None, "single", "DeepSpeed only slows a model that already fits"),
        (gpus(4), SMALL, ONLY_PCIE, "ddp", "exchanges gradients only"),
        (gpus(4, 80), LARGE, ALL_NVLINK, "fsdp", "about equal"),
        (gpus(4, 80), LARGE, ONLY_PCIE, "pp", "without NVLink pp beats tp and zero"),
        (gpus(4, 80), LARGE, TWO_ISLANDS, "pp", "tp stays within a group"),
        (gpus(4), HUGE_LAYER, ALL_NVLINK, "tp", "not even the largest layer fits one GPU"),
        (gpus(4), LARGE, ALL_NVLINK, "zero3-offload", "does not fit 4 GPUs together"),
        (gpus(4), HUGE, ALL_NVLINK, "zero3-offload", "= 6,789.3 GiB of weights"),
        (gpus(1, 24), ModelSize(3_000_000_000, 200_000_000), None, "zero2-offload", "checkpointing=full"),
    ],
)
def test_the_decision_tree(machine, size, links, value, expected):
    advice = advice_on(machine, Situation(size=size, links=links), "precision=bf16")["strategy"]
    assert advice.value == value
    assert expected in advice.text
    assert advice.text.startswith(value) or machine.device == "cpu"
    if machine.device == "cuda" and value != "tp":
        assert "estimate: 18 bytes" in advice.text


def test_shapes_are_aligned_where_there_are_tensor_cores():
    situation = Situation(shapes={"hidden_size": 1020, "vocab_size": 50257})
    found = advice_on(gpus(1), situation, "batch_size=12", "seq_len=100")
    assert found["batch_size"].value == "8", "more than was chosen may not fit"
    assert found["seq_len"].value in ("96", "104")
    assert "model.vocab_size=50304 instead of 50257" in found["model"].text
    assert "model.hidden_size=1024 instead of 1020" in found["model"].text
    on_cpu = advice_on(CPU, situation, "batch_size=35", "precision=bf16")["batch_size"]
    assert on_cpu.text.startswith("32 instead of 35 where it is to train on a GPU:")
    assert set(advice_on(CPU, situation, "batch_size=8")) == {"strategy"}, "on a CPU in fp32 they cost nothing"


def test_every_value_advised_is_one_its_knob_takes():
    situation = Situation(size=LARGE, links=ALL_NVLINK, shapes={"vocab_size": 50257})
    for place in (CPU, gpus(1), gpus(4), gpus(4, 80)):
        advised = advise(
            resolve("tiny-llama", ["batch_size=12", "grad_accum=4", "seq_len=100"]),
            resolve("tiny-llama").knobs,
            place,
            situation,
        )
        values = [(one.knob, one.value) for one in advised if one.value is not None]
        assert values, f"nothing is advised for {place}"
        for name, value in values:
            knob = KNOBS_BY_NAME[name]
            assert knob.text_of(knob.read(value)) == value, f"{name}={value} is not what the knob would then show"


def test_accumulation_is_advised_against_and_the_linear_rule_for_another_global_batch():
    advice = advice_on(CPU, Situation(), "batch_size=8", "grad_accum=4")["grad_accum"]
    assert advice.value == "1"
    assert advice.text.startswith("Try 1 first: batch_size=32 with grad_accum=1")
    assert "lr" not in advice_on(CPU, Situation()), "nothing has changed"
    assert "lr" not in advice_on(CPU, Situation(), "batch_size=4", "grad_accum=2"), "the global batch is the same"
    advice = advice_on(CPU, Situation(), "batch_size=16", "grad_accum=2")["lr"]
    assert advice.value == "0.004"
    assert "32, 4 x the preset's 8" in advice.text
    half = advice_on(CPU, Situation(), "batch_size=4")["lr"]
    assert half.value == "0.0005"
    ddp = advice_on(CPU, Situation(), "strategy=ddp", "devices=2")["lr"]
    assert ddp.value == "0.002"
    assert "dp divides one batch among the GPUs" in ddp.text


def test_bytes_a_parameter_are_the_guides_and_parameters_follow_from_a_configuration():
    rules = {
        ("bf16", "adamw"): 18,
        ("fp32", "adamw"): 16,
        ("fp32", "adamw-8bit"): 10,
        ("bf16-pure", "adamw"): 8,
        ("fp32", "sgd"): 8,
    }
    assert {names: bytes_per_parameter(*names) for names in rules} == rules
    size, billion = ModelSize(10**9, 10**8), 10**9
    assert state_bytes(size, "ddp", 4, "bf16", "adamw") == 18 * billion
    assert state_bytes(size, "zero3", 4, "bf16", "adamw") == 4 * 10**8 + 18 * billion // 4
    gpt2_medium = {"n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 1024}
    size = model_size({**gpt2_medium, "vocab_size": 50257, "tie_word_embeddings": True})
    assert size.parameters == pytest.approx(354_823_168, rel=0.01)
    assert model_size({"model_type": "unheard-of"}) is None


def test_fp16_that_the_cpu_does_not_have_is_named(tmp_path, monkeypatch):
    flags = tmp_path / "cpuinfo"
    monkeypatch.setattr(cpu, "CPU_INFO", flags)
    monkeypatch.setattr(cpu, "_cpu_info", cpu._cpu_info.__wrapped__)
    flags.write_text("flags: avx512f\n")
    advice = advice_on(CPU, Situation(), "precision=fp16")["precision"]
    assert advice.value == "bf16"
    assert "tens of times slower than fp32" in advice.text
    assert "precision" not in advice_on(gpus(1), Situation(), "precision=fp16")
    flags.write_text("flags: avx512f avx512_fp16\n")
    assert "precision" not in advice_on(CPU, Situation(), "precision=fp16")

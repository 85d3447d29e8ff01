"""Levers before launch: each is refused by name where it cannot work, and named in the words of other tools."""

import sys
from dataclasses import replace

import pytest
from test_combinations import CPU, INSTALLED, LLAMA, TWO, facts, gpu, refusal

from on_disk import run_file
from trainfast_runner.errors import UserError
from trainfast_runner.export.formats import export_run
from trainfast_runner.machine.calibration import peak_of
from trainfast_runner.memory.corrections import NOT_TRACED, correction_key
from trainfast_runner.memory.tracing import request_fields
from trainfast_runner.records.worker_lines import ActualLine
from trainfast_runner.results.verdict import first_difference
from trainfast_runner.running.planning import allocator_variables
from trainfast_runner.settings.compatibility import check, refused_values
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, compile_mode, defaults, trainer_fields
from trainfast_runner.settings.spec import resolve
from trainfast_runner.worker.catalog import LEVERS
from trainfast_runner.worker.model.inspection import liger_families

HOPPER = replace(TWO, gpus=(gpu(0, capability="9.0"),), nvml_gpus=(gpu(0, capability="9.0"),))
HOPPERS = replace(TWO, gpus=tuple(gpu(index, capability="9.0") for index in range(2)))
EVERYTHING = {**INSTALLED, "liger-kernel": "0.8.5", "flash-attn": "2.8", "flash_attn_3": "3.0", "torchao": "0.18"}
EVERYTHING |= {"torch": "2.13.0+cu130", "transformers": "5.23.0"}
FP8, FLASH_3 = "precision=fp8", "attention=flash-3 precision=bf16"
BF16, GPT2 = "precision=bf16", LLAMA | {"model_type": "gpt2"}


@pytest.mark.parametrize(
    ("settings", "where", "config", "expected"),
    [
        ("compile=reduce-overhead", CPU, {}, "replays CUDA graphs, and this run is on the CPU; try compile=off"),
        ("compile=blocks strategy=tp devices=2", CPU, LLAMA, "works with strategy single, ddp, fsdp, not with strat"),
        ("compile=blocks engine=trainer", CPU, {}, "engine=trainer does not take compile=blocks"),
        ("compile=default strategy=fsdp devices=2", CPU, {}, "try compile=blocks, compile=off, or"),
        ("attention=sdpa-cudnn", CPU, {}, "is a GPU kernel, and this run is on the CPU; try attention=sdpa"),
        ("attention=sdpa-efficient", CPU, {}, "is a GPU kernel, and this run is on the CPU"),
        ("attention=sdpa-cudnn", HOPPER, {}, "attention=sdpa-cudnn has no kernel for precision=fp32"),
        ("attention=sdpa-flash", HOPPER, {}, "attention=sdpa-flash has no kernel for precision=fp32"),
        (f"attention=sdpa-flash {BF16} samples=padded", HOPPER, {}, "takes no mask, and samples=padded"),
        (FLASH_3, TWO, {}, "compute capability 9.0 or later and GPU 1, Card, has 8.6"),
        (FP8, CPU, {}, "is a format of NVIDIA tensor cores and this run is on the CPU; try precision=fp32"),
        (FP8, TWO, {}, "needs compute capability 8.9 or later and GPU 1, Card, has 8.6; try precision=bf16"),
        ("precision=fp8 strategy=tp", HOPPERS, LLAMA, "works with strategy single, ddp, fsdp, not with"),
        ("precision=fp8 engine=accelerate", HOPPER, LLAMA, "works with engine native, not with engine=accelerate"),
        ("kernels=liger", CPU, {}, "kernels=liger runs Triton kernels, and this run is on the CPU; try kernels=off"),
        ("kernels=liger", HOPPER, GPT2, "kernels=liger can do llama, qwen3, and the model is gpt2"),
        ("loss=liger", HOPPER, LLAMA | {"model_type": "cohere"}, "and the model is cohere; try loss=full"),
        ("loss=liger strategy=tp", HOPPERS, LLAMA, "loss=liger works with strategy single, ddp, fsdp"),
        ("allocator=expandable", CPU, {}, "sets the CUDA allocator, and this run is on the CPU; try allocator=default"),
    ],
)
def test_a_lever_is_refused_by_name_where_it_cannot_work(settings, where, config, expected):
    asked = replace(facts(settings, where, config, EVERYTHING), families={"liger-kernel": ("llama", "qwen3")})
    with pytest.raises(UserError) as refused:
        check(asked)
    assert expected in refused.value.line()


@pytest.mark.parametrize(
    ("settings", "package", "install"),
    [
        (FLASH_3, "flash_attn_3", "git+https://github.com/Dao-AILab/flash-attention#subdirectory=ho"),
        (f"attention=flash {BF16}", "flash-attn", "pip install flash-attn --no-build-isolation"),
        ("kernels=liger", "liger-kernel", "/env/bin/python -m pip install liger-kernel"),
        ("loss=liger", "liger-kernel", "/env/bin/python -m pip install liger-kernel"),
        (FP8, "torchao", "/env/bin/python -m pip install torchao"),
    ],
)
def test_a_missing_package_is_named_with_its_install_line(settings, package, install):
    refused = refusal(settings, HOPPER, LLAMA, versions={**EVERYTHING, package: None})
    assert install in refused.line()
    check(facts(settings, HOPPER, LLAMA, EVERYTHING))


def test_an_fp8_before_its_conversion_names_the_version_that_has_it():
    refused = refusal(FP8, HOPPER, LLAMA, versions={**EVERYTHING, "torchao": "0.6.1"}).line()
    assert "precision=fp8 needs torchao 0.7 or later, and /env/bin/python has 0.6.1; install with: " in refused
    assert "-m pip install 'torchao>=0.7'; try precision=bf16" in refused
    check(facts(FP8, HOPPER, LLAMA, {**EVERYTHING, "torchao": "0.7.0"}))


def test_a_search_tries_the_values_that_train_the_same_and_the_screen_hides_those_of_a_gpu():
    spec = resolve("tiny-llama", [])
    for name, entry in LEVERS.items():
        knob, hidden = KNOBS_BY_NAME[name], refused_values(name, spec, CPU)
        assert set(hidden) == {value.name for value in entry.values if value.needs_gpus_reason}
        assert all(entry[value].tolerance is not None for value in knob.search_values)
        assert knob.min_gpus == (1 if name in ("kernels", "allocator") else 0)
    assert "fp8" not in KNOBS_BY_NAME["precision"].search_values
    assert KNOBS_BY_NAME["precision"].needs_process("fp8")
    assert KNOBS_BY_NAME["kernels"].needs_process("liger")
    assert KNOBS_BY_NAME["allocator"].needs_process("expandable")


def test_each_lever_has_the_trainers_own_words():
    def fields(**knobs):
        return trainer_fields({**defaults(), **knobs})

    plain = fields()
    assert not {"torch_compile", "use_liger_kernel", "liger_kernel_config"} & set(plain)
    liger = fields(kernels="liger")
    assert liger["use_liger_kernel"] is True
    assert (liger["liger_kernel_config"]["rope"], liger["liger_kernel_config"]["fused_linear_cross_entropy"]) == (1, 0)
    fused = fields(loss="liger")["liger_kernel_config"]
    assert [name for name, is_on in fused.items() if is_on] == ["fused_linear_cross_entropy"]
    assert sum(fields(loss="liger", kernels="liger")["liger_kernel_config"].values()) == 6
    assert fields(compile="reduce-overhead")["torch_compile_mode"] == "reduce-overhead"
    assert fields(compile="reduce-overhead", grad_accum=2)["torch_compile_mode"] == "default"
    assert "torch_compile" not in fields(compile="blocks"), "TrainingArguments has no words for it"
    assert compile_mode({"compile": "blocks"}) == "default"


def exported(to, folder, env=(), **knobs):
    placed = {"device": "cuda", "world_size": 1, "device_uuids": ["GPU-0"], "env": dict(env)}
    of_run = {"model": {"family": "llama"}, "data": {"kind": "text", "objective": "causal-lm"}}
    return export_run(run_file(**of_run, **placed, knobs={**defaults(), "devices": 1, **knobs}), folder, to)


def test_exports_say_each_lever_or_that_they_cannot(tmp_path):
    expandable = {"env": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "allocator": "expandable"}
    for to in ("training-args", "torchrun", "accelerate"):
        export = exported(to, tmp_path, **expandable)
        assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in export.text
        assert export.left_out == ()
    assert "dynamo_use_regional_compilation: true" in exported("accelerate", tmp_path, compile="blocks").text
    for knobs in ({"compile": "blocks"}, {"loss": "chunked"}, {"checkpointing": "selective"}):
        assert exported("training-args", tmp_path, **knobs).left_out == tuple(knobs)
    flags = exported("torchrun", tmp_path, kernels="liger")
    assert flags.left_out == ()
    assert '"rms_norm": true' in flags.text
    with pytest.raises(UserError, match="no flag for precision=fp8"):
        exported("training-args", tmp_path, precision="fp8")
    fp8 = exported("accelerate", tmp_path, precision="fp8").text
    assert "mixed_precision: fp8" in fp8
    assert "backend: AO" in fp8


@pytest.mark.parametrize(
    ("torch", "own", "variables"),
    [
        ("2.13.0+cu130", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("2.8.1", {}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        (
            "2.11.0",
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:False"},
            dict.fromkeys(
                ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "max_split_size_mb:128,expandable_segments:True"
            ),
        ),
        (
            "2.11.0",
            {"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[256:1,>:4]"},
            {"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[256:1,>:4],expandable_segments:True"},
        ),
    ],
)
def test_the_allocators_setting_stands_beside_the_users_own(torch, own, variables):
    assert allocator_variables(["expandable_segments:True"], {"torch": torch}, own) == variables
    assert allocator_variables([], {"torch": torch}, own) == {}


def test_what_ran_is_compared_with_what_was_asked():
    def difference(ran, **knobs):
        line = ActualLine(t_ns=1, device="cuda", **ran)
        run = run_file(device="cuda", knobs={**defaults(), **knobs})
        return first_difference(run, {0: [line]})

    assert difference({"attention_kernel": "sdpa-math"}) is None, "auto takes any"
    assert "attention: asked for sdpa-cudnn" in difference({"attention_kernel": "sdpa-math"}, attention="sdpa-cudnn")
    assert "kernels: asked for liger" in difference({"kernels": "off"}, kernels="liger")
    assert "allocator: asked for expandable" in difference({"allocator": "default"}, allocator="expandable")
    assert difference({"allocator": "expandable"}) is None, "the user's own setting"
    assert "loss: asked for liger" in difference({"loss_function": "chunked"}, loss="liger")
    blocks = {"compiled": True, "compiled_blocks": 0}
    assert "compile=blocks (compiled_blocks): asked for True" in difference(blocks, compile="blocks")
    assert difference({**blocks, "compiled_blocks": 12}, compile="blocks") is None
    assert "precision=fp8 (float8_layers): asked for True" in difference({"float8_layers": 0}, precision="fp8")


def test_memory_that_no_trace_shows_is_named_and_a_peak_of_no_sheet_absent():
    texts = {name: text for name, values, text in NOT_TRACED if {"liger", "blocks", "fp8"} & set(values)}
    assert set(texts) == {"loss", "kernels", "compile", "precision"}
    knobs = {**defaults(), "kernels": "liger"}
    assert correction_key("t", defaults(), 1) == "t/single/native/off/1"
    assert correction_key("t", knobs, 1) == "t/single/native/off/kernels=liger/1"
    step, _ = request_fields(resolve("tiny-llama", ["loss=liger", "precision=fp8", "kernels=liger"]), "cuda")
    assert (step["knobs"]["loss"], step["knobs"]["precision"]) == ("chunked", "bf16")
    assert not {"kernels", "allocator"} & set(step["knobs"])
    assert peak_of("NVIDIA H100 80GB HBM3").of("bf16")
    assert peak_of("NVIDIA H100 80GB HBM3").of("fp8") is None


def test_ligers_model_types_are_read_without_importing_it(tmp_path, monkeypatch):
    assert liger_families() == [], "it is not installed here"
    package = tmp_path / "liger_kernel"
    (package / "transformers").mkdir(parents=True)
    (package / "__init__.py").write_text("import triton_that_is_not_here")
    table = 'import nothing\n\nMODEL_TYPE_TO_APPLY_LIGER_FN = {\n    "llama": f,\n    "qwen3": g,\n}\n\nx = {\n}\n'
    (package / "transformers" / "monkey_patch.py").write_text(table)
    monkeypatch.syspath_prepend(tmp_path)
    assert liger_families() == ["llama", "qwen3"]
    assert "liger_kernel" not in sys.modules
    (package / "transformers" / "monkey_patch.py").write_text("MODEL_TYPES = 1\n")
    assert liger_families() == []

"""Settings that cannot work on this machine are refused before launch, both sides named, with settings that can.

Those that a machine without GPUs refuses stand in tests/cli/transcripts/settings.txt.
"""

import os
from dataclasses import replace

import pytest

from on_disk import result
from trainfast_runner.errors import UserError
from trainfast_runner.machine import cpu, training_python
from trainfast_runner.machine.devices import Machine
from trainfast_runner.memory.headroom import available_memory
from trainfast_runner.records.run_lines import Actual
from trainfast_runner.records.tick import DeviceReading
from trainfast_runner.results.comparison import compare
from trainfast_runner.search.advice import Situation, advise
from trainfast_runner.settings import compatibility, device_counts
from trainfast_runner.settings.compatibility import Facts, check, refusal_anywhere
from trainfast_runner.settings.device_counts import first_gpu_name
from trainfast_runner.settings.spec import offload_folder, resolve
from trainfast_runner.worker.catalog import PIPELINE_OBJECTIVES
from trainfast_runner.worker.strategies import pipeline

GIB = 2**30


def gpu(index, free_gib=20, capability="8.6"):
    sizes = {"memory_free_bytes": free_gib * GIB, "compute_capability": capability}
    return DeviceReading(index=index, uuid=f"GPU-{index}", name="Card", **sizes)


CPU = Machine(device="cpu", gpus=(), nvml_gpus=(), cores=2, no_gpu_reason="no driver")
TWO = Machine(device="cuda", gpus=(gpu(0, 10), gpu(1, 20)), nvml_gpus=(gpu(0), gpu(1)), cores=8)
OLD = replace(TWO, gpus=(gpu(0, capability="7.0"),), nvml_gpus=(gpu(0),))
WATCHED = replace(CPU, nvml_gpus=(gpu(0), gpu(1)))
BROKEN = replace(CPU, refusal=UserError("a GPU is here and NVML gives none", key="devices"))
PLAN = {"base_model_tp_plan": {"layers.*.self_attn.q_proj": "colwise"}}
LLAMA = {"model_type": "llama", "vocab_size": 4096, **PLAN}
STAGED = {"model_type": "llama", "num_hidden_layers": 4, "rope_parameters": {}, "vocab_size": 4096}
BERT = {"model_type": "bert", "vocab_size": 1000, "num_hidden_layers": 4}
T5 = BERT | {"is_encoder_decoder": True, "n_positions": 512, "relative_attention_num_buckets": 32}
INSTALLED = {"deepspeed": "0.19.8", "bitsandbytes": "0.50", "accelerate": "1", "torch": "2.13.0", "torchao": "0.18.0"}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CUBE = "strategy=ddp+tp+pp"
INTERLEAVED = "strategy=pp pp_schedule=interleaved"
POSITIONS = {"max_position_embeddings": 64, "rope_theta": 10000.0}
PADDED = "samples=padded"
SPREAD = "strategy=tp ep_degree=2"
MIXTRAL = {"model_type": "mixtral", **PLAN, "base_model_ep_plan": {"layers.*.mlp.experts": "ep_dispatch_experts"}}
SPLIT = "strategy=tp sequence_parallel=on"
PADDED_SPLIT = f"{SPLIT} devices=2 {PADDED}"
DROPOUT, ODD, ROUTED = {"attn_pdrop": 0.1}, {"num_attention_heads": 3}, {"base_model_ep_plan": {"a": "ep_router"}}


def facts(settings="", where=CPU, config=None, versions=None):
    spec = resolve("tiny-llama", settings.split())
    machine = where.used_by(spec.knobs["devices"])
    return Facts(spec, machine, config or {}, INSTALLED if versions is None else versions, "/env/bin/python")


def refusal(*asked, **more):
    with pytest.raises(UserError) as refused:
        check(facts(*asked, **more))
    return refused.value


@pytest.mark.parametrize(
    ("settings", "where", "config", "key", "expected"),
    [
        ("tp_degree=4", CPU, {}, "tp_degree", "does nothing with strategy=single"),
        ("devices=0+1", CPU, {}, "devices", "names GPUs and a run here has none (no driver)"),
        ("memory_limit=1GiB+2GiB", CPU, {}, "memory_limit", "names 2 ranks and the run has 1"),
        ("strategy=ddp devices=4", TWO, {}, "devices", "devices=4, but there are 2"),
        ("strategy=ddp devices=0+2", TWO, {}, "devices", "there is no GPU 2"),
        ("attention=flash", TWO, {}, "attention", "/env/bin/python -m pip install flash-attn"),
        ("precision=bf16", OLD, {}, "precision", "compute capability 8.0"),
        ("precision=tf32", OLD, {}, "precision", "has 7.0"),
        # Sharded and copied models.
        ("strategy=dp", OLD, {}, "devices", "and devices=auto is one"),
        ("strategy=tp", CPU, {"model_type": "t5"}, "strategy", "has no plan for t5"),
        ("strategy=fsdp+tp", CPU, LLAMA | {"base_model_tp_plan": {"a": "local"}}, "strategy", "cuts layers as local"),
        ("attention=sdpa-flash", CPU, DROPOUT, "attention", "no dropout on a CPU, and the model has attn_pdrop"),
        ("attention=sdpa-flash", CPU, T5, "attention", "takes no bias, and the model adds one to its scores"),
        ("strategy=tp", CPU, LLAMA | ODD, "tp_degree", "does not divide the model's 3 heads"),
        ("strategy=tp tp_degree=4", CPU, LLAMA | HEADS, "tp_degree", "not divide the model's 2 key-value heads"),
        ("strategy=tp devices=4", CPU, LLAMA, "devices", "try devices=2, or tp_degree=4"),
        ("strategy=fsdp+tp devices=2", CPU, LLAMA, "devices", "strategy=tp with devices=2"),
        (f"{SPLIT} devices=2", CPU, {"model_type": "gpt2"}, "sequence_parallel", "the model is gpt2"),
        (PADDED_SPLIT, CPU, LLAMA, "sequence_parallel", "samples=padded are of several; try samples=packed"),
        ("seq_len=129 " + SPLIT, CPU, LLAMA, "seq_len", "=2 equal parts, and it does not divide; try seq_len=130"),
        ("sequence_parallel=on", CPU, LLAMA, "sequence_parallel", "does nothing with strategy=single"),
        (SPREAD, CPU, LLAMA, "ep_degree", "no plan for the experts of llama: transformers ships none (it does for mix"),
        (SPREAD, CPU, MIXTRAL | {"num_local_experts": 3}, "ep_degree", "not divide the model's 3 experts (model.num_l"),
        (SPREAD, CPU, MIXTRAL | ROUTED, "ep_degree", "spreads experts as ep_router"),
        ("strategy=tp ep_degree=4", CPU, MIXTRAL, "ep_degree", "ep_degree=4 is not tp_degree=2: the devices"),
        ("strategy=tp ep_degree=4", CPU, MIXTRAL, "ep_degree", "try ep_degree=2, or ep_degree=1"),
        ("strategy=fsdp ep_degree=2", CPU, MIXTRAL, "ep_degree", "does nothing with strategy=fsdp"),
        (f"{CUBE} ep_degree=2", CPU, MIXTRAL, "ep_degree", "does nothing with strategy=ddp+tp+pp"),
        ("p2p=off", TWO, {}, "p2p", "p2p=off does nothing with strategy=single"),
        ("p2p=off strategy=naive-mp", TWO, {}, "p2p", "try p2p=on, or strategy=pp with p2p=off"),
        # ZeRO.
        ("strategy=zero2-offload optimizer=adamw-8bit", CPU, {}, "optimizer", "or strategy=zero2 with"),
        ("strategy=zero2 engine=trainer", CPU, {}, "engine", "engine=native"),
        ("strategy=zero2-offload offload_path=/tmp", CPU, {}, "offload_path", "belongs to strategy zero3-offload"),
        # Optimizers.
        ("optimizer=adamw-offload", CPU, {}, "optimizer", "updates on the host what a GPU trains"),
        ("optimizer=adamw-offload strategy=ddp", TWO, {}, "optimizer", "strategy=ddp is not of one GPU"),
        ("optimizer=adamw-offload grad_clip=1", TWO, {}, "optimizer", "before they are clipped; try optimizer=adamw-f"),
        ("optimizer=adamw-offload precision=fp16", TWO, {}, "optimizer", "or precision=bf16"),
        ("optimizer=adamw-offload engine=trainer", TWO, {}, "optimizer", "or engine=native"),
        ("optimizer=muon strategy=fsdp devices=2", CPU, {}, "optimizer", "needs whole matrices"),
        # Engines and compiling.
        ("engine=accelerate precision=fp16", CPU, {}, "precision", "silently trains in fp32"),
        ("engine=trainer compile=default", CPU, {}, "compile", "compile=default with engine=native"),
        ("compile=default strategy=fsdp devices=2", CPU, {}, "compile", "compile=default with strategy=ddp"),
        # Adapters.
        ("lora_rank=4", CPU, {}, "lora_rank", "does nothing with method=full; it belongs to method lora or qlora"),
        ("method=lora strategy=zero2 devices=2", CPU, {}, "method", "try method=full, or strategy=fsdp"),
        ("method=qlora strategy=fsdp devices=2", CPU, {}, "method", "single, ddp, not with strategy=fsdp"),
        ("method=lora strategy=tp", CPU, LLAMA, "method", "not with strategy=tp; try method=full, or strategy=fsdp"),
        ("method=qlora compile=default", CPU, {}, "compile", "try compile=off, or method=full"),
        ("method=lora strategy=fsdp precision=bf16-pure", CPU, {}, "precision", "try precision=bf16, or strategy=ddp"),
        # Pipelines.
        ("strategy=pp devices=4", CPU, STAGED, "devices", "pp_degree=2 runs on 2 devices, not on devices=4; try"),
        ("strategy=ddp+pp devices=3", CPU, STAGED, "devices", "a multiple of 2 devices, at least 4"),
        ("strategy=ddp+pp devices=2", CPU, STAGED, "devices", "strategy=pp with devices=2"),
        ("strategy=pp pp_degree=4 pp_schedule=interleaved", CPU, STAGED, "pp_schedule", "makes 8 stages"),
        ("strategy=pp pp_schedule=1f1b micro_batches=1", CPU, STAGED, "micro_batches", "needs at least pp_degree=2"),
        (f"{INTERLEAVED} batch_size=5 micro_batches=5", CPU, STAGED, "micro_batches", "split; try micro_batches=1, or"),
        # Pipelines of slices.
        (f"{CUBE} devices=6", CPU, STAGED, "devices", "tp_degree=2 needs a multiple of 4 devices, at least 8"),
        (f"{CUBE} devices=4", CPU, STAGED, "devices", "try devices=8, or strategy=ddp+tp with devices=4"),
        ("strategy=fsdp+tp+pp", CPU, STAGED | {"model_type": "t5"}, "strategy", "the model is t5; try strategy=ddp or"),
        (CUBE, CPU, STAGED | {"base_model_tp_plan": {"a": "local"}}, "strategy", "as local, which is not done here"),
        (CUBE, CPU, STAGED | PLAN | ODD, "tp_degree", "3 heads (model.num_attention_heads); try "),
        (f"{CUBE} pp_schedule=1f1b micro_batches=1", CPU, STAGED, "micro_batches", "needs at least pp_degree=2"),
        (f"{CUBE} compile=default", CPU, STAGED, "compile", "compile=default with strategy=ddp"),
        (f"{CUBE} engine=accelerate", CPU, STAGED, "engine", "engine=native with strategy=ddp+tp+pp"),
        (f"{CUBE} reshard=off", CPU, STAGED, "reshard", "reshard does nothing with strategy=ddp+tp+pp"),
        ("strategy=pp tp_degree=2", CPU, STAGED, "tp_degree", "does nothing with strategy=pp"),
        ("strategy=pp", CPU, STAGED | {"model_type": "t5"}, None, "the model is t5"),
        ("strategy=pp", CPU, STAGED | {"model_type": "bert"}, None, "not for data.objective=causal-lm"),
        # Samples and the model's own sizes.
        (f"data.kind=random {PADDED}", CPU, LLAMA, "samples", "samples of data.kind=random are all of one length"),
        (f"data.objective=masked-lm strategy=pp devices=2 {PADDED}", CPU, BERT, "samples", "needs a padding mask"),
        ("samples=grouped strategy=pp devices=2", CPU, LLAMA, "samples", "strategy=pp, which pads every batch"),
        ("samples=grouped compile=default", CPU, LLAMA, "samples", "compile=default, which pads every batch"),
        (f"data.objective=seq2seq {PADDED}", CPU, T5, "samples", "cuts packed samples in two halves"),
        ("", BROKEN, {}, "devices", "a GPU is here"),
    ],
)
def test_what_cannot_work_is_refused(settings, where, config, key, expected):
    refused = refusal(settings, where, config)
    assert key in (None, refused.key)
    assert expected in refused.line()


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        ("optimizer=adamw-8bit", "bitsandbytes"),
        ("optimizer=adamw-4bit", "torchao"),
        ("engine=trainer", "accelerate"),
        ("strategy=zero1", "deepspeed"),
        ("method=qlora", "peft bitsandbytes"),
    ],
)
def test_what_is_not_installed_is_named_with_the_command_that_installs_it(settings, package):
    missing = dict.fromkeys(package.split())
    assert f"/env/bin/python -m pip install {package}" in refusal(settings, versions=missing).line()


def test_compiling_and_an_optimizer_that_compiles_need_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    refused = refusal("optimizer=adamw-4bit", versions={"torchao": "0.18.0"})
    assert "optimizer=adamw-4bit needs a compiler, and PATH has no no-such-compiler" in refused.line()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    missing = "PATH has no g++; install with: apt-get install g++; try compile=off"
    assert missing in refusal("compile=default").line()


@pytest.mark.parametrize(
    ("settings", "where", "config", "ranks", "devices", "global_batch"),
    [
        ("", CPU, {}, 1, 1, 8),
        ("strategy=ddp devices=2 memory_limit=1GiB+2GiB", CPU, {}, 2, 2, 16),
        ("precision=bf16", TWO, {}, 1, 1, 8),
        ("strategy=ddp p2p=off", TWO, {}, 2, 2, 16),
        ("strategy=dp p2p=off", TWO, {}, 1, 2, 16),
        ("strategy=naive-mp", TWO, LLAMA, 1, 2, 8),
        ("watch=0+1", WATCHED, {}, 1, 1, 8),
        ("strategy=tp", CPU, LLAMA, 2, 2, 8),
        ("strategy=tp tp_degree=4", CPU, LLAMA, 4, 4, 8),
        ("strategy=ddp+tp", CPU, LLAMA, 4, 4, 16),
        ("strategy=fsdp+tp devices=8", CPU, LLAMA, 8, 8, 32),
        (CUBE, CPU, STAGED | PLAN, 8, 8, 16),
        ("strategy=fsdp+tp+pp devices=cpu reshard=off", TWO, STAGED | PLAN, 8, 8, 16),
        ("strategy=fsdp", CPU, LLAMA, 2, 2, 16),
        ("strategy=zero2 optimizer=adamw-8bit", CPU, {}, 2, 2, 16),
        ("strategy=zero3-offload precision=bf16", CPU, {}, 2, 2, 16),
        ("strategy=pp", CPU, STAGED, 2, 2, 8),
        ("strategy=pp pp_degree=4 devices=4 grad_accum=2", CPU, STAGED, 4, 4, 16),
        ("strategy=pp micro_batches=1", CPU, STAGED, 2, 2, 8),
        ("strategy=pp pp_schedule=interleaved", CPU, STAGED, 2, 2, 8),
        ("strategy=ddp+pp pp_schedule=1f1b precision=fp16", CPU, STAGED, 4, 4, 16),
        (f"strategy=pp devices=2 {PADDED}", CPU, LLAMA, 2, 2, 8),
        ("data.kind=random", CPU, {"vocab_size": 5}, 1, 1, 8),
        ("data.objective=seq2seq seq_len=128", CPU, {"max_position_embeddings": 64}, 1, 1, 8),
        ("data.objective=seq2seq seq_len=1024", CPU, T5, 1, 1, 8),
        # The CPU of a machine with GPUs, one of which NVML does not answer for.
        ("devices=cpu", BROKEN, {}, 1, 1, 8),
        ("devices=cpu:1", TWO, {}, 1, 1, 8),
        ("strategy=ddp devices=cpu", TWO, LLAMA, 8, 8, 64),
        ("strategy=tp devices=cpu", TWO, LLAMA, 2, 2, 8),
        ("strategy=fsdp+tp devices=cpu", TWO, LLAMA, 4, 4, 16),
    ],
)
def test_what_works_runs_on_the_processes_and_devices_it_needs(settings, where, config, ranks, devices, global_batch):
    asked = facts(settings, where, config)
    check(asked)
    assert (asked.rank_count, asked.device_count) == (ranks, devices)
    assert device_counts.global_batch(asked.knobs, asked.device_count) == global_batch
    if "devices=cpu" in settings:
        assert asked.machine.device == "cpu"
        assert device_counts.recorded_devices(asked.spec, where) == f"cpu:{ranks}"


def test_a_kernel_that_the_model_has_not_and_an_optimizer_of_a_later_torch_are_refused():
    asked = replace(
        facts("attention=sdpa", config={"model_type": "gemma2", "vocab_size": 4096}),
        attentions=("auto", "eager", "flash"),
    )
    with pytest.raises(UserError, match="gemma2 has no attention=sdpa") as refused:
        check(asked)
    assert (refused.value.key, refused.value.advice) == ("attention", "attention=auto, which takes eager")
    check(replace(asked, spec=resolve("tiny-llama", ["attention=eager"])))
    refused = refusal("optimizer=muon", versions={"torch": "2.8.0+cpu"}).line()
    assert "optimizer=muon needs torch 2.9 or later, and /env/bin/python has 2.8.0+cpu; install with: " in refused
    assert "-m pip install 'torch>=2.9'; try optimizer=adamw-f" in refused
    check(facts("optimizer=muon", versions={"torch": "2.11.0"}))


@pytest.mark.parametrize(
    ("settings", "config", "nearest"),
    [
        ("", POSITIONS, "seq_len=64, or model.max_position_embeddings=128"),
        ("", {"text_config": POSITIONS}, "seq_len=64, or model.max_position_embeddings=128"),
        ("data.objective=seq2seq seq_len=130", POSITIONS, "seq_len=128, or model.max_position_embeddings=65"),
        ("", {"hidden_size": 64, "num_attention_heads": 7}, "model.num_attention_heads=8"),
        ("", {"hidden_size": 64, "n_head": 7}, "model.n_head=8"),
    ],
)
def test_sizes_that_the_model_cannot_have_get_the_nearest(settings, config, nearest):
    assert refusal(settings, config=config).as_json()["nearest"] == nearest


def test_the_cpu_of_a_machine_with_gpus_has_the_hosts_memory_and_single_takes_the_freest_gpu():
    with pytest.raises(UserError, match="neither a count nor a list"):
        resolve("tiny-llama", ["watch=cpu"])
    spec = resolve("tiny-llama", ["strategy=ddp", "devices=cpu:2", "watch=1"])
    available = available_memory(spec, TWO, 2, 8 * GIB)
    assert (available.size_bytes, available.source) == (4 * GIB, "free, shared by 2 processes")
    assert first_gpu_name(spec, TWO) is None
    assert [gpu.index for gpu in TWO.used_by(spec.knobs["devices"]).watched("1", ())] == [1]
    assert "strategy=dp" in refusal_anywhere(resolve("tiny-llama", ["strategy=dp", "devices=cpu"]), TWO).line()
    assert refusal_anywhere(resolve("tiny-llama", ["strategy=dp", "devices=4"]), TWO) is None
    spec = resolve("tiny-llama", ["devices=cpu"])
    (strategy,) = [one for one in advise(spec, spec.knobs, TWO, Situation()) if one.knob == "strategy"]
    assert strategy.text.startswith("single: on a CPU the processes of other strategies share its 8 cores")

    def on(devices):
        return result(knobs={"strategy": "ddp", "devices": devices}, actual=Actual(device="cpu", world_size=2))

    assert (compare(on("cpu:2"), on(2)).knobs, compare(on("cpu:2"), on(4)).knobs) == ([], [("devices", 2, 4)])
    assert [one.index for one in TWO.default_gpus("single")] == [1]
    assert [one.index for one in TWO.default_gpus("ddp")] == [0, 1]
    assert [one.index for one in TWO.named_or_counted_gpus("0+")] == [0]
    assert set(PIPELINE_OBJECTIVES) == set(pipeline.LAYOUTS)


OFFLOAD = "strategy=zero3-offload offload_path="


def test_an_offload_path_of_somebody_else_is_refused_and_untouched(tmp_path):
    """Root is refused too, although root may write anywhere."""
    theirs = tmp_path / "theirs"
    (theirs / "trainfast-offload-work").mkdir(parents=True)
    if os.geteuid() == 0:
        os.chown(theirs, 54321, 54321)
    else:
        theirs.chmod(0o555)
    text = refusal(f"{OFFLOAD}{theirs}").line()
    assert text.startswith(f"offload_path={theirs} {'belongs to user 54321' if os.geteuid() == 0 else 'cannot be'}")
    assert "a directory of your own" in text
    assert (theirs / "trainfast-offload-work").is_dir()


@pytest.mark.parametrize(
    ("settings", "bytes_per_parameter"),
    [([], 12), (["optimizer=sgd"], 4), (["precision=bf16-pure"], 6), (["precision=bf16"], 12)],
)
def test_an_offload_path_too_small_for_the_states_is_refused(tmp_path, monkeypatch, settings, bytes_per_parameter):
    monkeypatch.setattr(compatibility, "free_bytes", lambda folder: 3 << 20)
    assert f"offload_path={tmp_path} is full: 3 MiB free" in refusal(f"{OFFLOAD}{tmp_path}").line()
    count = 10 << 20
    knobs = resolve("tiny-llama", [*f"{OFFLOAD}{tmp_path}".split(), *settings]).knobs
    monkeypatch.setattr(compatibility, "free_bytes", lambda folder: count * bytes_per_parameter)
    compatibility.refuse_small_disk(knobs, count)
    compatibility.refuse_small_disk(knobs, None)
    monkeypatch.setattr(compatibility, "free_bytes", lambda folder: count * bytes_per_parameter - (1 << 20))
    with pytest.raises(UserError, match="the states of 10,485,760 parameters take") as refused:
        compatibility.refuse_small_disk(knobs, count)
    assert f"has {10 * bytes_per_parameter - 1} MiB free" in refused.value.line()
    inherited = {**knobs, "strategy": "single"}
    assert (offload_folder(knobs), offload_folder(inherited)) == (tmp_path, None)
    compatibility.refuse_small_disk(inherited, count)


def test_a_disk_needs_a_compiler_and_libaio(tmp_path, monkeypatch):
    monkeypatch.setattr(compatibility, "missing_tool", lambda python: None)
    monkeypatch.setattr(compatibility, "has_libaio", lambda python: False)
    assert "apt-get install libaio-dev" in refusal(f"{OFFLOAD}{tmp_path}").line()
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "apt-get install g++" in refusal(f"{OFFLOAD}{tmp_path}").line()
    (tmp_path / "c++").write_text("#!/bin/sh\n")
    (tmp_path / "c++").chmod(0o755)
    assert training_python.missing_tool("/env/bin/python") == ("ninja", "/env/bin/python -m pip install ninja")


def test_half_precision_needs_the_instructions(tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text("flags: avx512f\n")
    monkeypatch.setattr(cpu, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(cpu, "_cpu_info", cpu._cpu_info.__wrapped__)
    assert refusal("strategy=zero2 precision=fp16").advice == "precision=bf16"

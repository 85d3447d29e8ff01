"""What an export says of runs that no test can start: several processes, DeepSpeed, GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainfast_runner.run_directory.records import Clock, RunFile
from trainfast_runner.settings.export import Exported, export
from trainfast_runner.settings.knobs import defaults


def exported(to: str, folder: Path, device: str = "cuda", ranks: int = 2, **knobs: Any) -> Exported:
    run = RunFile(
        run_id="r1",
        preset="tiny-llama",
        model={"family": "llama"},
        data={"kind": "text", "objective": "causal-lm"},
        knobs={**defaults(), "devices": ranks, **knobs},
        device=device,
        world_size=ranks,
        clock=Clock(monotonic_ns=0, wall_ns=0),
    )
    return export(run, folder, to)


def test_the_trainer_is_told_how_many_processes_it_needs(tmp_path: Path) -> None:
    ddp = exported("training-args", tmp_path, strategy="ddp").text
    assert "# strategy=ddp: torchrun --standalone --nproc-per-node 2 SCRIPT" in ddp
    zero = exported("training-args", tmp_path, strategy="zero2").text
    assert "# deepspeed.json: trainfast-tui export r1 --to deepspeed > deepspeed.json" in zero
    assert "torchrun" not in exported("training-args", tmp_path, ranks=1).text
    assert "# strategy=dp: one process that sees 2 GPUs" in exported("training-args", tmp_path, strategy="dp").text
    pipeline = exported("training-args", tmp_path, strategy="pp")
    assert "strategy" in pipeline.left_out
    assert "torchrun" not in pipeline.text


def test_accelerate_says_what_its_launcher_cannot(tmp_path: Path) -> None:
    on_cpu = exported("accelerate", tmp_path, "cpu", strategy="ddp").text
    # accelerate launch starts a single process there.
    assert "# Start it with: ACCELERATE_USE_CPU=true torchrun --standalone --nproc-per-node 2 SCRIPT" in on_cpu
    assert 'distributed_type: "MULTI_CPU"' in on_cpu
    zero = exported("accelerate", tmp_path, "cpu", strategy="zero2", precision="bf16").text
    assert "# For GPUs: on a CPU, where this run was, accelerate does not know DEEPSPEED." in zero
    # Said in deepspeed.json; accelerate refuses to read it twice.
    assert "mixed_precision" not in zero
    assert "use_cpu: false" in zero
    fsdp = exported("accelerate", tmp_path, strategy="fsdp", reshard="off", checkpointing="full")
    assert "fsdp_reshard_after_forward: false" in fsdp.text
    assert fsdp.left_out == ()
    assert exported("accelerate", tmp_path, strategy="dp").left_out == ("strategy",)


def test_deepspeeds_json_names_what_it_lacks(tmp_path: Path) -> None:
    turned = {"precision": "bf16", "optimizer": "adamw-fused", "weight_decay": 0.1, "checkpointing": "full"}
    plain = exported("deepspeed", tmp_path, strategy="ddp", **turned)
    assert json.loads(plain.text)["bf16"] == {"enabled": True}
    # The optimizer is the script's own, and the number of processes the launcher's.
    assert set(plain.left_out) == {"optimizer", "weight_decay", "checkpointing", "devices", "strategy"}
    recorded = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    (tmp_path / "deepspeed.json").write_text(json.dumps(recorded))
    zero = exported("deepspeed", tmp_path, strategy="zero3", precision="bf16")
    assert json.loads(zero.text) == recorded
    assert zero.left_out == ("devices",)


@pytest.mark.parametrize(("strategy", "kept"), [("zero2", True), ("single", False)])
def test_a_preset_of_several_processes_keeps_their_number(tmp_path: Path, strategy: str, kept: bool) -> None:
    assert ("devices = 2" in exported("preset", tmp_path, strategy=strategy).text) == kept

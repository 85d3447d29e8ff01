"""Proofs of exports: what they say, where they stand, and when there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trainfast_runner.errors import UserError
from trainfast_runner.export.formats import export
from trainfast_runner.export.imported import import_settings
from trainfast_runner.export.proving import proof_of
from trainfast_runner.records.export_proof import ExportProof, append_proof
from trainfast_runner.records.result import Result, Spread, Throughput
from trainfast_runner.records.run_file import ClockAnchor, RunFile
from trainfast_runner.records.run_lines import Actual
from trainfast_runner.records.script_run import ScriptFigures
from trainfast_runner.settings.knobs import defaults


def a_run(engine: str = "trainer", **knobs: Any) -> RunFile:
    return RunFile(
        run_id="r1",
        preset="tiny-llama",
        model={"family": "llama"},
        data={"kind": "text", "objective": "causal-lm"},
        knobs={**defaults(), "engine": engine, "batch_size": 16, **knobs},
        clock=ClockAnchor(monotonic_ns=0, wall_ns=0),
    )


def a_result(samples_per_s: float | None, framework: str | None = None, parameters: int = 1000) -> Result:
    return Result(
        run_id="r2",
        state="finished",
        actual=Actual(world_size=1, parameters=parameters, wrapper="none"),
        throughput=Throughput(samples_per_s=Spread(median=samples_per_s), steps_per_s=Spread(median=8.0)),
        script=None if framework is None else ScriptFigures(command=["python", "t.py"], framework=framework),
    )


def proof(
    folder: Path,
    to: str = "training-args",
    run: RunFile | None = None,
    framework: str = "HF Trainer",
    samples_per_s: float | None = 131.2,
    parameters: int = 1000,
    **ran: Any,
) -> ExportProof:
    """The proof of a run in which the live objects had these knobs."""
    run = run or a_run()
    line = {"t_ns": 1, "kind": "script", "framework": framework, "ran": {"batch_size": 16, **ran}}
    (folder / "worker.jsonl").write_text(json.dumps(line) + "\n")
    result = a_result(samples_per_s, framework, parameters)
    return proof_of(run, a_result(131.5), export(run, folder, to), folder, result)


def test_the_line_has_both_speeds_and_stands_in_the_export(tmp_path: Path) -> None:
    found = proof(tmp_path)
    assert found.line().endswith(": 131.2 samples/s; the exported run: 131.5")
    append_proof(tmp_path, msgspec.structs.replace(found, samples_per_s=1.0))
    append_proof(tmp_path, found)
    exported = export(a_run(), tmp_path, "training-args")
    assert exported.text.startswith(f"# {found.line()}\n")
    assert (exported.proof, exported.digest) == (found.line(), found.text_sha256)
    assert import_settings(exported.text, "it", "tiny-llama").knobs["batch_size"] == 16
    assert export(a_run(), tmp_path, "torchrun").proof is None
    assert export(a_run(batch_size=8), tmp_path, "training-args").proof is None, "that text has never been run"


@pytest.mark.parametrize(
    ("run", "given", "reason"),
    [
        (a_run("native"), {}, "HF Trainer took the steps, and r1 has engine=native"),
        (a_run(), {"parameters": 2000}, "a model of 2,000 parameters, and r1 has 1,000"),
        (a_run(), {"samples_per_s": None}, "the samples of r2 are not seen"),
        (a_run(), {"to": "accelerate", "batch_size": 8}, "batch_size=8, and r1 has 16"),
    ],
)
def test_speeds_that_do_not_compare_are_not_compared(
    tmp_path: Path, run: RunFile, given: dict[str, Any], reason: str
) -> None:
    found = proof(tmp_path, run=run, **given)
    assert found.compared_with is None
    assert found.line().endswith(f"; not compared: {reason}")


def test_speeds_on_other_devices_are_not_compared(tmp_path: Path) -> None:
    on_gpus = msgspec.structs.replace(a_run(), device="cuda", device_uuids=["GPU-a", "GPU-b"])
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(a_run()))
    found = proof(tmp_path, "torchrun", on_gpus)
    assert found.line().endswith("; not compared: r1 was on the CPU, and r1 on 2 GPUs")
    assert proof(tmp_path, "training-args", on_gpus).compared_with == 131.5, "its text chooses no device"


@pytest.mark.parametrize(("model", "compared"), [("NVIDIA A100", True), ("NVIDIA H100", False)])
def test_speeds_on_as_many_gpus_compare_if_they_are_of_one_model(tmp_path: Path, model: str, compared: bool) -> None:
    before, after = (
        msgspec.structs.replace(a_run(), device="cuda", device_uuids=[uuid], device_names=[name])
        for uuid, name in (("GPU-a", "NVIDIA A100"), ("GPU-b", model))
    )
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(after))
    found = proof(tmp_path, "torchrun", before)
    reason = None if compared else "r1 was on 1 NVIDIA H100, and r1 on 1 NVIDIA A100"
    assert found.not_compared == reason


def test_settings_that_ran_otherwise_prove_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="r2 did not run as exported: batch_size=16 ran as 4") as refused:
        proof(tmp_path, batch_size=4)
    assert refused.value.exit_code == 4

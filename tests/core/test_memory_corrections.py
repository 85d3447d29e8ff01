"""The corrections that measured runs give the predictions of their device, and runs that give none."""

from dataclasses import replace

import msgspec
import pytest
from layered_model import model_of, spec_with

from on_disk import run_file
from trainfast_runner.memory import corrections, tracing
from trainfast_runner.memory.corrections import record_correction
from trainfast_runner.memory.oom import models_of
from trainfast_runner.records.result import MemoryFigures, Result, RunConditions
from trainfast_runner.records.run_directory import RunRecords
from trainfast_runner.records.run_lines import Step, StepTotals
from trainfast_runner.records.tick import DeviceReading

MODEL = msgspec.structs.replace(model_of(12), trace="t")
BEYOND = {"forward_backward": 7000, "optimizer": -300}


def a_run(spec, beyond=BEYOND, steps=2, **changes):
    """Record a run of MODEL that took so many bytes beyond its trace."""
    predicted = MODEL.predict(spec)
    run = run_file(preset="tiny", knobs=dict(spec.knobs), predicted=predicted, **changes)
    peaks = {phase: total + beyond[phase] for phase, total in predicted.traced_bytes.items()}
    taken = [Step(t_ns=n, step=n, samples=1, tokens=1, step_ms=1.0, phase_peaks=peaks) for n in range(1, steps + 1)]
    totals = StepTotals()
    for one in taken:
        totals.add(one)
    return RunRecords(run=run, steps={0: taken}, totals_by_rank={0: totals})


def ended(state="finished"):
    return Result(run_id="r1", state=state)


def known_of(home, device="cpu", gpu=None):
    machine = corrections.read_device_corrections(device, gpu, home)
    return msgspec.structs.replace(MODEL, device=device, corrections=machine)


def test_a_context_is_measured_by_samples_from_when_torch_held_the_most(tmp_path):
    spec = spec_with(batch_size=5000)
    records = a_run(spec, device="cuda", device_uuids=["G"], device_names=["H200"], used_before_bytes={"G": 100})
    steps = [msgspec.structs.replace(step, peak_reserved_bytes=4000) for step in records.steps[0]]
    result = msgspec.structs.replace(
        ended(),
        memory=MemoryFigures(peak_reserved_bytes=4000, device_peak_used_bytes=4600),
        conditions=RunConditions(clean=True),
    )

    def context(*samples):
        devices = {"G": [(t_ns, DeviceReading(index=0, uuid="G", memory_used_bytes=used)) for t_ns, used in samples]}
        record_correction(tmp_path, replace(records, steps={0: steps}, device_samples=devices), result)
        return corrections.read_device_corrections("cuda", "H200", tmp_path).context_bytes

    assert context((0, 4300)) is None, "it was still growing"
    assert context((0, 600), (2, 4600)) == 500


def test_what_libraries_keep_is_there_in_both_phases_whatever_the_batch():
    kept = msgspec.structs.replace(MODEL, device="cuda", library_bytes=64 << 20)
    for batch in (1, 5000):
        spec = spec_with(batch_size=batch)
        plain = msgspec.structs.replace(MODEL, device="cuda").predict(spec)
        found = kept.predict(spec)
        assert found.bytes_per_sample == plain.bytes_per_sample
        for phase, sizes in found.phases.items():
            assert sizes["total"] - plain.phases[phase]["total"] == 64 << 20
            assert sizes["temporary"] - plain.phases[phase]["temporary"] == 64 << 20


def test_a_measured_run_corrects_the_next_prediction(tmp_path):
    spec = spec_with(batch_size=5000)
    predicted = MODEL.predict(spec)
    record_correction(tmp_path, a_run(spec), ended())
    learnt = [one for machine in corrections.read_corrections(tmp_path).values() for one in machine.by_case.values()]
    assert [one.step_bytes for one in learnt] == [a_run(spec).run.predicted.traced_bytes["forward_backward"]]
    better = known_of(tmp_path)
    again = better.predict(spec)
    measured = {phase: total + BEYOND[phase] for phase, total in predicted.traced_bytes.items()}
    assert {name: phase["total"] for name, phase in again.phases.items()} == measured
    assert again.traced_bytes == predicted.traced_bytes
    assert "corrected by r1" in again.basis
    most = MODEL.max_batch(spec, 1, predicted.total_bytes)
    fewer = better.max_batch(spec, 1, predicted.total_bytes)
    assert most == 5000
    assert 0 < fewer < most
    for other in (spec_with(batch_size=5000, compile="default"), spec_with(batch_size=5000, strategy="ddp")):
        assert "corrected" not in better.predict(other, 2).basis
    upgraded = msgspec.structs.replace(better, trace="of another torch")
    assert upgraded.predict(spec).phases == predicted.phases


def test_untraced_memory_is_noted_until_it_is_measured_and_does_not_shrink(tmp_path):
    spec = spec_with(batch_size=5000, compile="default", engine="trainer")
    text = MODEL.predict(spec).basis
    assert "without the buffers of compiled kernels and the Trainer's own memory" in text
    assert "without" not in MODEL.predict(spec_with(batch_size=5000)).basis
    record_correction(tmp_path, a_run(spec), ended())
    better, small = known_of(tmp_path), spec_with(batch_size=50, compile="default", engine="trainer")
    assert "without" not in better.predict(small).basis
    first = "forward_backward"
    added = better.predict(small).phases[first]["total"] - MODEL.predict(small).traced_bytes[first]
    assert added == BEYOND[first], "a compiler keeps as much whatever the batch"
    assert better.predict(spec_with(batch_size=50)).basis == MODEL.basis, "the plain run has taught nothing"


def test_a_run_corrects_the_predictions_of_its_own_device_only(tmp_path):
    spec = spec_with(batch_size=5000)
    record_correction(tmp_path, a_run(spec, device="cuda", device_names=["NVIDIA H200"]), ended())
    record_correction(tmp_path, a_run(spec), ended())
    assert "corrected" in known_of(tmp_path, "cuda", "NVIDIA H200").predict(spec).basis
    assert "corrected" in known_of(tmp_path, "cuda").predict(spec).basis, "the only GPU that anything is known of"
    assert "corrected" not in known_of(tmp_path, "cuda", "NVIDIA A100").predict(spec).basis
    assert "corrected" in known_of(tmp_path).predict(spec).basis
    record_correction(tmp_path, a_run(spec, device="cuda", device_names=["NVIDIA A100"]), ended())
    assert "corrected" not in known_of(tmp_path, "cuda").predict(spec).basis, "which of the two is not said"


def test_a_run_that_says_nothing_of_the_next_teaches_nothing(tmp_path):
    spec = spec_with(batch_size=5000)
    record_correction(tmp_path, a_run(spec), ended("oom"))
    record_correction(tmp_path, a_run(spec, steps=1), ended())
    record_correction(tmp_path, a_run(spec, role="probe"), ended())
    record_correction(tmp_path, a_run(spec_with(batch_size=5000, samples="padded")), ended())
    record_correction(tmp_path, a_run(spec, {"forward_backward": 1 << 40, "optimizer": 0}), ended())
    record_correction(tmp_path, RunRecords(run=a_run(spec).run, steps={}), ended())
    assert corrections.read_corrections(tmp_path) == {}


def test_the_same_settings_keep_their_prediction_and_a_larger_step_corrects_it(tmp_path):
    spec, larger = spec_with(batch_size=5000), spec_with(batch_size=6000)
    record_correction(tmp_path, a_run(spec), ended())
    first = known_of(tmp_path).predict(spec)
    record_correction(tmp_path, a_run(spec, {"forward_backward": 9000, "optimizer": 0}), ended())
    record_correction(tmp_path, a_run(spec_with(batch_size=50), {"forward_backward": 9000, "optimizer": 0}), ended())
    assert known_of(tmp_path).predict(spec) == first
    record_correction(tmp_path, a_run(larger, {"forward_backward": 9000, "optimizer": 0}), ended())
    beyond = known_of(tmp_path).predict(larger).phases["forward_backward"]["total"]
    assert beyond - MODEL.predict(larger).traced_bytes["forward_backward"] == 9000


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"cpu": 3}', b"\x00\xff", b'{"cpu": {"device": "\xff"}}'])
def test_damaged_corrections_are_written_anew(tmp_path, content):
    spec, file = spec_with(batch_size=5000), tmp_path / corrections.CORRECTIONS_FILE
    file.write_bytes(content)
    assert known_of(tmp_path).predict(spec).phases == MODEL.predict(spec).phases
    record_correction(tmp_path, a_run(spec), ended())
    assert "corrected by r1" in known_of(tmp_path).predict(spec).basis


def test_an_explanation_goes_by_what_is_known_of_the_gpu_that_the_run_was_on(tracer, tmp_path):
    spec, home = spec_with(batch_size=5000), tmp_path / "home"
    home.mkdir()
    for name in ("NVIDIA H200", "NVIDIA A100"):
        beyond = {**BEYOND, "forward_backward": len(name) * 1000}
        record_correction(home, a_run(spec, beyond, device="cuda", device_names=[name]), ended())
    tracing.trace_model(spec, "cuda")
    run = a_run(spec, device="cuda", device_names=["NVIDIA A100"]).run
    model = models_of(run)(spec)
    assert model.corrections.by_case
    assert model.corrections == corrections.read_device_corrections("cuda", "NVIDIA A100", home)


def test_a_run_of_a_larger_step_leaves_the_prediction_of_the_measured_one(tmp_path):
    """As when a search's run under a memory_limit comes after the run on the screen."""
    spec, larger, between = (spec_with(batch_size=batch) for batch in (5000, 6000, 5500))
    record_correction(tmp_path, a_run(spec), ended())
    measured = known_of(tmp_path).predict(spec)
    record_correction(tmp_path, a_run(larger, {"forward_backward": 9000, "optimizer": -300}), ended())
    model = known_of(tmp_path)
    assert model.predict(spec).phases == measured.phases
    beyond = {
        batch_spec.knobs["batch_size"]: model.predict(batch_spec).phases["forward_backward"]["total"]
        - MODEL.predict(batch_spec).traced_bytes["forward_backward"]
        for batch_spec in (spec, between, larger)
    }
    assert beyond == {5000: 7000, 5500: 8000, 6000: 9000}
    small = spec_with(batch_size=50)
    record_correction(tmp_path, a_run(small, {"forward_backward": 400, "optimizer": 0}), ended())
    added = known_of(tmp_path).predict(small).phases["forward_backward"]["total"]
    assert added - MODEL.predict(small).traced_bytes["forward_backward"] == 400, "the newest of the smaller steps"

"""The search's decisions against simulated devices: exact, few probes, and memory runs out once."""

import random
from bisect import bisect
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from on_disk import batch_question
from trainfast_runner.records.json_lines import read_all
from trainfast_runner.search import batch_decide
from trainfast_runner.search.batch_decide import MAX_PROBES, BatchState, aligned, answer_of, decide, margins_of
from trainfast_runner.search.batch_journal import BatchLine, ConfirmationRun, Predicted, Probe, RankPeaks
from trainfast_runner.units import mebibytes

MIB = 1 << 20


@dataclass(frozen=True)
class Device:
    """Ranks with limits, and a training whose phases are affine in the batch; peaks scatter and come in blocks."""

    fixed: float
    per_sample: float
    optimizer: float
    limits: tuple[int, ...]
    block: int = 1
    scatter: int = 0
    seed: int = 0
    kind: str = "cpu"

    def peaks(self, rank, batch):
        chance = random.Random(f"{self.seed} {rank} {batch}")
        exact = {"forward_backward": self.fixed + batch * self.per_sample, "optimizer": self.optimizer}
        return {
            phase: int(-(-value // self.block) * self.block + chance.uniform(0, self.scatter))
            for phase, value in exact.items()
        }

    def fits(self, batch):
        return all(max(self.peaks(rank, batch).values()) <= limit for rank, limit in enumerate(self.limits))

    def probe(self, batch):
        peaks = [self.peaks(rank, batch) for rank in range(len(self.limits))]
        ranks = [
            RankPeaks(rank=rank, phase_peaks=of, limit_peak_bytes=max(of.values()), available_bytes=limit)
            for rank, (of, limit) in enumerate(zip(peaks, self.limits, strict=True))
        ]
        fits = {"outcome": "fits", "ranks": ranks} if self.fits(batch) else {"outcome": "oom", "ranks": []}
        return Probe(batch_size=batch, run_id="r", seconds=1.0, samples_per_s=10.0, **fits)

    def confirm(self, batch):
        """A fresh process at this size."""
        return proof(batch, "finished" if self.fits(batch) else "oom")

    def is_exact(self, batch):
        """`batch` fits, and the smallest size that needs the tolerance more on the tightest rank does not."""
        need = max(self.peaks(0, batch).values())
        more = batch + 1
        while max(self.peaks(0, more).values()) < need + max(
            batch_decide.TOLERANCE_SHARE * need, batch_decide.TOLERANCE_BYTES
        ):
            more += 1
        return self.fits(batch) and not self.fits(more)


def search(device, predicted=None, no_oom=False):
    """The whole search; what is known at its end."""
    state = asked(device.limits, *([] if predicted is None else [predicted]), kind=device.kind, no_oom=no_oom)
    for _ in range(40):
        step = decide(state)
        if step.action == "probe":
            state = after(state, device.probe(step.batch_size))
        elif step.action == "prove":
            state = after(state, device.confirm(step.batch_size))
        else:
            return state
    raise AssertionError("the search does not end")


PLAIN = Device(fixed=100 * MIB, per_sample=10 * MIB, optimizer=0, limits=(2048 * MIB,))


def proof(size, state="finished"):
    return ConfirmationRun(batch_size=size, run_id="p", state=state, seconds=1.0)


def asked(limits, *lines, kind="cpu", no_oom=False):
    """What is known after these lines under a limit a rank."""
    question = batch_question(device=kind, world_size=len(limits), limits_bytes=list(limits))
    return BatchState((question, *lines), no_oom=no_oom)


def after(state, *lines):
    """What is known after further lines."""
    return replace(state, lines=(*state.lines, *lines))


def with_last(state, line):
    """What is known if the last line were another one."""
    return replace(state, lines=(*state.lines[:-1], line))


def ooms(state):
    return sum(probe.outcome == "oom" for probe in state.probes)


devices = st.builds(
    Device, fixed=st.floats(20 * MIB, 1500 * MIB), per_sample=st.floats(1 * MIB, 400 * MIB),
    optimizer=st.floats(0, 1500 * MIB), limits=st.tuples(st.integers(2000 * MIB, 12000 * MIB)),
    block=st.sampled_from([1, 4096, MIB, 2 * MIB]), scatter=st.integers(0, 2 * MIB), seed=st.integers(0, 1 << 30),
)  # fmt: skip


@settings(max_examples=120)
@given(device=devices, off=st.none() | st.tuples(st.floats(0.9, 1.1), st.floats(0.85, 1.15)))
def test_without_a_prediction_or_with_one_somewhat_off_it_is_exact_in_six_probes_and_one_oom(device, off):
    predicted = None
    if off is not None:
        per_sample, fixed = device.per_sample * off[0], device.fixed * off[1]
        most = max(0, int((device.limits[0] - fixed) / per_sample))
        predicted = Predicted(fixed_bytes=int(fixed), bytes_per_sample=int(per_sample), max_batch=most)
    state = search(device, predicted)
    assert state.confirmations[-1].state == "finished"
    assert device.is_exact(state.confirmations[-1].batch_size)
    assert len(state.probes) <= 6, [(probe.batch_size, probe.outcome) for probe in state.probes]
    assert ooms(state) <= 1


@settings(max_examples=40)
@given(device=devices, nonsense=st.integers(1, 5000))
def test_with_a_prediction_that_is_nonsense_it_is_still_exact(device, nonsense):
    predicted = Predicted(fixed_bytes=0, bytes_per_sample=max(1, device.limits[0] // nonsense), max_batch=nonsense)
    state = search(device, predicted)
    assert device.is_exact(state.confirmations[-1].batch_size)


@settings(max_examples=40)
@given(device=devices, second=st.integers(1900 * MIB, 12000 * MIB))
def test_the_tightest_of_two_ranks_decides_and_is_named(device, second):
    both = replace(device, limits=(device.limits[0], second))
    state = search(both)
    if not state.confirmations:
        assert not both.fits(1)
        return
    found = answer_of(state)
    assert both.fits(found.max_batch)
    assert ooms(state) <= 1
    if abs(device.limits[0] - second) > 64 * MIB:
        assert found.tightest_rank == (0 if device.limits[0] < second else 1)


@settings(max_examples=40)
@given(device=devices)
def test_no_oom_means_that_memory_never_runs_out(device):
    state = search(device, no_oom=True)
    best = state.confirmations[-1].batch_size
    # One size alone says nothing of the next: 2 is always tried.
    assert ooms(state) == 0 or best == 1
    # A size that would fit by less than the fit's own error is not tried.
    need = max(device.peaks(0, best + 1).values())
    assert device.is_exact(best) or device.limits[0] - need < 32 * MIB


@settings(max_examples=40)
@given(device=devices)
def test_on_a_gpu_the_next_aligned_size_is_the_one_that_does_not_fit(device):
    gpu = replace(device, kind="cuda", limits=(device.limits[0] * 8,))
    state = search(gpu)
    best = state.confirmations[-1].batch_size
    assert gpu.fits(best)
    assert not gpu.fits((best // 8 + 1) * 8)
    assert ooms(state) <= 1


def test_a_batch_of_one_that_does_not_fit_ends_the_search_and_a_void_probe_is_repeated():
    state = search(Device(fixed=3000 * MIB, per_sample=MIB, optimizer=0, limits=(2048 * MIB,)))
    assert [probe.batch_size for probe in state.probes] == [1]
    assert decide(state).end_state == "nothing_fits"
    state = asked(PLAIN.limits)
    first = decide(state).batch_size
    void = Probe(batch_size=1, outcome="void", run_id="r", seconds=1.0)
    assert decide(after(state, void)).batch_size == first == 1
    assert decide(after(state, *[void] * 4)).end_state == "failed"


def test_a_confirmation_run_out_of_memory_is_stepped_down_from_by_half_at_most():
    state = search(PLAIN)
    first = state.confirmations[-1].batch_size
    oom = proof(first, "oom")
    step = decide(with_last(state, oom))
    assert step.action == "prove"
    assert step.batch_size < first
    assert "fresh process" in step.why
    device = Device(fixed=100 * MIB, per_sample=MIB / 100, optimizer=0, limits=(104 * MIB,))
    state = search(device)
    oom = proof(300, "oom")
    step = decide(with_last(state, oom))
    assert (step.action, step.batch_size) == ("prove", 150)


def test_the_tightest_bound_is_named_and_so_is_what_was_not_tried_or_fills_the_data():
    device = Device(fixed=100 * MIB, per_sample=10 * MIB, optimizer=0, limits=(600 * MIB,))
    fitting = [device.probe(size) for size in (20, 39)]
    too_large = replace_struct(device.probe(56), outcome="oom")
    confirmations = [proof(39, "oom")]
    state = asked((600 * MIB,), *fitting, too_large)
    assert "of the probe in which it fitted" in decide(after(state, *confirmations)).why
    confirmations.append(proof(36, "finished"))
    found = answer_of(after(state, *confirmations))
    assert (found.max_batch, found.too_large) == (36, 39)
    assert found.certainty == "39 ran out of memory; 2 sizes between them not confirmed"
    device = Device(fixed=100 * MIB, per_sample=4 * MIB, optimizer=0, limits=(2048 * MIB,))
    filled = replace_struct(device.probe(100), fills_data=True)
    confirmation = proof(100, "finished")
    state = asked(device.limits, device.probe(50), filled, confirmation)
    assert answer_of(state).certainty == "the script's data fills no batch above 100"
    device = Device(fixed=100 * MIB, per_sample=10 * MIB, optimizer=0, limits=(600 * MIB,))
    fitting = [device.probe(size) for size in range(1, MAX_PROBES)]
    state = asked(device.limits, *fitting, device.probe(60))
    step = decide(state)
    assert (step.action, step.batch_size) == ("prove", MAX_PROBES - 1)
    assert step.why.startswith(f"a search tries at most {MAX_PROBES} sizes, ")
    confirmation = proof(MAX_PROBES - 1, "finished")
    found = answer_of(after(state, confirmation))
    assert found.certainty == "60 ran out of memory; 44 sizes between them not confirmed"


@dataclass(frozen=True)
class Bent(Device):
    """A peak at two points of the step, as real ones have it: up to some size where the gradients are, then where the
    logits are."""

    def peaks(self, rank, batch):
        bent = max(self.optimizer + batch * self.per_sample / 8, self.fixed + batch * self.per_sample)
        return {"forward_backward": int(bent), "optimizer": int(self.optimizer)}


BENT = Bent(fixed=445 * MIB, per_sample=110.4 * MIB, optimizer=833 * MIB, limits=(2048 * MIB,))
BENT_PREDICTED = Predicted(fixed_bytes=445 * MIB, bytes_per_sample=int(110.4 * MIB), max_batch=14)


def test_a_bend_shows_in_a_slope_below_the_predicted_one_or_is_set_right_by_a_size_between():
    state = search(BENT, BENT_PREDICTED)
    assert state.probes[0].batch_size == 1
    assert ooms(state) <= 1
    assert len(state.probes) <= 6
    assert [confirmation.state for confirmation in state.confirmations] == ["finished"]
    assert BENT.is_exact(state.confirmations[-1].batch_size)
    state = search(BENT)
    assert BENT.is_exact(state.confirmations[-1].batch_size)
    assert len(state.confirmations) <= 2


def test_the_answer_names_limits_margins_and_the_fastest_aligned_size():
    state = search(PLAIN)
    found = answer_of(state)
    assert PLAIN.is_exact(found.max_batch)
    assert found.aligned_batch == found.max_batch // 8 * 8
    margin = sum(margins_of(state, state.tightest(found.max_batch), found.max_batch).values())
    leaving_it = int((2048 * MIB - margin - 100 * MIB) / (10 * MIB))
    assert (found.recommended_batch, found.phase) == (min(found.max_batch, leaving_it), "forward_backward")
    assert found.bytes_per_sample == pytest.approx(10 * MIB, rel=0.02)
    assert found.headroom_bytes == 2048 * MIB - (100 + 10 * found.max_batch) * MIB
    assert f"{found.too_large} ran out of memory" in found.certainty
    assert "leaves" in found.recommended_why
    device = Device(fixed=90 * MIB, per_sample=9 * MIB, optimizer=0, limits=(100 * MIB,))
    found = answer_of(search(device))
    assert (found.max_batch, found.recommended_batch) == (1, None)
    assert found.recommended_why.startswith("no size leaves 3 MiB for a long run")
    assert [aligned(size) for size in (7, 8, 23, 511, 512, 600)] == [None, 8, 16, 504, 512, 576]


@pytest.mark.parametrize("above_fit", [0, 3 * MIB, 6 * MIB])
def test_the_recommended_batch_has_its_margin_by_the_measured_peak(above_fit):
    state = search(PLAIN)
    confirmation = state.confirmations[-1]
    peak = (100 + 10 * confirmation.batch_size) * MIB + above_fit
    confirmed = replace_struct(confirmation, ranks=[RankPeaks(rank=0, peak_allocated_bytes=peak)])
    found = answer_of(with_last(state, confirmed))
    assert found.headroom_bytes == 2048 * MIB - peak
    margin = sum(margins_of(state, state.tightest(found.max_batch), found.max_batch).values())
    left = found.headroom_bytes + 10 * MIB * (found.max_batch - found.recommended_batch)
    assert left >= margin > left - 10 * MIB, "one sample more would take of the margin"
    assert f"leaves {mebibytes(left)} by the fit, of which {mebibytes(margin)} are for" in found.recommended_why


@dataclass(frozen=True)
class Measured(Device):
    """A T5 of two layers as it was measured on a CPU: up to some size each sample takes 2 % more than above it."""

    def peaks(self, rank, batch):
        small = min(batch, 8)
        need = self.fixed + small * 68.28 * MIB + (batch - small) * self.per_sample
        return {"forward_backward": int(need), "optimizer": int(self.optimizer)}


T5 = Measured(fixed=149.6 * MIB, per_sample=66.83 * MIB, optimizer=100 * MIB, limits=(2048 * MIB,))


def test_a_size_that_fits_by_the_fit_and_by_the_prediction_is_confirmed_without_trying_one_near_it():
    state = search(T5, Predicted(fixed_bytes=136 * MIB, bytes_per_sample=int(66.8 * MIB), max_batch=28))
    assert [(probe.batch_size, probe.outcome) for probe in state.probes] == [(3, "fits"), (15, "fits"), (29, "oom")]
    assert [(confirmation.batch_size, confirmation.state) for confirmation in state.confirmations] == [(28, "finished")]


H100, _ = read_all(Path(__file__).with_name("h100_batch_search.jsonl"), BatchLine)
"""BERT large on an H100 under 16 GiB: a prediction, probes, and the fresh processes, of which one failed at 32."""
WARM = {line.batch_size: line.ranks[0] for line in H100 if isinstance(line, Probe) and line.outcome == "fits"}
"""The peaks of each size that fitted."""


@dataclass(frozen=True)
class Replay:
    """The H100 of that journal. A size between its probes is on the line through their neighbours.

    A size fits while its reserved memory is within the limit; a fresh process reserves `fresh_bytes` more.
    """

    fresh_bytes: int = 0
    is_expandable: bool = False
    names_missing: bool = True
    limits: tuple[int, ...] = (16 << 30,)
    kind: str = "cuda"

    def peaks(self, batch):
        sizes = sorted(WARM)
        low = sizes[min(max(bisect(sizes, batch) - 1, 0), len(sizes) - 2)]
        high = sizes[sizes.index(low) + 1]

        def between(low_bytes, high_bytes):
            return round(low_bytes + (high_bytes - low_bytes) * (batch - low) / (high - low))

        below, above = WARM[low], WARM[high]
        phases = {name: between(peak, above.phase_peaks[name]) for name, peak in below.phase_peaks.items()}
        # Expandable segments leave a part of a page of 2 MiB.
        kept = [0 if self.is_expandable else p.peak_reserved_bytes - p.peak_allocated_bytes for p in (below, above)]
        allocated = max(phases.values())
        return RankPeaks(
            rank=0,
            phase_peaks=phases,
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=-(-(allocated + between(*kept)) // (2 * MIB)) * 2 * MIB,
            available_bytes=self.limits[0],
        )

    def probe(self, batch):
        peaks = self.peaks(batch)
        if peaks.peak_reserved_bytes > self.limits[0]:
            return Probe(batch_size=batch, outcome="oom", run_id="r", seconds=1.0)
        return Probe(batch_size=batch, outcome="fits", run_id="r", seconds=1.0, samples_per_s=10.0, ranks=[peaks])

    def confirm(self, batch):
        peaks = self.peaks(batch)
        missing = peaks.peak_reserved_bytes + self.fresh_bytes - self.limits[0]
        if missing <= 0:
            return replace_struct(proof(batch), ranks=[peaks])
        return replace_struct(proof(batch, "oom"), missing_bytes=missing if self.names_missing else None)


@pytest.mark.parametrize("predicted_max", [34, None, 15, 20, 28, 31, 32, 33, 40, 60])
def test_h100_the_reserved_memory_binds_and_four_probes_and_two_fresh_processes_are_enough(predicted_max):
    predicted = None if predicted_max is None else replace_struct(H100[0], max_batch=predicted_max)
    state = search(Replay(), predicted)
    found = answer_of(state)
    assert found.max_batch in (30, 31)
    assert len(state.probes) <= 4, [(probe.batch_size, probe.outcome) for probe in state.probes]
    assert len(state.confirmations) <= 2
    assert ooms(state) <= 1
    reserved = Replay().peaks(found.max_batch).peak_reserved_bytes
    assert found.headroom_bytes == (16 << 30) - reserved, "the rest of the limit beside what is reserved"
    assert (found.too_large, found.certainty[:20]) == (32, "32 ran out of memory")


def test_h100_takes_three_probes_as_it_was_asked_and_expandable_segments_follow_allocated_memory():
    state = search(Replay(), H100[0])
    assert [(probe.batch_size, probe.outcome) for probe in state.probes] == [(4, "fits"), (19, "fits"), (40, "oom")]
    assert [(run.batch_size, run.state) for run in state.confirmations] == [(32, "oom"), (31, "finished")]
    state = search(Replay(is_expandable=True), H100[0])
    assert answer_of(state).max_batch == 33
    assert len(state.probes) <= 4


@pytest.mark.parametrize("names_missing", [True, False])
def test_h100_a_fresh_process_that_needs_more_is_stepped_down_from_by_what_was_missing(names_missing):
    state = search(Replay(fresh_bytes=700 * MIB, names_missing=names_missing), H100[0])
    assert [run.batch_size for run in state.confirmations] == ([32, 29] if names_missing else [32, 31, 29])
    assert state.confirmations[-1].state == "finished"
    assert len(state.probes) <= 4, "no search by every size between"


def test_a_gpu_names_the_next_size_too_large_by_the_fit_and_a_flat_line_is_set_right_by_probes():
    device = Device(fixed=100 * MIB, per_sample=1000 * MIB, optimizer=0, limits=(9500 * MIB,), kind="cuda")
    state = search(device)
    assert (state.confirmations[-1].batch_size, state.too_large) == (9, 16)
    assert answer_of(state).certainty.startswith("16 ran out of memory; by the fit 10 needs 10,100 MiB of 9,500 MiB")
    device = Flat(fixed=8000 * MIB, per_sample=500 * MIB, optimizer=12000 * MIB, limits=(32000 * MIB,), kind="cuda")
    state = search(device, Predicted(start=4))
    assert state.confirmations[-1].state == "finished"
    assert 0.9 * 48 <= state.confirmations[-1].batch_size <= 48
    assert len(state.probes) <= 8
    assert len(state.confirmations) <= 3


@pytest.mark.parametrize("start", [1, 2, 3])
def test_a_gpu_is_not_left_at_a_size_far_below_the_next_aligned_one(start):
    device = Device(fixed=100 * MIB, per_sample=1000 * MIB, optimizer=0, limits=(4500 * MIB,), kind="cuda")
    state = search(device, Predicted(start=start))
    assert (state.confirmations[-1].batch_size, state.confirmations[-1].state) == (4, "finished")


@dataclass(frozen=True)
class Flat(Device):
    """A script, whose only phase is flat while the optimizer step needs more than the batch."""

    def peaks(self, rank, batch):
        return {"step": int(max(self.optimizer, self.fixed + batch * self.per_sample))}

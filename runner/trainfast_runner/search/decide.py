"""What a search does next: from what its journal holds to one step, with the reason in words. Touches nothing.

The search goes up to the boundary from below: no size is tried that might not fit, going by the fit through the sizes
before and how far that may be off. Once the sizes that surely fit and those that surely do not are as close as an
exact answer needs, one that should not fit is tried. So memory runs out once, and the largest sure size is the answer,
which a fresh process then proves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainfast_runner.search.fit import APART, NOISE, Fit, Point, fit, largest
from trainfast_runner.search.journal import AnyLine, Asked, Predicted, Probe, Proof, RankPeaks
from trainfast_runner.units import mebibytes

MOST = 1 << 20
"""No batch size above this is tried."""
MOST_PROBES = 16
MOST_VOID = 4
TOLERANCE_SHARE, TOLERANCE_BYTES = 0.03, 48 << 20
"""A maximum is exact when the smallest size that needs this much more runs out of memory."""
ALIGNED = 8
SMALL_SHARE = 8
"""The first size is this part of the predicted maximum: quick, and large enough for a slope."""
SPARE = {"cpu": 0.5, "cuda": 1.0}
"""How much of the fit's error a size that was not tried has to spare to be proved. A GPU's steps are short."""
SPARE_AGREED = {"cpu": 0.0, "cuda": 1.0}
"""The same of what its slope may be off, where the prediction says the same slope: on a CPU that of two small sizes was
0 to 2 % above that further up, never below it."""
APART_SHARE = 3 / 8
"""So far apart, as a share of the predicted maximum, the first two sizes are."""


@dataclass(frozen=True)
class Known:
    """What decides: the question, and every size tried so far. Limits are bytes, by rank, or none on an open GPU."""

    device: str
    world_size: int
    limits_bytes: tuple[int, ...] = ()
    predicted: Predicted | None = None
    probes: tuple[Probe, ...] = ()
    proofs: tuple[Proof, ...] = ()
    no_oom: bool = False

    @property
    def fitting(self) -> list[Probe]:
        """The sizes that fitted, smallest first."""
        return sorted((one for one in self.probes if one.outcome == "fits"), key=lambda one: one.batch_size)

    @property
    def best(self) -> int:
        """The largest size that fitted; 0 before any did."""
        return max((one.batch_size for one in self.fitting), default=0)

    @property
    def too_large(self) -> int | None:
        """The smallest size that ran out of memory above those that fitted."""
        return min((one.batch_size for one in self.probes if one.outcome == "oom"), default=None)


@dataclass(frozen=True)
class Step:
    """What comes next. `action` is probe, prove, answer, nothing_fits or fail; `needs_bytes` by the fit, if there is
    one, of the tightest rank."""

    action: str
    why: str
    batch_size: int | None = None
    fits: tuple[Fit, ...] = ()
    tightest_rank: int | None = None
    needs_bytes: int | None = None


def known(lines: Sequence[AnyLine], no_oom: bool = False) -> Known:
    """What a journal says so far."""
    asked = next(line for line in lines if isinstance(line, Asked))
    predicted = [line for line in lines if isinstance(line, Predicted)]
    return Known(
        device=asked.device,
        world_size=asked.world_size,
        limits_bytes=tuple(asked.limits_bytes),
        predicted=predicted[-1] if predicted else None,
        probes=tuple(line for line in lines if isinstance(line, Probe)),
        proofs=tuple(line for line in lines if isinstance(line, Proof)),
        no_oom=no_oom,
    )


def fits_of(known: Known) -> tuple[Fit, ...]:
    """The fit of each rank; empty before any size fitted."""
    fitting = known.fitting
    if not fitting:
        return ()
    found = _fits(known, fitting, known.predicted.bytes_per_sample if known.predicted is not None else None)
    too_large = known.too_large
    if too_large is not None and len(fitting) == 1 and all(one.surely_fits(too_large) for one in found):
        # The prediction said that this would fit.
        found = _fits(known, fitting, None)
    return found


def _fits(known: Known, fitting: Sequence[Probe], slope: float | None) -> tuple[Fit, ...]:
    found = []
    for rank in range(known.world_size):
        points = _points(fitting, rank)
        limit = _limit(known, rank)
        if points and limit is not None:
            found.append(fit(rank, points, limit, NOISE[known.device], slope))
    return tuple(found)


def tightest(fits: Sequence[Fit], batch_size: int) -> Fit:
    """The fit that leaves the least at this batch size."""
    return min(fits, key=lambda one: one.limit_bytes - one.need_bytes(batch_size))


def decide(known: Known) -> Step:
    """The next step."""
    if sum(one.outcome == "void" for one in known.probes) >= MOST_VOID:
        return Step("fail", f"other processes took memory in {MOST_VOID} probes: nothing can be measured here")
    fits = fits_of(known)
    step = _next(known, fits)
    if not fits or step.batch_size is None:
        return step
    size: int = step.batch_size
    tight = tightest(fits, size)
    return Step(step.action, step.why, size, fits, tight.rank, round(tight.need_bytes(size)))


def _next(known: Known, fits: tuple[Fit, ...]) -> Step:
    if known.proofs:
        return _after_proof(known, fits)
    if not fits:
        return _first(known)
    best, too_large = known.best, known.too_large
    if too_large is not None:
        likely = max(best, min(_likely(known, fits), too_large - 1))
        if too_large <= ceiling(known, fits, likely):
            return Step("prove", _why_proof(known, fits, likely, f"{too_large} does not"), likely)
    tried = sum(one.outcome != "void" for one in known.probes)
    if tried >= MOST_PROBES:
        return Step("prove", f"{tried} sizes tried: a fresh process runs the largest that fitted, {best}", best)
    if too_large is not None:
        return _between(known, fits, best, too_large)
    return _upwards(known, fits)


def _first(known: Known) -> Step:
    """The first size, or a smaller one after it did not fit."""
    too_large = known.too_large
    if too_large == 1:
        return Step("nothing_fits", "a batch of 1 does not fit")
    if too_large is not None:
        smaller = max(1, too_large // 4)
        return Step("probe", f"{too_large} does not fit, against the prediction: much smaller", smaller)
    predicted = known.predicted
    most = predicted.max_batch if predicted is not None else None
    if predicted is None or not most or most < 2:
        why = "nothing is predicted: the smallest first"
        if most is not None:
            why = f"by the prediction {'nothing' if most == 0 else '1 and no more'} fits: the smallest first"
        return Step("probe", why, 1)
    most = min(most, MOST)
    small = max(1, most // SMALL_SHARE, min(predicted.linear_from, most // 2))
    return Step("probe", f"by the prediction {most} fits: a small size first, to see how true that is", small)


def _upwards(known: Known, fits: tuple[Fit, ...]) -> Step:
    """Nothing was too large yet."""
    best = known.best
    if best >= MOST:
        return Step("prove", f"no size above {MOST} is tried: a fresh process runs {best}", best)
    likely = max(best, _likely(known, fits))
    beyond = largest(lambda size: not any(one.surely_not(size) for one in fits), MOST) + 1
    top = ceiling(known, fits, likely)
    # Between what likely fits and what surely does not there is nothing left that would be worth a probe.
    settled = beyond <= min(top, MOST) or _should_run_out(known, fits, top)
    target = best if settled else _target(known, fits)
    if target > best:
        return Step("probe", _why_up(tightest(fits, target), target, len(known.fitting), known), target)
    # A single point has no slope of its own, and proves nothing of other sizes.
    if known.no_oom and len(known.fitting) > 1:
        tight = tightest(fits, likely + 1)
        needs = f"{mebibytes(tight.need_bytes(likely + 1))} of {mebibytes(tight.limit_bytes)}"
        above = f"by the fit {likely + 1} would need {needs}"
        error = f"give or take {mebibytes(tight.error_at(likely + 1))}"
        return Step("prove", _why_proof(known, fits, likely, f"{above}, {error}"), likely)
    size = min(max(beyond, likely + 1), top)
    tight = tightest(fits, size)
    over = tight.need_bytes(size) - tight.limit_bytes
    words = f"{likely} should fit; whether {size} does is within the error of the fit"
    if over > 0:
        words = (
            f"{likely} should fit; by the fit {size} is {mebibytes(over)} too large: that it does not fit is to be seen"
        )
    return Step("probe", words, size)


def _should_run_out(known: Known, fits: tuple[Fit, ...], size: int) -> bool:
    """Whether trying it at once is the cheaper way to know, although it might fit within the error of the fit.

    Running out of memory takes a part of a step; a size near the maximum, which would make the fit surer, two steps.
    """
    if known.no_oom or len(known.fitting) < 2 or size > MOST:
        return False
    return any(one.need_bytes(size) > one.limit_bytes for one in fits)


def _sure(known: Known, fits: tuple[Fit, ...]) -> int:
    """The largest size that fits even if the fit is off as far as it may be; 0 with one point, which is no fit."""
    if len(known.fitting) < 2:
        return 0
    return largest(lambda size: all(one.surely_fits(size) for one in fits), MOST)


def _likely(known: Known, fits: tuple[Fit, ...]) -> int:
    """The largest size to prove without having tried it; 0 with one point, which is no fit.

    On a CPU it is enough that half the error is to spare: trying it first would take two long steps nearly always, and
    a proof that fails a short one now and then. Where that leaves the answer open and the prediction agrees, it is
    enough that what a peak scatters is to spare. Where memory is not to run out it has to be sure.
    """
    if len(known.fitting) < 2:
        return 0

    def up_to(spare: Callable[[Fit, int], float]) -> int:
        return largest(
            lambda size: all(one.need_bytes(size) + spare(one, size) <= one.limit_bytes for one in fits), MOST
        )

    if known.no_oom:
        return up_to(lambda one, size: one.error_at(size))
    careful = up_to(lambda one, size: SPARE[known.device] * one.error_at(size))
    is_open = not _should_run_out(known, fits, ceiling(known, fits, careful))
    if not is_open or not all(one.agreed for one in fits):
        return careful
    return max(careful, up_to(lambda one, size: one.error_at(size, SPARE_AGREED[known.device])))


def _target(known: Known, fits: tuple[Fit, ...]) -> int:
    """The next size up: the largest sure one. Half of what is predicted is enough for a first slope, and is quick."""
    target = largest(lambda size: all(one.surely_fits(size) for one in fits), MOST)
    predicted = known.predicted
    if len(known.fitting) == 1 and predicted is not None and predicted.max_batch:
        most = predicted.max_batch
        return min(target, max(int(known.best / APART) + 1, most // 2, known.best + round(APART_SHARE * most)))
    return target


def _why_proof(known: Known, fits: tuple[Fit, ...], size: int, above: str) -> str:
    words = f"{size} fits"
    if size > known.best:
        tight = tightest(fits, size)
        needs = f"{mebibytes(tight.need_bytes(size))} of {mebibytes(tight.limit_bytes)}"
        words = f"by the fit {size} needs {needs}, give or take {mebibytes(tight.error_at(size))},"
    return f"{words} and {above}: a fresh process runs {size}, with data"


def _between(known: Known, fits: tuple[Fit, ...], best: int, too_large: int) -> Step:
    """Something fitted and something was too large, further apart than the tolerance."""
    target = largest(lambda size: all(one.surely_fits(size) for one in fits), MOST)
    if best < target < too_large:
        return Step("probe", _why_up(tightest(fits, target), target, len(known.fitting), known), target)
    if sum(one.outcome == "oom" for one in known.probes) == 1:
        size = largest(lambda size: ceiling(known, fits, size) < too_large, too_large - 1) + 1
        why = f"{too_large} does not fit: {size} needs as much less as decides it"
    else:
        size = (best + too_large) // 2
        why = f"{too_large} does not fit either: half-way to {best}, which does"
    return Step("probe", why, min(max(size, best + 1), too_large - 1))


def _after_proof(known: Known, fits: tuple[Fit, ...]) -> Step:
    """The last proof decides: it held, or memory ran out in it and a smaller one is proved."""
    last = known.proofs[-1]
    if last.state == "finished":
        return Step("answer", f"a fresh process finished with {last.batch_size}", last.batch_size)
    if last.state != "oom":
        return Step("fail", f"the proof of {last.batch_size} ended otherwise: {last.state}: {last.reason}")
    if last.batch_size == 1:
        return Step("nothing_fits", "a batch of 1 does not fit in a fresh process")
    failed = min(last.batch_size, known.too_large or last.batch_size)
    if _is_refuted(known, fits, failed):
        middle = (known.best + failed) // 2
        why = f"{failed} ran out of memory, against the fit: half-way to {known.best}, which fits, first"
        return Step("probe", why, middle)
    room = ceiling(known, fits, last.batch_size) - last.batch_size if fits else 1
    smaller = min(failed - 1, last.batch_size - max(1, room // 2))
    if fits:
        # Sizes that were tried since then may have set the fit right.
        smaller = min(smaller, max(known.best, _sure(known, fits)))
    smaller = max(1, smaller)
    where = "in a fresh process"
    if any(probe.batch_size == last.batch_size for probe in known.fitting):
        where += ", which loads data and places its blocks otherwise than the warm one that it fitted in"
    return Step("prove", f"{last.batch_size} ran out of memory {where}: {smaller} is proved instead", smaller)


def _is_refuted(known: Known, fits: tuple[Fit, ...], batch_size: int) -> bool:
    """Whether the fit is wrong altogether, and not by what a fresh process needs more: the size that ran out should
    have left more than the tolerance, or is the second to run out, with sizes between it and those that fit."""
    tried = sum(one.outcome != "void" for one in known.probes)
    if known.best + 1 >= batch_size or tried >= MOST_PROBES or not fits:
        return False
    if not all(one.surely_fits(batch_size) for one in fits):
        return False  # a size tried since then has set it right
    left = min(one.limit_bytes - one.need_bytes(batch_size) for one in fits)
    return left > TOLERANCE_BYTES or len(known.proofs) > 1


def ceiling(known: Known, fits: tuple[Fit, ...], best: int) -> int:
    """The smallest size above `best` that must run out of memory for `best` to be the maximum.

    On a GPU the next aligned size; on a CPU the one that needs 3 % more, or 48 MiB where that is more.
    """
    if known.device == "cuda":
        return (best // ALIGNED + 1) * ALIGNED
    tight = tightest(fits, best)
    more = max(TOLERANCE_SHARE * tight.need_bytes(best), TOLERANCE_BYTES)

    def is_near(size: int) -> bool:
        """Whether it needs less than that more, growing as fast as the error of the fit lets it."""
        faster = tight.error_per_sample * max(0, size - best)
        return tight.need_bytes(size) + faster < tight.need_bytes(best) + more

    return max(best, largest(is_near, MOST)) + 1


def beyond_of(known: Known, rank: int) -> int:
    """What the rank's limit counts beyond its peak, in bytes, as it was seen last."""
    beyond = 0
    for probe in known.fitting:
        for peaks in probe.ranks:
            if peaks.rank == rank and peaks.phase_peaks:
                beyond = _beyond(peaks, beyond)
    return beyond


def _points(fitting: Sequence[Probe], rank: int) -> list[Point]:
    """A rank's peaks by batch size, raised by what its limit counts beyond them."""
    found: dict[int, Point] = {}
    beyond = 0
    for probe in fitting:
        peaks = next((one for one in probe.ranks if one.rank == rank), None)
        if peaks is None or not peaks.phase_peaks:
            continue
        beyond = _beyond(peaks, beyond)
        raised = {phase: peak + beyond for phase, peak in peaks.phase_peaks.items()}
        found[probe.batch_size] = Point(probe.batch_size, raised)
    return list(found.values())


def _beyond(peaks: RankPeaks, before: int) -> int:
    if peaks.limit_peak_bytes is None:
        return before
    return max(0, peaks.limit_peak_bytes - max(peaks.phase_peaks.values()))


def _limit(known: Known, rank: int) -> int | None:
    """What the rank may use: its limit, or less where it said so when it was last asked (a GPU that is not empty)."""
    rooms = [one.room_bytes for probe in known.probes for one in probe.ranks if one.rank == rank and one.room_bytes]
    limits = [known.limits_bytes[min(rank, len(known.limits_bytes) - 1)]] if known.limits_bytes else []
    return min([*limits, *rooms[-1:]], default=None)


def _why_up(tight: Fit, target: int, points: int, known: Known) -> str:
    needs = f"{mebibytes(tight.need_bytes(target))} of {mebibytes(tight.limit_bytes)}"
    on = f" on rank {tight.rank}" if known.world_size > 1 else ""
    if points > 1:
        return (
            f"by the fit {target} fits even if it is off by {mebibytes(tight.error_at(target))}: it needs {needs}{on}"
        )
    if known.predicted is not None and known.predicted.bytes_per_sample is not None:
        return f"with the predicted growth per sample from here {target} fits: it needs {needs}{on}"
    return f"{target} fits even if all memory grows with the batch: {needs}{on}"

"""A bench: a preset's variants or a grid of settings beside their baseline, run interleaved, as a table.

Runs interleave (A B A B), so that drift of the machine affects every row equally. Rows that differ only in knobs that
need no new process are trained by one warm process in turn.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import UserError, highest
from trainfast_runner.records.home import Home, conductor_lock
from trainfast_runner.records.result import Result, RunError
from trainfast_runner.records.run_lines import Step, StepTotals
from trainfast_runner.records.run_records import RunRecords, read_records
from trainfast_runner.records.worker_lines import TrialLine
from trainfast_runner.results.comparison import (
    BETTER,
    NOISE,
    STRICT_THRESHOLDS,
    WORSE,
    compare,
    paired_interval,
    speeds_rank,
)
from trainfast_runner.results.summary import summarise
from trainfast_runner.results.verdict import Verdict, first_difference
from trainfast_runner.running.planning import DevicesBusy, RunPlan
from trainfast_runner.search.conductor import Cancelled, SearchRuns, wait_for_result
from trainfast_runner.search.journal import Line, Waiting
from trainfast_runner.search.searches import (
    SearchOptions,
    new_search,
    script_planner,
    takes_warm_trials,
    with_knobs,
)
from trainfast_runner.settings import presets
from trainfast_runner.settings.knob_values import KnobValue, KnobValues, whole_number
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, Vary, combinations_of, fewest_to_drop, knob, setting_of
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.spec import SET_BY_A_BATCH_SEARCH, RunSpec, from_preset, published_for
from trainfast_runner.worker.shared.words import TRIAL

MAX_ROWS = 200
"""The most rows of a grid; 200 runs of a quarter of a minute take 50 minutes."""
AS_IT_IS_ID = "as it is"
"""The baseline's id where the preset of a script sets none of the varied knobs."""
REFUSED = "refused"
"""State of a row that this machine or training Python cannot run."""
NOT_RUN = "not_run"
"""State of a row whose device was in use, or that a stopped bench did not reach."""
WARM_KNOBS = tuple(name for name, entry in KNOBS_BY_NAME.items() if entry.changes_in_warm_process)
"""The knobs by which the rows of one process may differ."""
RowResult = Result | UserError
"""The result of one run of a row, or the error that kept it from running."""


@dataclass(frozen=True)
class PlannedRow:
    """One row to be run."""

    id: str
    spec: RunSpec
    published: Mapping[str, Any]
    plan: Callable[[], RunPlan] | None = None
    """Plans a row of a user's own script; None for a preset's. Raises UserError."""


@dataclass(frozen=True)
class Bench:
    """The rows to be run, the baseline among them."""

    preset: str
    title: str
    baseline_id: str
    rows: tuple[PlannedRow, ...]
    unpublished: str = ""
    """Why the published figures are left out; empty if they are not."""
    varied: tuple[str, ...] = ()
    """The knobs of `--vary`, whose values are in the ids."""


def prepare_variants(reference: str, settings: Sequence[str] = (), scale_batch: float = 1.0) -> Bench:
    """Return the rows of PRESET, or for NAME/VARIANT that one and the baseline, with every setting applied.

    `scale_batch` multiplies each row's batch_size, which stays at least 1. Raises UserError.
    """
    preset, chosen_variant = presets.load(reference)
    baseline = preset.baseline_variant
    if baseline is None:
        advice = f"trainfast-tui bench {preset.name} --vary batch_size=8,16"
        raise UserError(f"preset {preset.name} has no variants to compare", key=reference, advice=advice)
    planned_rows = []
    unpublished = ""
    for variant in preset.variants:
        if chosen_variant is None or variant.id in (chosen_variant.id, baseline.id):
            spec = from_preset(preset, variant, settings)
            published, reason = published_for(preset, variant, spec)
            planned_rows.append(PlannedRow(variant.id, _scaled(spec, scale_batch), published))
            unpublished = unpublished or reason
    return Bench(preset.name, preset.title, baseline.id, tuple(planned_rows), unpublished)


def _scaled(spec: RunSpec, factor: float) -> RunSpec:
    """Return the run with its batch_size multiplied by `factor`, at least 1."""
    if factor == 1.0:
        return spec
    return spec.with_overrides(batch_size=max(1, round(whole_number(spec.knobs, "batch_size") * factor)))


def prepare_grid(reference: str, vary: Vary, settings: Sequence[str] = (), scale_batch: float = 1.0) -> Bench:
    """Return a row for each combination of the varied values, on top of PRESET or PRESET/VARIANT.

    A PRESET with variants gets these rows for every variant. The baseline is the preset (or its baseline variant, or
    VARIANT) at its own settings, a row of its own unless the grid has it. Raises UserError for too many rows.
    """
    preset, chosen_variant = presets.load(reference)
    if scale_batch != 1.0 and "batch_size" in vary:
        raise UserError("--scale-batch would change the sizes of --vary batch_size", key="--scale-batch")
    bases = preset.variants if chosen_variant is None and preset.variants else (chosen_variant,)
    _check_count(vary, len(bases))
    baseline = preset.baseline_variant if chosen_variant is None else chosen_variant
    planned_rows: list[PlannedRow] = []
    baseline_id = unpublished = ""
    for base in bases:
        spec = _scaled(from_preset(preset, base, settings), scale_batch)
        own_knobs = {name: spec.knobs[name] for name in vary}
        prefix = f"{base.id} " if base is not None and len(bases) > 1 else ""
        combinations = list(combinations_of(vary))
        if base is baseline:
            baseline_id = prefix + _id_of(own_knobs)
            combinations = combinations if own_knobs in combinations else [own_knobs, *combinations]
        # Published figures are of the variant's own settings.
        published, reason = ({}, "") if base is None else published_for(preset, base, spec)
        unpublished = unpublished or reason
        for combination in combinations:
            figures = published if combination == own_knobs else {}
            planned_rows.append(PlannedRow(prefix + _id_of(combination), with_knobs(spec, combination), figures))
    return Bench(preset.name, preset.title, baseline_id, tuple(planned_rows), unpublished, tuple(vary))


def prepare_script_grid(preset: ScriptPreset, vary: Vary, settings: Sequence[str], python: str | None) -> Bench:
    """Return a row for each combination of the varied values; the baseline is the script at the preset's own.

    Raises UserError without varied values, and for too many rows.
    """
    if not vary:
        advice = f"trainfast-tui bench {preset.name} --vary batch_size=8,16"
        raise UserError(f"{preset.name} is a script: name the values to compare", key="--vary", advice=advice)
    _check_count(vary, 1)
    base = {"steps": knob("steps").default, **preset.knobs, **dict(setting_of(setting) for setting in settings)}
    own_knobs = {name: base[name] for name in vary if name in base}
    combinations = list(combinations_of(vary))
    if own_knobs not in combinations:
        combinations = [own_knobs, *combinations]
    plan_script_run = script_planner(preset, settings, python, SET_BY_A_BATCH_SEARCH)
    rows = []
    for combination in combinations:
        knobs = {**base, **combination}
        spec = RunSpec(preset.name, None, preset.title, model={}, data={}, knobs=knobs, overrides=tuple(knobs))
        rows.append(PlannedRow(_id_of(combination), spec, {}, partial(plan_script_run, knobs)))
    return Bench(preset.name, preset.title, _id_of(own_knobs), tuple(rows), varied=tuple(vary))


def _id_of(combination: Mapping[str, KnobValue]) -> str:
    """Return the id of a row: its settings as they are typed."""
    return (
        " ".join(f"{name}={KNOBS_BY_NAME[name].text_of(value)}" for name, value in combination.items()) or AS_IT_IS_ID
    )


def _check_count(vary: Vary, bases: int) -> None:
    """Raise UserError with the count and the fewest knobs to drop if there are more than `MAX_ROWS` rows."""
    count = bases * math.prod(map(len, vary.values()))
    dropped, left_rows = fewest_to_drop(vary, count, MAX_ROWS)
    if dropped:
        advice = f"dropping --vary {' and --vary '.join(dropped)}, which leaves {left_rows:,}"
        raise UserError(f"the grid has {count:,} rows, more than {MAX_ROWS}", key="--vary", advice=advice)


def run_order(bench: Bench, repeat: int, groups: Mapping[str, str]) -> Iterator[PlannedRow]:
    """Yield the row of every run: the baseline first in each repetition, rows of one group after each other."""
    rows = sorted(bench.rows, key=lambda row: row.id != bench.baseline_id)
    # A group stands where its first row stands.
    order = list(dict.fromkeys(groups.get(row.id, row.id) for row in rows))
    rows.sort(key=lambda row: order.index(groups.get(row.id, row.id)))
    for _ in range(repeat):
        yield from rows


def warm_groups(bench: Bench) -> dict[str, str]:
    """Return the group of each row that can share a process with another, by row id; the other rows are cold."""
    keys = {row.id: key for row in bench.rows if (key := _process_key(row.spec)) is not None}
    rows = Counter(keys.values())
    return {id: key for id, key in keys.items() if rows[key] > 1}


def _process_key(spec: RunSpec) -> str | None:
    """Everything about a row that only a new process can change; None if the row needs a process of its own."""
    knobs = spec.knobs
    # Under a limit memory is measured in every step, and the speed is marked.
    if not takes_warm_trials(knobs) or knobs["memory_limit"] is not None:
        return None
    process_knobs = {name: value for name, value in knobs.items() if KNOBS_BY_NAME[name].needs_process(value)}
    return msgspec.json.encode((spec.model, spec.data, process_knobs), order="deterministic").decode()


class WarmRows:
    """The warm process of one group of rows; call `end` before the process of another group starts."""

    def __init__(self, runs: SearchRuns, search_id: str) -> None:
        self._runs, self._search_id = runs, search_id
        self._group = ""

    def has_process(self, group: str) -> bool:
        """True if rows of this group need no new process now."""
        return self._runs.process is not None and self._group == group

    def start(self, plan: RunPlan, group: str) -> None:
        """Start the process of a group by the plan of its first row. Raises UserError, as when a device is busy."""
        self._group = group
        self._runs.start_process(dataclasses.replace(plan, search_id=self._search_id), TRIAL)

    def train(self, plan: RunPlan) -> Result:
        """Train a row of the group as long as a run would, and return its result; the process may end with it."""
        process = self._runs.process
        assert process is not None
        knobs = plan.spec.knobs
        untimed, steps = whole_number(knobs, "timing_warmup"), whole_number(knobs, "steps")
        replies = None
        try:
            if process.ready() is not None:
                replies = process.trial({name: knobs[name] for name in WARM_KNOBS}, untimed, steps - untimed)
            if replies is not None and not process.ended_by_error:
                return trial_result(process.directory, knobs, replies)
            result = self._runs.wait_for_process_end()
        except Cancelled:
            self._runs.stop()
            result = wait_for_result(process.directory, lambda: None)
        return msgspec.structs.replace(result, knobs=knobs)

    def end(self) -> None:
        """End the process, if there is one."""
        try:
            self._runs.end_process()
        except Cancelled:
            self._runs.stop()


@contextmanager
def open_warm_rows(
    home: Home, raise_if_cancelled: Callable[[], None], on_wait: Callable[[str], None]
) -> Iterator[WarmRows]:
    """Yield warm rows, whose processes end at the latest with this one: they watch the lock of a search.

    `raise_if_cancelled` is called while a row trains and may raise Cancelled; `on_wait` gets the run waited for.
    """

    def write(line: Line) -> None:
        if isinstance(line, Waiting):
            on_wait(line.run_id)

    with ExitStack() as locks:
        search = new_search(home, "bench")
        locks.callback(shutil.rmtree, search, ignore_errors=True)
        locks.enter_context(conductor_lock(search))
        rows = WarmRows(SearchRuns(home, SearchOptions(), write, raise_if_cancelled), search.name)
        try:
            yield rows
        finally:
            rows.end()


def trial_result(directory: Path, knobs: Mapping[str, Any], answers: Mapping[int, TrialLine]) -> Result:
    """Summarise the process's last trial, which had these knobs and got these answers by rank.

    Of a step's phases a trial records the wait for data; the others are None, as is every figure without a reading in
    its time.
    """
    records = read_records(directory)
    began_ns = min(line.t_ns - round(1e9 * (line.seconds or 0.0)) for line in answers.values())
    ended_ns = max(line.t_ns for line in answers.values())
    steps = {rank: list(_steps(line)) for rank, line in answers.items()}
    totals = {rank: StepTotals() for rank in steps}
    for rank, rank_steps in steps.items():
        for step in rank_steps:
            totals[rank].add(step)
    run = records.run and msgspec.structs.replace(records.run, knobs=dict(knobs))
    trial_records = dataclasses.replace(records, run=run, steps=steps, totals_by_rank=totals, tried=[], thinning=None)
    result = summarise(directory, trial_records, _verdict(trial_records, answers), None)
    # The process's peak may be another trial's.
    peak_bytes = highest(
        sample.memory_used_bytes
        for uuid in (run.device_uuids if run else ())
        for t_ns, sample in records.device_samples.get(uuid, ())
        if began_ns <= t_ns <= ended_ns
    )
    memory = msgspec.structs.replace(result.memory, device_peak_used_bytes=peak_bytes)
    return msgspec.structs.replace(result, memory=memory, seconds=(ended_ns - began_ns) / 1e9)


def _verdict(trial_records: RunRecords, answers: Mapping[int, TrialLine]) -> Verdict:
    """Finished, or failed with a loss that is not finite or with settings that did not run."""
    bad = next((line for line in answers.values() if line.outcome != "measured"), None)
    if bad is not None:
        return Verdict("failed", bad.message or "")
    # `run.json` has the settings of the process's first trial; these records have the last trial's.
    expected_run = trial_records.run and msgspec.structs.replace(trial_records.run, role=None)
    if difference := first_difference(expected_run, trial_records.worker_lines):
        return Verdict("failed", difference, RunError(type="NotWhatWasAsked", message=difference))
    return Verdict("finished", "")


def _steps(line: TrialLine) -> Iterator[Step]:
    """Yield a rank's steps, the untimed ones as warm-up; the last one ended with the answer."""
    times = [*line.untimed_ms, *line.step_ms]
    untimed = [None] * len(line.untimed_ms)
    losses = [*untimed, *line.losses]
    waits = [*untimed, *(line.data_ms or [None] * len(line.step_ms))]
    left_ms = sum(times)
    steps = zip(times, accumulate(times), losses, waits, strict=True)
    for number, (step_ms, done_ms, loss, data_ms) in enumerate(steps, start=1):
        is_warmup = number <= len(untimed)
        yield Step(
            t_ns=line.t_ns - round(1e6 * (left_ms - done_ms)),
            step=number,
            warmup=is_warmup,
            samples=line.samples or 0,
            tokens=line.tokens,
            loss=loss,
            loss_not_finite=loss is None and not is_warmup,
            step_ms=step_ms,
            data_ms=data_ms,
            # The peak over all steps, whichever of them reached it.
            peak_allocated_bytes=line.peak_allocated_bytes,
            peak_reserved_bytes=line.peak_reserved_bytes,
        )


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    id: str
    state: str
    reason: str
    result: Result | None
    """The result of the middle run by throughput; None without a run."""
    vs_baseline_percent: float | None
    """The gain in samples/s over the baseline, for a row of the same model and samples of the same length."""
    published: Mapping[str, Any]
    ratio: float | None
    """The measured over the published samples/s."""
    diagnosis: str | None = None
    """The rule of the first diagnosis of `result`: what holds the row back; None without any."""
    verdict: str | None = None
    samples_per_s: list[float] = field(default_factory=list)
    """Those of every finished run."""
    interval_percent: tuple[float, float] | None = None
    """95 % CI of the difference from the baseline: from pairs of runs if there are enough repetitions, else from the
    steps of the middle runs."""
    published_vs_baseline_percent: float | None = None
    """The gain of the published figures over the baseline's."""
    knobs: KnobValues = field(default_factory=dict)
    """Every knob as asked for."""
    warm: bool | None = None
    """True if the row was trained in a process that trained other rows too; None without a result."""

    @property
    def rate(self) -> float | None:
        """Median samples/s of the finished runs; None when none finished."""
        return _median(self.samples_per_s)

    @property
    def peak_bytes(self) -> int | None:
        """The middle run's peak of device memory, else of the worst rank's allocations; None when not measured."""
        memory = self.result.memory if self.result is not None else None
        return (memory.device_peak_used_bytes or memory.peak_allocated_bytes) if memory is not None else None


@dataclass(frozen=True)
class Table:
    """The rows of a bench, as far as they were run."""

    preset: str
    baseline_id: str
    rows: list[Row]
    unpublished: str = ""
    """Why the published figures are left out; empty if they are not."""

    @property
    def baseline_state(self) -> str:
        """The end state of the baseline."""
        return next(row.state for row in self.rows if row.id == self.baseline_id)

    def fields(self) -> dict[str, Any]:
        """Return the object that `bench --json` prints."""
        return {
            "preset": self.preset,
            "baseline": self.baseline_id,
            "rows": self.rows,
            "unpublished": self.unpublished or None,
        }


def needs_no_repeat(row_results: Iterable[RowResult]) -> bool:
    """True if a row need not be repeated: it cannot run here, or does not fit. A device in use may be free later."""
    return any(
        not isinstance(result, DevicesBusy) if isinstance(result, UserError) else result.state == "oom"
        for result in row_results
    )


def tabulate(bench: Bench, results_by_row: Mapping[str, Sequence[RowResult]]) -> Table:
    """Return the table of the runs made so far; their results by row id."""
    baseline = next(row for row in bench.rows if row.id == bench.baseline_id)
    rows = [_row(row, baseline, results_by_row) for row in bench.rows]
    return Table(bench.preset, bench.baseline_id, rows, bench.unpublished)


def _row(planned: PlannedRow, baseline: PlannedRow, results_by_row: Mapping[str, Sequence[RowResult]]) -> Row:
    row_results, baseline_results = (results_by_row.get(row.id, ()) for row in (planned, baseline))
    state, reason = _ending(row_results)
    result, rates = _middle(row_results), _rates(row_results)
    rate, published_rate = _median(rates), _published_rate(planned)
    baseline_published_rate = _published_rate(baseline)
    # A sample of another model, data or length is another amount of work.
    if _work(planned.spec) != _work(baseline.spec):
        baseline_results, baseline_published_rate = (), None
    baseline_middle = _middle(baseline_results)
    gain, verdict, interval = None, None, None
    if planned is baseline:
        gain = 0.0 if rate else None
    elif baseline_middle is not None and result is not None:
        if speeds_rank(baseline_middle, result):
            gain = _percent(rate, _median(_rates(baseline_results)))
        verdict, interval = _compared(baseline_middle, result, baseline_results, row_results)
    return Row(
        id=planned.id,
        state=state,
        reason=reason,
        result=result,
        vs_baseline_percent=gain,
        published=planned.published,
        ratio=rate / published_rate if rate and published_rate else None,
        diagnosis=result.diagnosis[0].rule if result is not None and result.diagnosis else None,
        verdict=verdict,
        samples_per_s=rates,
        interval_percent=interval,
        published_vs_baseline_percent=_percent(published_rate, baseline_published_rate),
        knobs=planned.spec.knobs,
        warm=None if result is None else result.role == TRIAL,
    )


def _work(spec: RunSpec) -> tuple[object, ...]:
    """Everything that decides how much work a sample is."""
    return spec.model, spec.data, spec.knobs.get("seq_len")


def _compared(
    baseline: Result, result: Result, baseline_results: Sequence[RowResult], row_results: Sequence[RowResult]
) -> tuple[str | None, tuple[float, float] | None]:
    """The verdict on a row's throughput and its interval, from the middle runs and from all."""
    if not speeds_rank(baseline, result):
        return STRICT_THRESHOLDS, None
    # The n-th results of all rows come from one repetition, run back to back.
    pairs = [
        (baseline_rate, rate)
        for baseline_run, run in zip(baseline_results, row_results, strict=False)
        if (baseline_rate := _rate(baseline_run)) and (rate := _rate(run))
    ]
    interval = paired_interval(pairs)
    if interval is None:
        row = compare(baseline, result).rows[0]
        return row.verdict, row.interval_percent
    low, high = interval
    # Runs side by side share their conditions, and the pairs show what differed: the interval holds it.
    return (NOISE if low <= 0 <= high else BETTER if low > 0 else WORSE), interval


def _ending(row_results: Sequence[RowResult]) -> tuple[str, str]:
    """State and reason of a row: of its first run that did not finish, else of the last one.

    A repetition that found its device in use counts only if no other was run.
    """
    ran = [result for result in row_results if not isinstance(result, DevicesBusy)]
    for result in ran:
        if isinstance(result, UserError):
            return REFUSED, result.line()
        if result.state != "finished" or result is ran[-1]:
            return result.state, result.reason
    busy = [result for result in row_results if isinstance(result, DevicesBusy)]
    return NOT_RUN, busy[-1].line() if busy else "the bench was stopped before it"


def _middle(row_results: Sequence[RowResult]) -> Result | None:
    """The finished run of middle throughput, the slower of two; if none finished, the last other result; else None."""
    results = [result for result in row_results if isinstance(result, Result)]
    finished = sorted((result for result in results if _rate(result)), key=lambda result: _rate(result) or 0.0)
    if finished:
        return finished[(len(finished) - 1) // 2]
    return results[-1] if results else None


def _rate(result: RowResult) -> float | None:
    """The samples/s of a finished run; None for any other result."""
    if isinstance(result, UserError) or result.state != "finished":
        return None
    return result.throughput.samples_per_s.typical


def _rates(row_results: Sequence[RowResult]) -> list[float]:
    """The samples/s of each finished run."""
    return [rate for rate in map(_rate, row_results) if rate is not None]


def _median(rates: Sequence[float]) -> float | None:
    return statistics.median(rates) if rates else None


def _published_rate(planned: PlannedRow) -> float | None:
    """The samples/s among a row's published figures; None when there are none."""
    rate = planned.published.get("samples_per_s")
    return float(rate) if isinstance(rate, int | float) else None


def _percent(rate: float | None, base: float | None) -> float | None:
    return 100 * (rate / base - 1) if rate and base else None

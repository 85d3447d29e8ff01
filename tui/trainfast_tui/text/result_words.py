"""The figures of a result with units, and the words beside them: headline and notes.

`runs show` prints them as lines, a report as tables.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from trainfast_runner.records.result import LOSSES_IN_A_MEAN, Flops, Losses, Result
from trainfast_runner.records.run_directory import notable_reason, state_text
from trainfast_runner.records.run_file import SCHEMA, ScriptFigures
from trainfast_runner.records.run_lines import Actual, RunStart
from trainfast_runner.records.worker_lines import WARM_ROLES
from trainfast_runner.results import comparison as verdicts
from trainfast_runner.results.doubts import doubts, qualifications, watched_text
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.units import counted
from trainfast_runner.worker.shared.words import STEP_PHASES
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import ABSENT, DOUBT_SIGN, Line, Tone, labelled, paragraph, toned_table
from trainfast_tui.text.memory_words import against_predicted_memory, peak_word
from trainfast_tui.text.next_run_words import SAMPLES_VARY, against_predicted_speed, few_steps_note
from trainfast_tui.text.search_words import ROLE_WORDS, warm_words

SHOWN_PART_S = 0.05
"""Shorter parts of a start round to nothing."""


def headline(result: Result) -> str:
    """Return the run's id, its end and the reason."""
    reason = fmt.plain(fmt.with_sizes(notable_reason(result.state, result.reason)))
    words = warm_words(result.role, result.tried) if result.role in WARM_ROLES else ROLE_WORDS.get(result.role or "")
    role = f"{words}: " if words else ""
    return f"{result.run_id}  {result.name}  {role}{state_text(result.state)}{f': {reason}' if reason else ''}"


def result_notes(result: Result) -> Iterator[str]:
    """Yield each reason to doubt or qualify the figures."""
    if result.schema > SCHEMA:
        yield f"written by a newer trainfast-tui (schema {result.schema}, not {SCHEMA}): some of it may be missing"
    if result.synthetic_data:
        yield "synthetic data: drawn at random, so the loss is meaningless"
    if result.knobs.get("precision") == "fp16" and result.cpu is not None and result.cpu.has_fp16 is False:
        yield "fp16 on a CPU without fp16 instructions is emulated: it shows the loss scaling, not a speed"
    if result.loss.not_finite:
        yield f"the loss was not a finite number in {counted(result.loss.not_finite, 'step')}: the training diverged"
    for doubt in doubts(result):
        yield f"{DOUBT_SIGN} doubtful: the run {fmt.plain(doubt.text)}"
    for qualification in qualifications(result):
        yield f"the run {fmt.plain(qualification)}"
    if (thinning := result.thinning) is not None:
        steps, looked_at = result.steps.measured + result.steps.warmup, thinning.steps_looked_at
        if dropped := thinning.steps_dropped:
            yield f"the records of {fmt.count(dropped)} steps were dropped: steps.jsonl had reached its cap"
        if looked_at < steps:
            yield f"a long run: medians use {fmt.count(looked_at)} of its {fmt.count(steps)} steps"
    yield from (fmt.plain(trouble) for trouble in result.troubles)
    if result.unreadable_lines:
        yield f"{counted(result.unreadable_lines, 'damaged line')} in its records left out"


def figure_rows(result: Result) -> Iterator[tuple[str, str]]:
    """Yield labels and figures with units; an empty label continues the one before."""
    measured, warmup = result.steps.measured, result.steps.warmup
    yield "steps", f"{fmt.count(measured)} measured, {fmt.count(warmup)} warm-up, {fmt.duration(result.seconds)} in all"
    if result.start is not None and "first_step" in result.start.seconds:
        yield "first step", start_text(result.start)
    if measured:
        yield from _speed(result)
    if result.loss.first is not None or result.loss.last is not None:
        yield "loss", _losses(result.loss)
    if (difference := result.loss_difference) is not None:
        figures = f"{fmt.number(difference.greatest)} of it in {counted(difference.steps, 'step')}"
        limit = fmt.number(difference.tolerance)
        yield "", f"differs from {fmt.plain(difference.against)}'s by up to {figures} (tolerance {limit})"
    yield from _memory(result)
    if result.flops.model_tflops_per_device is not None:
        yield "model FLOPs", _flops(result.flops)
    yield from _energy(result)
    if result.conditions.start_temperature_c is not None:
        warm = result.conditions.measured_from_temperature_c
        measured_from = "" if warm is None else f", measured from {fmt.celsius(warm)} on"
        gpus = f" ({watched_text(result)})" if watched_text(result) else ""
        yield "started at", fmt.celsius(result.conditions.start_temperature_c) + measured_from + gpus
    if (world_size := result.actual.world_size) is not None:
        yield "ran as", _ran_as(result.actual, world_size)
    if result.actual.optimizer_reason:
        yield "optimizer", fmt.plain(result.actual.optimizer_reason)
    if result.script is not None:
        yield from _script(result.script, result.run_id)


def start_text(start: RunStart) -> str:
    """Return the time to the end of the first step, how it began, and the parts that took a tenth of a second."""
    parts = [f"{name.replace('_', ' ')} {s:.1f} s" for name, s in start.seconds.items() if s >= SHOWN_PART_S]
    origin = f"{start.kind}, as {fmt.plain(start.reason)}" if start.reason else start.kind
    return f"after {sum(start.seconds.values()):.1f} s ({origin}): {', '.join(parts)}"


def _losses(loss: Losses) -> str:
    """Return the first and the last loss; one value where both come from the same steps."""
    if loss.recorded is not None and loss.recorded <= LOSSES_IN_A_MEAN:
        return f"{fmt.number(loss.first)} ({'one value' if loss.recorded == 1 else f'mean of {loss.recorded} values'})"
    return f"{fmt.number(loss.first)} to {fmt.number(loss.last)} (means of the first and last five)"


def _speed(result: Result) -> Iterator[tuple[str, str]]:
    """Yield throughput, step time and phases of a run with measured steps."""
    few_note, doubtful = few_steps_note(result.steps.measured), fmt.doubt_words(doubts(result))
    for label, noun, spread in (
        ("throughput", "samples", result.throughput.samples_per_s),
        ("", "tokens", result.throughput.tokens_per_s),
    ):
        if spread.typical is not None:
            basis = ["median", "" if few_note else f"MAD {fmt.number(spread.mad)}"]
            if result.steps.measured == 1:
                basis = [few_note]
            elif spread.median is None:
                basis = [SAMPLES_VARY]
            yield label, f"{fmt.per_second(spread.typical, noun)} ({'; '.join(filter(None, [*basis, doubtful]))})"
    if result.throughput.predicted is not None:
        yield "", against_predicted_speed(result.throughput.samples_per_s.typical, result.throughput.predicted)
    if result.throughput.samples_per_s.typical is None and result.throughput.steps_per_s.median is not None:
        yield "throughput", f"{fmt.per_second(result.throughput.steps_per_s.median, 'steps')} (median)"
    times = result.step_ms
    tail = few_note or f"p90 {fmt.milliseconds(times.p90)}, p99 {fmt.milliseconds(times.p99)}"
    yield "step", f"{fmt.milliseconds(times.p50)} ({tail})"
    phases = [(name, getattr(times, name)) for name in STEP_PHASES]
    if any(value is not None for _, value in phases):
        yield "phases", ", ".join(f"{name} {fmt.milliseconds(value)}" for name, value in phases if value is not None)


def _memory(result: Result) -> Iterator[tuple[str, str]]:
    """Yield the measured peak, or why there is none, and the predicted one."""
    memory = result.memory
    if memory.peak_allocated_bytes is not None:
        reserved = ""
        if memory.peak_reserved_bytes not in (None, memory.peak_allocated_bytes):
            reserved = f", {fmt.size(memory.peak_reserved_bytes)} reserved"
        device = f", device {fmt.size(memory.device_peak_used_bytes)}" if memory.device_peak_used_bytes else ""
        oom_words = "" if result.state != "oom" else ", in the steps that ended"
        word = peak_word(of_script=result.script is not None, on_cpu=result.cpu is not None)
        yield "peak memory", f"{fmt.size(memory.peak_allocated_bytes)} {word}{reserved}{device}{oom_words}"
    elif memory.not_measured_because is not None:
        yield "peak memory", f"not measured: {fmt.plain(memory.not_measured_because)}"
    if memory.predicted_bytes is not None and result.role not in WARM_ROLES:
        label = "" if memory.peak_allocated_bytes is not None else "peak memory"
        yield label, against_predicted_memory(memory.peak_allocated_bytes, memory.predicted_bytes)


def _energy(result: Result) -> Iterator[tuple[str, str]]:
    """Yield the energy, or why a counter gives none."""
    energy = result.energy
    if energy.joules is not None:
        sources = filter(None, (watched_text(result), energy.source))
        source = f" ({'; '.join(sources)})" if energy.source else ""
        shares = f"{fmt.joules(energy.joules_per_sample)} a sample, {fmt.joules(energy.joules_per_step)} a step"
        yield "energy", f"{fmt.joules(energy.joules)}, {shares}{source}"
    elif energy.reason is not None:
        yield "energy", f"unavailable: {fmt.plain(energy.reason)}"


def _script(script: ScriptFigures, run_id: str) -> Iterator[tuple[str, str]]:
    """Yield the command, the source of its steps, its exit code and the knobs that it overrode."""
    yield "command", fmt.plain(shlex.join(script.command))
    if script.framework is not None:
        samples = f", samples by {script.samples_from}" if script.samples_from else ""
        yield "seen by", fmt.plain(f"{script.framework}: {', '.join(script.hooks)}{samples}")
    if script.evaluation_seconds:
        yield "evaluation", f"{fmt.duration(script.evaluation_seconds)}, in no step"
    if script.exit_code:
        yield "exit code", f"{script.exit_code}; trainfast-tui logs {run_id} prints its output"
    if script.suppressed:
        yield "suppressed", fmt.plain(", ".join(script.suppressed))
    for override in script.overridden:
        ran = "what ran is unknown" if override.ran is None else f"ran {override.ran}"
        yield "overridden", fmt.plain(f"{override.knob}: asked for {override.asked}, {ran} ({override.by})")


def _ran_as(actual: Actual, world_size: int) -> str:
    """Return processes, device, wrapper, dtype, optimizer and attention of the run."""
    on_nodes = f" on {counted(actual.nodes, 'node')}" if actual.nodes and actual.nodes > 1 else ""
    words = [counted(world_size, "process", "processes") + on_nodes, f"on {actual.device}"]
    if actual.wrapper not in (None, "none"):
        words.append(str(actual.wrapper))
    optimizer = actual.optimizer
    if optimizer and actual.optimizer_implementation:
        optimizer = f"{optimizer} ({actual.optimizer_implementation})"
    words += [word for word in (actual.compute_dtype, optimizer) if word]
    if actual.attention:
        reason_words = f" ({actual.attention_reason})" if actual.attention_reason else ""
        words.append(f"{actual.attention} attention{reason_words}")
    trained, whole = actual.trainable_parameters, actual.parameters
    if trained is not None and whole and trained < whole:
        method = f"{actual.method}: " if actual.method not in (None, "full") else ""
        words.append(f"{method}{fmt.fraction(trained / whole, 2)} of {fmt.count(whole)} parameters trained")
    return fmt.plain(", ".join(words)) or ABSENT


def _flops(flops: Flops) -> str:
    """Return model TFLOP/s, MFU, and HFU, including recomputation."""
    text = f"{fmt.number(flops.model_tflops_per_device)} TFLOP/s a device"
    if flops.mfu is not None:
        text += f", {fmt.fraction(flops.mfu, 1)} of {fmt.number(flops.peak_tflops)} ({flops.peak_source})"
    if flops.hfu is not None and flops.hfu != flops.mfu:
        text += f"; {fmt.fraction(flops.hfu, 1)} HFU, including recomputation"
    if flops.of_measured_peak is not None and flops.measured_peak_tflops != flops.peak_tflops:
        text += f"; {fmt.fraction(flops.of_measured_peak, 1)} of the measured {fmt.number(flops.measured_peak_tflops)}"
    return text


NOT_BY_CONDITIONS = ("few_steps", "strict_malloc", "other_loss")
"""Kinds of doubt that equal conditions do not remove."""
REPEAT_ADVICE = "`bench --repeat 3` runs two variants in turn (A B A B), so that both have the same conditions"


def figure_with_unit(value: float | None, unit: str) -> str:
    """Return a figure with its unit."""
    if unit.endswith("/s"):
        return fmt.per_second(value, unit.removesuffix("/s"))
    return {"bytes": fmt.size, "ms": fmt.milliseconds, "J": fmt.joules}.get(unit, fmt.number)(value)


def value_text(name: str, value: Any) -> str:
    """Return a setting as it is typed.

    "the preset's" for a model or data field without an override, "not set" for a knob without a value.
    """
    if name in KNOBS_BY_NAME:
        entry = KNOBS_BY_NAME[name]
        return "not set" if value is None and entry.default is not None else entry.text_of(value)
    return "the preset's" if value is None else str(value)


def difference_text(row: verdicts.ComparisonRow) -> str:
    """Return the difference of the two figures with its sign and unit; empty if one is unknown."""
    if row.a is None or row.b is None:
        return ""
    delta = row.b - row.a
    sign = "" if not delta else ("+" if delta > 0 else "-")
    return sign + figure_with_unit(abs(delta), row.unit)


def interval_text(row: verdicts.ComparisonRow) -> str:
    """Return the 95 % CI in percent, `+1.4 to +5.5 %`; empty if it cannot be computed."""
    return "" if row.interval_percent is None else fmt.signed_interval(*row.interval_percent)


def verdict_words(comparison: verdicts.Comparison) -> str | None:
    """Return the verdict; None if a run's throughput is unknown."""
    row = comparison.rows[0]
    if row.percent is None:
        return None
    if row.verdict == verdicts.STRICT_THRESHOLDS:
        return "Speed is not comparable: one of the runs was measured under strict malloc thresholds."
    if row.verdict == verdicts.DIFFERENT_SEQ_LEN:
        return f"Samples/s are {row.verdict}; compare tokens/s."
    if row.verdict in verdicts.DIFFERENT_SAMPLE_VERDICTS:
        return f"Speed is {row.verdict}."
    certainty = f"95 % CI: {interval_text(row)}" if row.interval_percent else "too few steps for a 95 % CI"
    if row.verdict == verdicts.NOISE:
        return f"No significant difference in throughput ({certainty})."
    direction = "more" if row.percent > 0 else "less"
    difference = f"B has {fmt.percent(abs(row.percent), 1)} {direction} throughput than A"
    if row.verdict == verdicts.DOUBTFUL:
        return f"Doubtful: {difference}, but"
    return f"{difference} ({certainty})."


def verdict_reasons(comparison: verdicts.Comparison, advice: str = REPEAT_ADVICE) -> list[str]:
    """Return the reasons for doubt, and `advice` on a verdict without it; empty if no doubt touches the runs."""
    is_by_conditions = any(doubt.kind not in NOT_BY_CONDITIONS for doubt in comparison.doubts)
    return [*(fmt.plain(doubt.text) for doubt in comparison.doubts), *[advice] * is_by_conditions]


VERDICT_TONES: dict[str, Tone] = {verdicts.BETTER: "success", verdicts.WORSE: "error", verdicts.DOUBTFUL: "warning"}


def comparison_lines(comparison: verdicts.Comparison, width: int, advice: str = REPEAT_ADVICE) -> Iterator[Line]:
    """Yield the verdict with its doubts and notes, the conditions, the settings and the figures, in `width` cells.

    `advice` says how a doubtful verdict becomes a sure one.
    """
    tone = VERDICT_TONES.get(comparison.rows[0].verdict, "text")
    yield from paragraph(verdict_words(comparison) or "", width, tone)
    for reason in verdict_reasons(comparison, advice):
        yield from labelled((f"{DOUBT_SIGN} ", "warning"), reason, width, "warning")
    for note in map(fmt.with_sizes, comparison.notes):
        yield from labelled(("note: ", "muted"), note, width, "warning")
    if comparison.conditions:
        conditions = [
            (row.label, row.a or ABSENT, row.b or ABSENT, "differs" if row.differs else "")
            for row in comparison.conditions
        ]
        tones: list[Tone] = ["warning" if row.differs else "text" for row in comparison.conditions]
        yield from toned_table(("CONDITION", "A", "B", ""), conditions, tones, width)
    yield []
    for name, a, b in comparison.knobs:
        yield from labelled((f"{name} ", "title"), f"{value_text(name, a)} -> {value_text(name, b)}", width)
    if not comparison.knobs:
        yield [("the same settings", "text")]
    yield []
    figures = [
        (
            row.label,
            figure_with_unit(row.a, row.unit),
            figure_with_unit(row.b, row.unit),
            difference_text(row),
            "" if row.percent is None else fmt.signed_percent(row.percent),
            interval_text(row),
            row.verdict,
        )
        for row in comparison.shown_rows
    ]
    header = ("FIGURE", *fmt.figure_headings("A", "B", "CHANGE", "", "95 % CI"), "")
    tones = [VERDICT_TONES.get(row.verdict, "text") for row in comparison.shown_rows]
    yield from toned_table(header, figures, tones, width, drop=("95 % CI", "CHANGE"))

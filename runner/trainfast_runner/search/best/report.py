"""The object that `search best --json` prints: the answer with every candidate's verdict and every measurement."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from trainfast_runner.records.json_lines import newest
from trainfast_runner.search.best.best_so_far import BestSoFar
from trainfast_runner.search.best.choose.answer import verdicts_without_answer
from trainfast_runner.search.journal.best import (
    BestAnswer,
    BestEnded,
    Candidate,
    CandidateVerdict,
    ColdRun,
    EarlierEffect,
    Effect,
    Instruction,
    Interval,
    Space,
    Trial,
    read_best_journal,
)
from trainfast_runner.search.journal.report_fields import fields_of, first_fields

SCRIPT_MEMORY = "the memory of a script is predicted from its trials of like settings"
"""The reason that `predicted_bytes` may be None for a script."""


def best_report(directory: Path) -> dict[str, Any]:
    """Return the whole search as one object; absent figures are None."""
    lines = read_best_journal(directory)
    so_far, end = BestSoFar(tuple(lines)), newest(lines, BestEnded)
    question, space = so_far.question, so_far.space
    assert question is not None, "a search is reported once it has its question"
    return {
        **first_fields(question, end),
        **fields_of(question, "objective", "for_steps", "global_batch", "vary", "left_alone"),
        **_answer(end, so_far),
        "candidates": len(space.candidates) if space is not None else None,
        "dropped": space.dropped if space is not None else None,
        "unpredicted": SCRIPT_MEMORY if question.is_script else None,
        "trials": [_trial(trial, space) for trial in so_far.trials] if space is not None else [],
        "races": [_cold_run(run, space) for run in so_far.cold_runs] if space is not None else [],
        "disturbed": so_far.disturbed_count,
        "orders": [_instruction(instruction, space) for instruction in so_far.instructions],
        "earlier": [_effect(effect, "search_id") for effect in question.earlier],
        **fields_of(end, "missing_bytes", "stopped_because", "seconds"),
    }


def _answer(end: BestEnded | None, so_far: BestSoFar) -> dict[str, Any]:
    """Return the fields of the answer; None and empty lists without one. `winner` is None if the noise is too large."""
    answer, space = end.answer if end is not None else None, so_far.space
    if end is None or answer is None or space is None:
        names = ("winner", "best", "baseline", "gain", "within_percent", "tried_in_budget")
        lists = ("doubts", "ties", "effects", "pareto", "changes_training", "notes")
        verdicts = (
            [] if space is None else [_verdict(verdict, space) for verdict in verdicts_without_answer(so_far.lines)]
        )
        return {**dict.fromkeys(names), **{name: [] for name in lists}, "verdicts": verdicts}
    is_decided = end.state == "answered" and answer.within_percent is None
    best = space.candidates[answer.best_number]
    baseline = space.candidates[space.baseline_number]
    return {
        "winner": best.knobs if is_decided else None,
        "best": {
            **_side(best, answer.best_rate, answer.best_value, answer.best_run_ids),
            "doubts": so_far.doubts_of(answer.best_number),
        },
        "baseline": {
            **_side(baseline, answer.baseline_rate, answer.baseline_value, answer.baseline_run_ids),
            "doubts": so_far.doubts_of(space.baseline_number),
        },
        "doubts": so_far.answer_doubts,
        "gain": _gain(answer.gain_percent),
        "within_percent": answer.within_percent,
        "tried_in_budget": answer.tried_in_budget,
        "ties": [space.candidates[number].knobs for number in answer.tied_numbers],
        "effects": [_effect(effect, "measured", "earlier") for effect in answer.effects],
        "verdicts": [_verdict(verdict, space) for verdict in answer.verdicts],
        "pareto": [_pareto(number, answer, so_far) for number in answer.pareto_numbers],
        "changes_training": answer.changes_training,
        "notes": answer.notes,
    }


def _verdict(verdict: CandidateVerdict, space: Space) -> dict[str, Any]:
    candidate = space.candidates[verdict.candidate_number]
    return {
        "knobs": candidate.knobs,
        **fields_of(verdict, "verdict", "reason", "excess_bytes"),
        "samples_per_s": verdict.rate,
        "predicted_bytes": candidate.predicted_bytes,
    }


def _side(candidate: Candidate, rate: Interval | None, value: Interval | None, run_ids: list[str]) -> dict[str, Any]:
    """Return the winner or the baseline; `value` is the objective."""
    return {
        "knobs": candidate.knobs,
        "samples_per_s": rate,
        "value": value,
        "predicted_bytes": candidate.predicted_bytes,
        "run_id": run_ids[0] if run_ids else None,
        "run_ids": run_ids,
    }


def _gain(percent: Interval | None) -> dict[str, float] | None:
    return None if percent is None else {"percent": percent.median, "low": percent.low, "high": percent.high}


def _effect(effect: Effect | EarlierEffect, *more_fields: str) -> dict[str, Any]:
    gain = {"from": effect.before, "gain": _gain(effect.gain_percent)}
    return {**fields_of(effect, "knob", "value"), **gain, **fields_of(effect, *more_fields)}


def _instruction(instruction: Instruction, space: Space | None) -> dict[str, Any]:
    """Return an instruction; `knobs` are those of a skipped candidate, else None."""
    number = instruction.candidate_number
    knobs = None if number is None or space is None else space.candidates[number].knobs
    return {"do": instruction.do, "knob": instruction.knob or None, "value": instruction.value, "knobs": knobs}


def _trial(line: Trial, space: Space) -> dict[str, Any]:
    end_fields = "outcome", "reason", "missing_bytes"
    return {
        "knobs": space.candidates[line.candidate_number].knobs,
        "samples_per_s": _rate(line),
        "steps": len(line.step_ms),
        **fields_of(line, "warm", *end_fields, "doubts", "seconds", "peak_allocated_bytes", "run_id", "repeats"),
    }


def _cold_run(line: ColdRun, space: Space) -> dict[str, Any]:
    figure_fields = "samples_per_joule", "start_s", "peak_allocated_bytes", "seconds"
    return {
        "knobs": space.candidates[line.candidate_number].knobs,
        "samples_per_s": None if line.samples_per_s is None else {"median": line.samples_per_s, "mad": line.mad},
        "predicted": line.predicted,
        **fields_of(line, "role", "knob", "outcome", *figure_fields, "run_id", "reason", "missing_bytes", "doubts"),
    }


def _rate(line: Trial) -> dict[str, float] | None:
    """Return the samples/s of a trial: median and median absolute deviation over steps; None without a timed step."""
    rates = [1000 * line.samples_per_step / ms for ms in line.step_ms if ms > 0]
    if not rates:
        return None
    middle = statistics.median(rates)
    return {"median": middle, "mad": statistics.median(abs(rate - middle) for rate in rates)}


def _pareto(number: int, answer: BestAnswer, so_far: BestSoFar) -> dict[str, Any]:
    """Return a candidate that no other beats in both speed and memory, with its highest measured peak."""
    rate = next((verdict.rate for verdict in answer.verdicts if verdict.candidate_number == number), None)
    return {
        "knobs": so_far.candidate(number).knobs,
        "samples_per_s": rate,
        "peak_allocated_bytes": so_far.peak_bytes(number),
    }

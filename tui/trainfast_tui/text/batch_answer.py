"""The answer of a batch search as rows for the command line and for a report, and the settings that it offers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainfast_tui.text.format import count, duration, per_second, plain, size
from trainfast_tui.text.memory import PHASE_WORDS
from trainfast_tui.text.oom import CLOSEST, change_options

if TYPE_CHECKING:
    from trainfast_runner.search.batch.batch_follower import BatchSnapshot
    from trainfast_runner.search.journal.batch import BatchAnswer, BatchEnded


def batch_answer_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows that `search max-batch` prints; `report` is its JSON object."""
    where = f" on rank {report['tightest_rank']}, the tightest" if report["world_size"] > 1 else ""
    model = report["model"]
    rate = "" if report["samples_per_s"] is None else f" at {per_second(report['samples_per_s'], 'samples')}"
    if rate and report["measured_under"]:
        rate += f" (under {report['measured_under']})"
    rows = [
        (
            "largest batch",
            f"{report['max_batch']:,}, confirmed by {report['proof_run_id']}{rate}; {report['certainty']}",
        ),
        ("leaves free", f"{_left_free(report['headroom_bytes'], report['limit_bytes'])} ({report['limit']}){where}"),
        ("aligned", _aligned(report["aligned_batch"])),
        ("recommended", f"{report['recommended_batch']:,}: {report['recommended_reason']}"),
        ("memory", _fit(model["fixed_bytes"], model["bytes_per_sample"], PHASE_WORDS.get(model["phase"], "a step"))),
    ]
    if (fastest := report["fastest"]) is not None:
        rows.append(("fastest tried", _fastest(fastest["batch_size"], fastest["samples_per_s"])))
    tried = [probe for probe in report["probes"] if probe["outcome"] != "void"]
    refuted = [f"{probe['batch_size']:,}" for probe in tried if probe["refuted_by"]]
    if refuted:
        rows.append(("refuted", f"{' and '.join(refuted)}: fitted in a probe, ran out of memory in a confirmation run"))
    return [*rows, ("took", _took(report, tried))]


def batch_report_rows(answer: BatchAnswer, seconds: float) -> list[tuple[str, str]]:
    """Return the rows of a report, which has the sizes tried and the confirmation run in tables of their own."""
    phase = PHASE_WORDS.get(answer.phase or "", answer.phase or "a step")
    rows = [
        ("largest batch", f"{count(answer.max_batch)}; {answer.certainty}"),
        ("recommended", f"{count(answer.recommended_batch)}: {answer.recommended_why}"),
        ("aligned", _aligned(answer.aligned_batch)),
    ]
    if answer.fastest_batch is not None:
        rows.append(("fastest of those tried", _fastest(answer.fastest_batch, answer.fastest_samples_per_s)))
    return [
        *rows,
        ("leaves free", _left_free(answer.headroom_bytes, answer.limit_bytes)),
        ("fit", _fit(answer.fixed_bytes, answer.bytes_per_sample, phase)),
        ("confirmed by", answer.proof_run_id or "no run on record"),
        ("took", duration(seconds)),
    ]


def _aligned(batch: int | None) -> str:
    return f"{batch:,}" if batch else "none below 8"


def _left_free(headroom_bytes: int | None, limit_bytes: int | None) -> str:
    return f"{size(headroom_bytes)} of {size(limit_bytes)}"


def _fit(fixed_bytes: int | None, bytes_per_sample: int | None, phase: str) -> str:
    return f"{size(fixed_bytes)} and {size(bytes_per_sample)} a sample in {phase}"


def _fastest(batch: int, samples_per_s: float | None) -> str:
    return f"{batch:,}, {per_second(samples_per_s, 'samples')}"


def _took(report: dict[str, Any], tried: list[dict[str, Any]]) -> str:
    """Return the time of the search, the sizes tried, and how often memory ran out."""
    oom_count = sum(probe["outcome"] == "oom" for probe in tried)
    oom_confirmations = sum(confirmation["state"] == "oom" for confirmation in report["proofs"])
    confirming = f", and {_times(oom_confirmations)} in a confirmation run" if oom_confirmations else ""
    return f"{duration(report['seconds'])}, {len(tried)} sizes tried, memory ran out {_times(oom_count)}{confirming}"


def _times(number: int) -> str:
    return {0: "never", 1: "once"}.get(number, f"{number} times")


def without_answer(directory: Path, ended: BatchEnded) -> list[str]:
    """Return the end of a search that found no batch size, with the changes as they are typed."""
    if ended.state == "cancelled":
        return [f"cancelled; the same command continues {directory.name}"]
    lines = [ended.reason]
    if ended.missing_bytes is not None:
        lines = [f"{ended.reason}: at least {size(ended.missing_bytes)} are missing"]
    if ended.changes and all(change.missing_bytes for change in ended.changes):
        lines.append(CLOSEST)
    for change in ended.changes:
        doubt = ", not known to be enough" if change.predicted_bytes is None else ""
        costs = f"; speed: {change.costs}" if change.costs else ""
        lines.append(f"  {change_options(change)}: {change.saves}{doubt}{costs}")
    return [plain(line) for line in lines]


@dataclass(frozen=True, slots=True)
class Offer:
    """An offer at the end of a search: knobs as they are typed, and the reason to take them."""

    label: str
    settings: tuple[tuple[str, str], ...]
    why: str


def offers(search: BatchSnapshot | None) -> tuple[Offer, ...]:
    """Return the batch sizes found, the recommended one first; if nothing fits, the changes that would help."""
    ended = search.ended if search is not None else None
    if ended is None:
        return ()
    if ended.answer is None:
        return tuple(
            Offer(
                f"change {index}",
                tuple(change.settings.items()),
                f"{change.saves}; speed: {change.costs}" if change.costs else change.saves,
            )
            for index, change in enumerate(ended.changes, 1)
        )
    answer = ended.answer
    confirmation = answer.proof_run_id
    multiple = "the largest multiple of 64" if (answer.aligned_batch or 0) >= 512 else "a multiple of 8"
    batches = [
        ("recommended", answer.recommended_batch, answer.recommended_why),
        ("aligned", answer.aligned_batch, multiple),
        ("largest", answer.max_batch, f"confirmed by {confirmation}" if confirmation else "the largest that fits"),
        ("fastest", answer.fastest_batch, f"{per_second(answer.fastest_samples_per_s, 'samples')}, of those tried"),
    ]
    return tuple(Offer(label, (("batch_size", str(batch)),), why) for label, batch, why in batches if batch is not None)

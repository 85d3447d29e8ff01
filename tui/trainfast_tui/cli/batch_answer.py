"""The answer of a batch search in lines of text, or the reason why there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainfast_runner.search.journal.batch import BatchEnded
from trainfast_tui.text.format import duration, per_second, plain, size
from trainfast_tui.text.memory import PHASE_WORDS


def answer_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return labels and figures of the search's report."""
    where = f" on rank {report['tightest_rank']}, the tightest" if report["world_size"] > 1 else ""
    model = report["model"]
    phase = PHASE_WORDS.get(model["phase"], "a step")
    fastest = report["fastest"]
    rate = "" if report["samples_per_s"] is None else f" at {per_second(report['samples_per_s'], 'samples')}"
    if rate and report["measured_under"]:
        rate += f" (under {report['measured_under']})"
    rows = [
        (
            "largest batch",
            f"{report['max_batch']:,}, confirmed by {report['proof_run_id']}{rate}; {report['certainty']}",
        ),
        (
            "leaves free",
            f"{size(report['headroom_bytes'])} of {size(report['limit_bytes'])} ({report['limit']}){where}",
        ),
        ("aligned", f"{report['aligned_batch']:,}" if report["aligned_batch"] else "none below 8"),
        ("recommended", f"{report['recommended_batch']:,}: {report['recommended_reason']}"),
        ("memory", f"{size(model['fixed_bytes'])} and {size(model['bytes_per_sample'])} a sample in {phase}"),
    ]
    if fastest is not None:
        rows.append(("fastest tried", f"{fastest['batch_size']:,}, {per_second(fastest['samples_per_s'], 'samples')}"))
    tried = [probe for probe in report["probes"] if probe["outcome"] != "void"]
    oom_count = sum(probe["outcome"] == "oom" for probe in tried)
    refuted = [f"{probe['batch_size']:,}" for probe in tried if probe["refuted_by"]]
    if refuted:
        rows.append(("refuted", f"{' and '.join(refuted)}: fitted in a probe, ran out of memory in a confirmation run"))
    oom_confirmations = sum(confirmation["state"] == "oom" for confirmation in report["proofs"])
    confirming = f", and {_times(oom_confirmations)} in a confirmation run" if oom_confirmations else ""
    rows.append(
        (
            "took",
            f"{duration(report['seconds'])}, {len(tried)} sizes tried, memory ran out {_times(oom_count)}{confirming}",
        )
    )
    return rows


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def without_answer(directory: Path, ended: BatchEnded) -> list[str]:
    """Return the end of a search that found no batch size, with the changes as they are typed."""
    if ended.state == "cancelled":
        return [f"cancelled; the same command continues {directory.name}"]
    lines = [ended.reason]
    if ended.missing_bytes is not None:
        lines = [f"{ended.reason}: at least {size(ended.missing_bytes)} are missing"]
    if ended.changes and all(change.missing_bytes for change in ended.changes):
        lines.append("no change of knobs is enough by the prediction; the closest:")
    for change in ended.changes:
        settings = " ".join(f"--set {knob}={value}" for knob, value in change.settings.items())
        doubt = ", not known to be enough" if change.predicted_bytes is None else ""
        costs = f"; speed: {change.costs}" if change.costs else ""
        lines.append(f"  {settings}: {change.saves}{doubt}{costs}")
    return [plain(line) for line in lines]

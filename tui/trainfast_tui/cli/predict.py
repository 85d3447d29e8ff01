"""`predict`: how much memory a run needs, by category, without running it."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainfast_runner.memory_model.answer import Answer

WORDS = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "temporary": "temporary",
    "communication": "communication",
}

TRACING = "tracing a step without memory"


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    from trainfast_tui.cli.run import add_settings

    parser.add_argument("preset", metavar="PRESET", help="a preset, each of its variants a row, or NAME/VARIANT")
    add_settings(parser)
    parser.add_argument("--python", metavar="PATH", help="the Python that would train, whatever torch it has")
    parser.add_argument("--json", action="store_true", help="print {predicted, phase, max_batch, seconds} or {rows}")


def run(arguments: argparse.Namespace) -> int:
    """Print it. Exit code 0 where anything could be predicted, 2 where the only run asked for could not."""
    from trainfast_runner.memory_model.answer import answers, asked_for
    from trainfast_tui.cli.output import print_json
    from trainfast_tui.cli.progress import said_when_slow

    began = time.monotonic()
    asked = asked_for(arguments.preset, arguments.settings)
    with said_when_slow(TRACING + "…") as show:
        found = answers(
            asked,
            arguments.python,
            lambda done, of: show(f"{TRACING}: {done} of {of} done…" if of > 1 else f"{TRACING}…"),
        )
    seconds = time.monotonic() - began
    if len(found) == 1 and found[0].problem is not None:
        raise found[0].problem
    table = len(asked) > 1
    if arguments.json:
        rows = [_fields(one) for one in found]
        whole = {"preset": arguments.preset, "rows": rows} if table else {"preset": arguments.preset, **rows[0]}
        print_json({**whole, "seconds": round(seconds, 3)})
    elif table:
        _say_table(found)
    else:
        _say_one(found[0])
    return 0


def _fields(answer: Answer) -> dict[str, Any]:
    predicted = answer.predicted
    if predicted is None:
        assert answer.problem is not None
        return {"id": answer.asked.id, "predicted": None, "reason": answer.problem.line()}
    parts = {f"{name}_bytes": predicted.category(name) for name in WORDS}
    return {
        "id": answer.asked.id,
        "predicted": {"total_bytes": predicted.total_bytes, **parts, "context_bytes": predicted.context_bytes},
        "phase": predicted.phase,
        "phases": predicted.phases,
        "max_batch": answer.max_batch,
        "limit_bytes": answer.limit_bytes,
        "fullest": predicted.fullest or None,
        "basis": predicted.basis,
        "published": dict(answer.asked.published) or None,
    }


def _say_one(answer: Answer) -> None:
    from trainfast_runner.memory_model.answer import published_bytes
    from trainfast_tui.cli.output import pairs, say
    from trainfast_tui.format import count, percent, size

    predicted = answer.predicted
    assert predicted is not None
    rows = [("peak memory", f"{size(predicted.total_bytes)} a rank, in {_phase(predicted.phase)}")]
    if predicted.fullest:
        rows.append(("fullest", predicted.fullest))
    for name, words in WORDS.items():
        if value := predicted.category(name):
            rows.append((f"  {words}", f"{size(value)}  {percent(100 * value / predicted.total_bytes)}"))
    if predicted.context_bytes is not None:
        rows.append(("CUDA context", f"{size(predicted.context_bytes)} besides"))
    if (published := published_bytes(answer.asked.published)) is not None:
        rows.append(("published", size(published)))
    if predicted.bytes_per_sample:
        rows.append(("each sample", f"{size(predicted.bytes_per_sample)} on {size(predicted.fixed_bytes)}"))
    if answer.max_batch is not None:
        most = f"batch_size {count(answer.max_batch)}" if answer.max_batch else "not even batch_size 1"
        rows.append(("fits", f"{most} in the {size(answer.limit_bytes)} {answer.limit}"))
    rows.append(("basis", predicted.basis))
    for line in pairs(rows):
        say(line)


def _say_table(found: list[Answer]) -> None:
    from trainfast_runner.memory_model.answer import published_bytes
    from trainfast_tui.cli.output import say, say_table
    from trainfast_tui.format import ABSENT, count, delta, plain, size

    rows = []
    for answer in found:
        predicted = answer.predicted
        if predicted is None:
            assert answer.problem is not None
            rows.append([answer.asked.id, plain(answer.problem.line()), *[""] * (len(WORDS) + 4)])
            continue
        published = published_bytes(answer.asked.published)
        rows.append(
            [
                answer.asked.id,
                size(predicted.total_bytes),
                ABSENT if published is None else size(published),
                delta(predicted.total_bytes, published, size) if published else ABSENT,
                *(size(value) if (value := predicted.category(name)) else ABSENT for name in WORDS),
                _phase(predicted.phase),
                ABSENT if answer.max_batch is None else count(answer.max_batch),
            ]
        )
    header = ["variant", "predicted", "published", "difference", *WORDS.values(), "peak in", "max batch"]
    say_table(header, rows, right=(1, 2, 3, *range(4, 4 + len(WORDS)), 5 + len(WORDS)), drop=(9, 8, 7, 6, 5, 4))
    if any("memory_mb" in answer.asked.published for answer in found):
        say("published memory_mb is what NVML reports for the device, the CUDA context in it; predicted is without")


def _phase(name: str) -> str:
    return "the optimizer's step" if name == "optimizer" else "forward and backward"

"""The verdict on an ended run: one state, the reason in plain words, and the error behind it.

Settings that ran other than asked for are an error, not a footnote.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from trainfast_runner.machine.resource_limits import KERNEL_KILLER, limit_words
from trainfast_runner.records.capped_file import last_line
from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.result import RunError
from trainfast_runner.records.run_directory import NO_STEP
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_lines import TrainingEnd
from trainfast_runner.records.worker_lines import (
    ActualLine,
    ExceptionLine,
    FinishedLine,
    IgnoredStopLine,
    InvalidLine,
    PhaseLine,
    RankLine,
    SignalLine,
    WorkerLine,
    error_of,
)
from trainfast_runner.settings.device_counts import axis_degree, expected_mesh
from trainfast_runner.settings.precisions import PRECISIONS, computing_precision
from trainfast_runner.units import counted, gibibytes, signal_name
from trainfast_runner.worker.catalog import ATTENTION_IMPLEMENTATIONS, LEVERS, OPTIMIZERS, SCHEDULES, STRATEGIES
from trainfast_runner.worker.shared.memory_limit import hints_at_memory, is_out_of_memory
from trainfast_runner.worker.shared.words import TRIAL


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A field whose value as a rank ran it differs from the value asked for."""

    field: str
    asked: Any
    rank: int
    ran: Any


def mismatches(run: RunFile | None, worker_lines: dict[int, list[WorkerLine]]) -> Iterator[Mismatch]:
    """Yield every mismatch, rank by rank. A field that the worker could not read is not compared.

    Yields none for a process that tried settings, whose `run` has only the first, and for a user's own script, which
    may override a knob: its result names those.
    """
    if run is None or run.role == TRIAL or run.script is not None:
        return
    for rank, lines in sorted(worker_lines.items()):
        ran = newest(lines, ActualLine)
        if ran is None:
            continue
        for name, expected, actual in _pairs(run, ran):
            if expected is not None and actual is not None and expected != actual:
                yield Mismatch(name, expected, rank, actual)


def first_difference(run: RunFile | None, worker_lines: dict[int, list[WorkerLine]]) -> str | None:
    """The first difference as a sentence; None when there is none."""
    for mismatch in mismatches(run, worker_lines):
        return f"{mismatch.field}: asked for {mismatch.asked}, but rank {mismatch.rank} ran {mismatch.ran}"
    return None


def _pairs(run: RunFile, ran: ActualLine) -> Iterator[tuple[str, Any, Any]]:
    """Every field's name, its value as asked and as it ran; a strategy or optimizer of a newer version has none."""
    knobs = run.knobs
    strategy = STRATEGIES.get(str(knobs.get("strategy")))
    optimizer = OPTIMIZERS.get(str(knobs.get("optimizer")))
    yield "world_size", run.world_size, ran.world_size
    yield "nodes", max(1, len(run.nodes)), ran.nodes
    yield "device", run.device, None if ran.device is None else ran.device.partition(":")[0]
    if strategy is not None:
        name, wrapper, stages = f"strategy={strategy.name}", strategy.wrapper, None
        schedule = SCHEDULES.get(str(knobs.get("pp_schedule")))
        if strategy.is_pipeline and schedule is not None:
            wrapper = "+".join(sorted(filter(None, (wrapper, schedule.wrapper))))
            stages = axis_degree(knobs, "pp") * schedule.stages_per_rank
        yield f"{name} (wrapper)", wrapper, None if ran.wrapper is None else "+".join(sorted(ran.wrapper.split("+")))
        yield "pipeline_stages", stages, ran.pipeline_stages
        yield "mesh", expected_mesh(knobs, run.devices_used), ran.mesh
        yield f"{name} (zero_stage)", strategy.zero_stage, ran.zero_stage
        if "sequence_parallel" in strategy.knobs:
            yield "sequence_parallel", knobs.get("sequence_parallel"), ran.sequence_parallel
        if "ep_degree" in strategy.knobs:
            yield "ep_degree", knobs.get("ep_degree"), ran.ep_degree
        yield "reshard", knobs.get("reshard") if "reshard" in strategy.knobs else None, ran.reshard
    formats = PRECISIONS.get(str(knobs.get("precision")))
    if formats is not None:
        # DeepSpeed keeps its fp32 copy of the weights in the optimizer.
        is_zero = strategy is not None and strategy.is_zero
        param_dtype = formats.compute_dtype if is_zero else formats.param_dtype
        yield f"precision={formats.name} (param_dtype)", param_dtype, ran.param_dtype
        compute_dtype = PRECISIONS[computing_precision(knobs)].compute_dtype
        yield f"precision={formats.name} (compute_dtype)", compute_dtype, ran.compute_dtype
        has_float8 = None if ran.float8_layers is None else ran.float8_layers > 0
        yield f"precision={formats.name} (float8_layers)", formats.name == "fp8", has_float8
    if optimizer is not None:
        # DeepSpeed has an AdamW of its own for offloaded states.
        is_own = strategy is not None and strategy.offloads and ran.optimizer == "DeepSpeedCPUAdam"
        expected_class = ran.optimizer if is_own and optimizer.class_name == "AdamW" else optimizer.class_name
        yield "optimizer", expected_class, ran.optimizer
        yield f"optimizer={optimizer.name} (implementation)", optimizer.implementation, ran.optimizer_implementation
    for lever in filter(lambda entry: entry.actual, LEVERS.values()):
        asked = knobs.get(lever.name)
        yield lever.name, None if lever[asked].is_any else asked, getattr(ran, lever.actual)
    yield "engine", knobs.get("engine"), ran.engine
    attention, mode = knobs.get("attention"), knobs.get("compile", "off")
    yield f"attention={attention}", ATTENTION_IMPLEMENTATIONS.get(str(attention)), ran.attention
    yield f"compile={mode} (compiled)", mode != "off", ran.compiled
    has_blocks = None if ran.compiled_blocks is None else ran.compiled_blocks > 0
    yield f"compile={mode} (compiled_blocks)", mode == "blocks", has_blocks


LineT = TypeVar("LineT", bound=RankLine)

EARLY_PHASES = ("import", "data")
"""The phases before there is a model, whose memory no knob decides."""
REASON_CHARACTERS = 300
"""The longest line that a reason takes from an error."""

# Errors of a rank when another rank has exited.
_PEER_LOST = re.compile(
    r"connection (?:was )?(?:closed|reset|refused)|broken pipe|remote process|peer|gloo|ProcessGroup|NCCL"
    r"|DistBackendError|DistNetworkError|TCPStore|SignalException|socket",
    re.IGNORECASE,
)
_TRAINING_STACK = re.compile(r"No module named '(torch|transformers|tokenizers|numpy)\b")


@dataclass(frozen=True)
class EndFacts:
    """Everything known about a run once its last process is gone."""

    run: RunFile | None = None
    end: TrainingEnd = field(default_factory=TrainingEnd)
    worker_lines: dict[int, list[WorkerLine]] = field(default_factory=dict)
    last_step: dict[int, int] = field(default_factory=dict)
    """The last step of each rank that took one."""
    output_tail: str = ""
    no_step_reason: str | None = None
    """The reason that a user's own script has reported no step, used only if no step was recorded.

    None for a preset's run.
    """


@dataclass(frozen=True)
class Verdict:
    """The end state, its reason in one line, and the error for `result.json`."""

    state: str
    reason: str
    error: RunError | None = None


def judge(facts: EndFacts) -> Verdict:
    """Return the verdict. The first event decides: an error from before a stop request outweighs the request."""
    rules = (
        *(_not_started, _node_lost, _script_finished, _finished, _refused, _ended_from_outside, _raised),
        *(_kernel_killed, _rank_lost, _stopped, _printed_oom, _by_exit_code),
    )
    verdict = _with_limit(facts, next(verdict for rule in rules if (verdict := rule(facts)) is not None))
    is_killed = verdict.state == "killed" and facts.end.stop_ns is None
    has_failed = is_killed or verdict.state in ("failed", "failed_to_start")
    if facts.end.full_disk_text is None or not has_failed:
        return verdict
    # DeepSpeed's disk extension ignores a write's error, and aborts when it reads the file that is too short.
    return replace(verdict, reason=f"{facts.end.full_disk_text}: {verdict.reason}")


def _with_limit(facts: EndFacts, verdict: Verdict) -> Verdict:
    """The verdict with the limit that explains it. Where one leaves no room for the imports, no knob helps."""
    if facts.run is None or verdict.state in ("finished", "stopped"):
        return verdict
    if verdict.state == "oom" and facts.run.memory_limit_bytes:
        return verdict  # the run's own limit ended it
    error = f"{verdict.error and verdict.error.type}: {verdict.reason}"
    output = facts.output_tail if verdict.state == "failed_to_start" else ""
    words = limit_words(facts.run.limits, error, output)
    phase = verdict.error and verdict.error.phase
    is_early = phase in EARLY_PHASES or (facts.run.script is None and not any(facts.worker_lines.values()))
    in_vain = words and verdict.state == "oom" and is_early
    return replace(verdict, state="failed_to_start" if in_vain else verdict.state, reason=verdict.reason + words)


def _not_started(facts: EndFacts) -> Verdict | None:
    reason = facts.end.spawn_error
    return None if reason is None else Verdict("failed_to_start", reason, RunError(message=reason))


def _node_lost(facts: EndFacts) -> Verdict | None:
    """The verdict where a node of several is lost, or torchrun died on one: that comes before what its ranks' peers
    report."""
    after = f"after {counted(max(facts.last_step.values(), default=0), 'step')}"
    if facts.end.lost_nodes:
        return Verdict("lost", f"{'; '.join(facts.end.lost_nodes.values())} ({after})")
    if facts.end.killed_agent is None or facts.end.oom_kills or facts.end.stop_ns is not None:
        return None
    reason = f"{facts.end.killed_agent}, which trainfast-tui did not send ({after})"
    return Verdict("killed", reason, RunError(message=reason))


def one_line(text: str, limit: int = REASON_CHARACTERS) -> str:
    """The first telling line of `text`, shortened; of an allocator's message without its prefix."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    start = line.find("DefaultCPUAllocator")
    line = line[start:] if start > 0 else line
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def _finished(facts: EndFacts) -> Verdict | None:
    """The verdict if the exit status is 0, every rank recorded that it finished, and the asked settings ran."""
    if facts.end.exit_code != 0 or not all(newest(lines, FinishedLine) for lines in _all_ranks(facts)):
        return None
    if difference := first_difference(facts.run, facts.worker_lines):
        return Verdict("failed", difference, RunError(type="NotWhatWasAsked", message=difference))
    steps = max(facts.last_step.values(), default=0)
    if not steps:
        return Verdict("finished", "finished without a recorded step")
    return Verdict("finished", f"took {'all ' if steps > 1 else ''}{counted(steps, 'step')}")


def _script_finished(facts: EndFacts) -> Verdict | None:
    """The verdict on a user's own script that ended with status 0, or trained on after the steps asked for."""
    if facts.run is None or facts.run.script is None or facts.end.stop_ns is not None:
        return None
    steps = max(facts.last_step.values(), default=0)
    if any(newest(lines, IgnoredStopLine) for lines in facts.worker_lines.values()):
        took = f"took the {counted(steps, 'step')} asked for"
        return Verdict("finished", f"{took}; the script caught SystemExit and was ended")
    if facts.end.exit_code != 0:
        return _script_aborted(facts, facts.run.script.steps)
    return Verdict("finished", f"took {counted(steps, 'step')}" if steps else f"{NO_STEP}: {facts.no_step_reason}")


def _script_aborted(facts: EndFacts, asked_steps: int | None) -> Verdict | None:
    """The verdict if every rank had taken the steps asked for and recorded its end before one died of a signal.

    The hooks end a script within its loop, before it leaves its process group; gloo's threads sometimes abort then.
    """
    codes = list(reported_codes(facts.output_tail).values()) or [facts.end.exit_code or 0]
    if asked_steps is None or max(codes) >= 0:
        return None
    for rank, lines in enumerate(_all_ranks(facts)):
        if facts.last_step.get(rank, 0) < asked_steps or not newest(lines, FinishedLine):
            return None
    death = reported_end(facts.output_tail) or f"its process {exit_text(codes[0])}"
    return Verdict("finished", f"took the {counted(asked_steps, 'step')} asked for; then {death}")


def _refused(facts: EndFacts) -> Verdict | None:
    """The verdict if the worker refused its input."""
    for rank, line in _lines_before_stop(facts, InvalidLine):
        reason = one_line(line.message or "the worker refused its input")
        return Verdict("failed_to_start", reason, error_of(line, rank, _phase(facts, rank)))
    return None


def _ended_from_outside(facts: EndFacts) -> Verdict | None:
    """The verdict if a rank got an outside SIGTERM before any other failure."""
    if facts.end.stop_ns is not None or facts.end.torn_down_reason or facts.end.lost_ranks:
        return None
    first_signal = next(_lines_before_stop(facts, SignalLine), None)
    first_exception = next(_lines_before_stop(facts, ExceptionLine), None)
    if first_signal is None or (first_exception is not None and first_exception[1].t_ns < first_signal[1].t_ns):
        return None
    rank, line = first_signal
    all_signalled = all(newest(lines, SignalLine) for lines in _all_ranks(facts))
    subject = "the training process" if all_signalled else f"rank {rank}"
    point = _failure_point(facts, rank, line, names_rank=False)
    reason = f"{subject} was ended by SIGTERM, which trainfast-tui did not send ({point})"
    return _verdict(facts, "killed" if all_signalled else "failed", reason, rank, "SIGTERM")


def _raised(facts: EndFacts) -> Verdict | None:
    """The verdict on the first exception that a rank recorded; one that only reports a lost rank does not count."""
    exceptions = list(_lines_before_stop(facts, ExceptionLine))
    ooms = [(rank, line) for rank, line in exceptions if line.is_oom or is_out_of_memory(_chain_texts(line))]
    if _lost_rank(facts)[0] is not None:
        exceptions = [(rank, line) for rank, line in exceptions if not any(map(_PEER_LOST.search, _chain_texts(line)))]
    for rank, line in (*ooms, *exceptions):
        point = _failure_point(facts, rank, line)
        if ooms:
            state, reason = "oom", f"{one_line(_oom_message(line))} ({point})"
        elif facts.end.oom_kills and any("killed by signal: Killed" in text for text in _chain_texts(line)):
            state, reason = "oom", f"{KERNEL_KILLER} ended a data loader process: host memory was full ({point})"
        else:
            state = "failed" if _in_training(facts) else "failed_to_start"
            text = f"{line.type}: {one_line(line.message or '')}" if line.message else str(line.type)
            reason = f"{text} ({point}){_hint(facts, line)}"
        return Verdict(state, reason, error_of(line, rank, _phase(facts, rank)))
    return None


def _kernel_killed(facts: EndFacts) -> Verdict | None:
    """The verdict if the kernel's out-of-memory killer killed during the run, and a process died of its signal."""
    if not facts.end.oom_kills or facts.end.stop_ns is not None:
        return None
    rank, code = _lost_rank(facts)
    # Without a lost rank the direct child is the only process that can have died of the signal.
    if code not in (None, -signal.SIGKILL) or (rank is None and facts.end.exit_code != -signal.SIGKILL):
        return None
    reason = f"{KERNEL_KILLER} ended the process: host memory was full ({_failure_point(facts, rank or 0)})"
    return _verdict(facts, "oom", reason, rank or 0, "SIGKILL")


def _stopped(facts: EndFacts) -> Verdict | None:
    if facts.end.stop_ns is None:
        return None
    after = f"after {counted(max(facts.last_step.values(), default=0), 'step')}"
    if not facts.end.sigkill:
        return Verdict("stopped", f"stopped as asked, {after}")
    if facts.end.grace_s <= 0:
        return Verdict("killed", f"killed as asked, {after}")
    return Verdict("killed", f"asked to stop, did not within {facts.end.grace_s:g} s and was killed, {after}")


def _rank_lost(facts: EndFacts) -> Verdict | None:
    """The verdict if a rank exited without recording its end, while the launcher was not killed."""
    rank, code = _lost_rank(facts)
    if rank is None or (facts.end.exit_code is not None and facts.end.exit_code < 0 and not facts.end.torn_down_reason):
        return None
    end = "exited without reporting an error" if code is None else exit_text(code)
    reason = f"rank {rank} {end} ({_failure_point(facts, rank, names_rank=False)})"
    return _verdict(facts, "failed", reason, rank)


def _printed_oom(facts: EndFacts) -> Verdict | None:
    """The verdict if no rank recorded an exception, and the last output reports that memory ran out."""
    if facts.end.exit_code in (0, None, -signal.SIGKILL, -signal.SIGTERM):
        return None
    for line in reversed(facts.output_tail.splitlines()):
        if is_out_of_memory([line]):
            point = _failure_point(facts, 0)
            error = RunError(rank=None, phase=_phase(facts, 0), message=one_line(line, 2000))
            return Verdict("oom", f"{one_line(line)} ({point})", error)
    return None


def _by_exit_code(facts: EndFacts) -> Verdict:
    """The verdict by the direct child's exit code, when no record tells more."""
    code = facts.end.exit_code if facts.end.exit_code is not None else 0
    if facts.end.torn_down_reason:
        return Verdict("failed", facts.end.torn_down_reason, RunError(message=facts.end.torn_down_reason))
    point = _failure_point(facts, 0)
    if code < 0:
        all_finished = all(newest(lines, FinishedLine) for lines in _all_ranks(facts))
        note = "after it had recorded its end" if all_finished else point
        reason = f"the training process {exit_text(code)}, which trainfast-tui did not send ({note})"
        return _verdict(facts, "killed", reason)
    if code == 0:
        silent = [rank for rank, lines in enumerate(_all_ranks(facts)) if not newest(lines, FinishedLine)]
        reason = f"the training exited with status 0, but rank {silent[0]} never recorded that it finished"
        return _verdict(facts, "failed", reason, silent[0])
    output = facts.output_tail
    last = last_line(output.splitlines())
    is_script = facts.run is not None and facts.run.script is not None
    no_stdin = " (a run has no standard input)" if is_script and "EOFError" in last else ""
    printed = reported_end(output) or f"{one_line(last)}{error_location(output)}{no_stdin}"
    reason = f"the training exited with status {code}" + (f": {printed}" if printed else "")
    verdict = _verdict(facts, "failed_to_start", reason)
    return replace(verdict, state="failed", reason=f"{reason} ({point})") if _in_training(facts) else verdict


def _verdict(facts: EndFacts, state: str, reason: str, rank: int | None = None, type: str | None = None) -> Verdict:
    """Return a verdict whose reason is also the error's message; `rank` is the failed one, None if unknown."""
    return Verdict(state, reason, RunError(rank=rank, phase=_phase(facts, rank or 0), type=type, message=reason))


def _all_ranks(facts: EndFacts) -> list[list[WorkerLine]]:
    world_size = facts.run.world_size if facts.run else max(facts.worker_lines, default=0) + 1
    return [facts.worker_lines.get(rank, []) for rank in range(world_size)]


def _lines_before_stop(facts: EndFacts, line_type: type[LineT]) -> Iterator[tuple[int, LineT]]:
    """Lines of that type from before a stop request, the earliest first, each with its rank."""
    timed_lines = [
        (line.t_ns, rank, line)
        for rank, lines in facts.worker_lines.items()
        for line in lines
        if isinstance(line, line_type) and (facts.end.stop_ns is None or line.t_ns <= facts.end.stop_ns)
    ]
    yield from ((rank, line) for _, rank, line in sorted(timed_lines, key=lambda item: item[:2]))


def _chain_texts(line: ExceptionLine) -> list[str]:
    """Type and message of each exception of the chain, as Python prints them."""
    chain = line.chain or [{"type": line.type or "", "message": line.message or ""}]
    return [f"{link.get('type', '')}: {link.get('message', '')}" for link in chain]


def _oom_message(line: ExceptionLine) -> str:
    """The allocator's message: the exception in the chain about memory, else the first one's."""
    for link, text in zip(line.chain or [], _chain_texts(line), strict=False):
        if is_out_of_memory([text], memory_is_low=True):
            message = link.get("message", "")
            telling_lines = (part for part in message.splitlines() if is_out_of_memory([part], memory_is_low=True))
            return next(telling_lines, message or link.get("type", ""))
    return line.message or line.type or "out of memory"


def _lost_rank(facts: EndFacts) -> tuple[int | None, int | None]:
    """The first rank that exited unasked, and its exit code if torchrun printed one; (None, None) without one."""
    codes = reported_codes(facts.output_tail)
    if not codes:
        return (facts.end.lost_ranks[0], None) if facts.end.lost_ranks else (None, None)
    # A rank that is missing in the report was ended by torchrun itself, after another one had failed.
    failed_ranks = [rank for rank in facts.end.lost_ranks if codes.get(rank, -signal.SIGTERM) != -signal.SIGTERM]
    return (failed_ranks[0], codes[failed_ranks[0]]) if failed_ranks else (None, None)


def _phase(facts: EndFacts, rank: int) -> str | None:
    """The last phase the rank entered."""
    phases = [line.phase for line in facts.worker_lines.get(rank, []) if isinstance(line, PhaseLine) and line.phase]
    return phases[-1] if phases else None


def _in_training(facts: EndFacts) -> bool:
    lines = [line for lines in facts.worker_lines.values() for line in lines]
    has_train_phase = any(isinstance(line, PhaseLine) and line.phase == "train" for line in lines)
    return has_train_phase or any(facts.last_step.values())


def _failure_point(
    facts: EndFacts, rank: int, line: ExceptionLine | SignalLine | None = None, *, names_rank: bool = True
) -> str:
    """The rank, step and phase of a failure as far as known, such as `rank 1, step 3, phase backward`.

    Without the rank if there is only one, and without `names_rank`, for a sentence that names it already.
    """
    phase = (line.phase if line else None) or _phase(facts, rank)
    step = line.step if line else facts.last_step.get(rank)
    has_several_ranks = facts.run is not None and facts.run.world_size > 1
    parts = [
        f"rank {rank}" if names_rank and has_several_ranks else None,
        (f"step {step}" if line else f"after step {step}") if step else None,
        f"phase {phase}" if phase else None,
    ]
    return ", ".join(part for part in parts if part) or "before its first record"


def _hint(facts: EndFacts, line: ExceptionLine) -> str:
    """The command that installs a missing training stack, or how much memory was free at an error that hints at it."""
    if hints_at_memory(_chain_texts(line)):
        if line.free_bytes is None:
            return "; this can mean out of memory: how much was free is unknown"
        return f"; not out of memory: {gibibytes(line.free_bytes)} of the GPU's memory was free"
    if _TRAINING_STACK.search(line.message or ""):
        python = (facts.run.python if facts.run else "") or "python"
        return f"; install it with: {python} -m pip install torch transformers"
    return ""


# The report torchrun prints: the ranks it saw fail, each with its exit code.
_REPORTED = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+) \(pid: \d+\)")


def reported_codes(output: str) -> dict[int, int]:
    """The exit code of each rank in torchrun's report; empty without one."""
    return {int(rank): int(code) for rank, code in _REPORTED.findall(output)}


def reported_end(output: str) -> str:
    """The end of the first rank in torchrun's report that torchrun itself did not end; empty without one."""
    codes = reported_codes(output).items()
    return next((f"rank {rank} {exit_text(code)}" for rank, code in codes if code != -signal.SIGTERM), "")


def exit_text(code: int) -> str:
    """An exit code in words; a negative one is a signal's."""
    return f"exited with status {code}" if code >= 0 else f"died of {signal_name(-code)}"


def error_location(output: str) -> str:
    """The file and line, ` (train.py:3)`, where the output ends in an error of Python's grammar; empty elsewhere."""
    if not last_line(output.splitlines()).startswith(("SyntaxError", "IndentationError", "TabError")):
        return ""
    locations = re.findall(r'^ *File "(.+)", line (\d+)', output, re.MULTILINE)
    return f" ({os.path.basename(locations[-1][0])}:{locations[-1][1]})" if locations else ""

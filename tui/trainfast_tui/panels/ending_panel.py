"""The end of a run, in the middle of the screen: the reason, and the changes to try, with their keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from trainfast_runner.records.result import OomChange, OomExplanation
from trainfast_runner.records.worker_lines import ExceptionLine
from trainfast_tui.next_run.next_run import has_same_model
from trainfast_tui.painting import GrowingPanel
from trainfast_tui.text import format as fmt
from trainfast_tui.text import memory_words
from trainfast_tui.text.format import DOUBT_SIGN, Line, Tone, paragraph
from trainfast_tui.text.keys import RUN_KEY, SCRIPT_KEY, STOP_KEY, key_of
from trainfast_tui.text.memory_words import phase_words

if TYPE_CHECKING:
    from trainfast_runner.records.run_file import RunFile
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_tui.session import Session


MAX_REASON_LINES = 4
CHANGE_KEYS = ("", "1 sets it", "1 or 2 sets it", "1, 2 or 3 sets it")
"""Keys by the number of changes."""


class EndingPanel(GrowingPanel):
    """The reason and the changes, and their keys."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._ending: Ending | None = None
        self._run_id = ""
        self._run_file: RunFile | None = None

    def show_run(self, run: RunSnapshot | None) -> None:
        """Show how this run ended; nothing while it is live."""
        new_ending = None
        if run is not None:
            new_ending = ending_of(run, *self._session.background.oom_explainer.explanation_of(run))
            if new_ending is not None and self._ending is not None and run.run_id == self._run_id:
                new_ending = replace(new_ending, changes=with_same_keys(new_ending.changes, self._ending.changes))
            self._run_id, self._run_file = run.run_id, run.run_file
        if new_ending != self._ending:
            self._ending = new_ending
            self.set_shown(new_ending is not None)

    def action_apply_change(self, index: int) -> None:
        """Give the next run one of the proposed changes."""
        next_run = self._session.next_run
        if self._ending is None or self._run_file is None or index >= len(self._ending.changes) or next_run is None:
            return
        if (self._run_file.script or next_run.script) and not has_same_model(self._run_file, next_run.spec):
            self.screen.notify(
                f"The changes are for {self._run_file.name}; the next run is {next_run.spec.name}.", severity="warning"
            )
            return
        self._session.set_knobs(self._ending.changes[index].settings.items())

    def lines(self, width: int, height: int) -> list[Line]:
        ending = self._ending
        if ending is None:
            return []
        alarm = ending.tone == "error"
        head = f" {ending.headline.upper()} " if alarm else ending.headline
        lines: list[Line] = [[(head, "alarm" if alarm else ending.tone)]] if head else []
        lines += paragraph(ending.reason, width, "text", MAX_REASON_LINES)
        for fact in ending.facts:
            lines += paragraph(fact, width, "text", 2)
        lines += _change_lines(ending.changes, width)
        lines += [[("│ ", "muted"), (text, "text")] for text in ending.log]
        return [*lines, *paragraph(ending.advice, width, "muted", 2)]


def with_same_keys(changes: Sequence[OomChange], shown_changes: Sequence[OomChange]) -> tuple[OomChange, ...]:
    """Return the changes in the order of their keys: first those that are shown already, in their order."""
    shown = [change.settings for change in shown_changes]
    return tuple(
        sorted(changes, key=lambda change: shown.index(change.settings) if change.settings in shown else len(shown))
    )


def _change_lines(changes: tuple[OomChange, ...], width: int) -> list[Line]:
    """Return each change with its key, the memory it needs or frees, and its cost, beside it or below."""
    if not changes:
        return []
    lines: list[Line] = paragraph(
        f"{CHANGE_KEYS[len(changes)]}; {memory_words.changes_title(changes)}", width, "muted", 2
    )
    head_width = max(len(memory_words.change_words(change)) for change in changes)
    for index, change in enumerate(changes, 1):
        head, words = memory_words.change_words(change), memory_words.effect_words(change)
        lines.append([(f" {index} ", "key"), (head, "title")])
        if 3 + head_width + 2 + len(words) <= width:
            lines[-1].append((f"{'':{head_width - len(head)}}  {words}", "text"))
        else:
            lines += [[("   ", "text"), *line] for line in paragraph(words, width - 3, "text", 2)]
    return lines


MAX_LOG_LINES = 4
"""The newest lines of the log beside a failure."""
MAX_CHANGES = 3
"""As many changes have a key; a newer version may record more."""
NO_CHANGE_ADVICE = f"No knob is known to free memory: make the batch smaller, or map its flag ({SCRIPT_KEY})."
RUN_AGAIN_ADVICE = f"{RUN_KEY} runs again."
SHOW_LOG_ADVICE = f"{key_of('main', 'LogPane.log')} shows the whole log"


class Ending(msgspec.Struct, frozen=True):
    """The end of a run in words, or the loss of its supervisor."""

    headline: str
    tone: Tone
    """The tone of the headline."""
    reason: str
    changes: tuple[OomChange, ...] = ()
    """The first `MAX_CHANGES` changes of knobs that would make the run fit."""
    log: tuple[str, ...] = ()
    """The last lines of the log."""
    advice: str = ""
    facts: tuple[str, ...] = ()
    """Sentences about an out-of-memory error."""


def ending_of(run: RunSnapshot, explanation: OomExplanation | None, traces_left: int) -> Ending | None:
    """Return the run's ending, or None while it is running and supervised.

    `explanation` explains an out-of-memory error; `traces_left` traces of its changes remain.
    """
    if run.is_live:
        if run.supervised:
            return None
        return Ending(
            "running without its supervisor",
            "warning",
            run.reason or "The supervisor is gone and the training goes on: no telemetry, no time limit, no result.",
            advice=f"{STOP_KEY} stops it and cleans up; the records so far are kept.",
        )
    if run.state == "oom":
        return _oom(run, explanation, traces_left)
    if run.state == "finished":
        return _finished(run)
    if run.state not in ENDINGS:
        return None
    headline, tone, reason, advice = ENDINGS[run.state]
    log = () if run.state == "stopped" else tuple(line for line in run.log if line.strip())[-MAX_LOG_LINES:]
    return Ending(headline + _error_location(run), tone, run.reason or reason or _message(run), log=log, advice=advice)


KEPT_ADVICE = f"Its steps are kept. {RUN_AGAIN_ADVICE}"
FIX_ADVICE = f"{SHOW_LOG_ADVICE}. Fix what the error names, then press {RUN_KEY}."
START_ADVICE = f"{SHOW_LOG_ADVICE}; trainfast-tui doctor looks for what is missing on this machine."
LOST_ADVICE = "Its records are kept. trainfast-tui doctor says whether this machine ends programs at logout."
ENDINGS: dict[str, tuple[str, Tone, str, str]] = {
    "failed": ("failed", "error", "", FIX_ADVICE),
    "failed_to_start": ("failed to start", "error", "", START_ADVICE),
    "stopped": ("stopped", "warning", "Stopped as requested.", KEPT_ADVICE),
    "killed": ("killed", "warning", "Killed; no reason was recorded.", KEPT_ADVICE),
    "lost": ("lost", "warning", "All its processes are gone and it wrote no result.", LOST_ADVICE),
}
"""Headline, its tone, the reason of a run that recorded none, and advice, by the state of the run."""


def _finished(run: RunSnapshot) -> Ending:
    if run.result is None:
        return Ending("finished", "text", "Its result is being computed.")
    advice = f"Turn a knob, press {RUN_KEY}; {key_of('main', 'compare')} compares both runs."
    if run.result.doubts:
        reasons = "; ".join(fmt.plain(doubt.text) for doubt in run.result.doubts)
        return Ending(f"{DOUBT_SIGN} doubtful", "warning", f"The run {reasons}.", advice=advice)
    # The header says that it finished.
    return Ending("", "success", "", advice=advice)


def _oom(run: RunSnapshot, explanation: OomExplanation | None, traces_left: int) -> Ending:
    facts = list(memory_words.oom_sentences(explanation)) if explanation is not None else []
    if traces_left:
        facts.append(f"Tracing which changes would fit, {traces_left} to go…")
    reason = fmt.with_sizes(run.reason or _message(run))
    if explanation is not None and explanation.held_bytes is not None and explanation.asked_bytes is not None:
        # The allocator's long sentence adds nothing; the status line and the log have it.
        reason = ""
    elif run.run_file is not None and run.run_file.memory_limit_bytes:
        reason = f"{reason.rstrip('.')}. The limit was {fmt.size(min(run.run_file.memory_limit_bytes))} a rank."
    changes = () if explanation is None else tuple(explanation.changes[:MAX_CHANGES])
    is_script = run.run_file is not None and run.run_file.script is not None
    advice = "" if changes else NO_CHANGE_ADVICE if is_script else RUN_AGAIN_ADVICE
    return Ending(f"out of memory{_error_location(run)}", "error", reason, changes, advice=advice, facts=tuple(facts))


def _error_location(run: RunSnapshot) -> str:
    """Name the phase, step and rank of the error."""
    result_error = run.result.error if run.result is not None else None
    line = run.error if isinstance(run.error, ExceptionLine) else None
    phase = (result_error.phase if result_error is not None else None) or (line.phase if line is not None else None)
    rank = result_error.rank if result_error is not None else (line.rank if line is not None else None)
    step = line.step if line is not None else None
    words = [f"in {phase_words(phase)}" if phase else "", f"at step {step:,}" if step is not None else ""]
    if rank is not None and run.run_file is not None and run.run_file.world_size > 1:
        words.append(f"on rank {rank}")
    location = " ".join(filter(None, words))
    return f" {location}" if location else ""


def _message(run: RunSnapshot) -> str:
    line = run.error
    words = f"{line.type or ''}: " if isinstance(line, ExceptionLine) else ""
    return "" if line is None else f"{words}{line.message or ''}".strip(": ")

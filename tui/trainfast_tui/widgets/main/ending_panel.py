"""The end of a run, in the middle of the screen: the reason, and the changes to try, with their keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from trainfast_runner.records.result import OomChange
from trainfast_tui.next_run.same_settings import has_same_model
from trainfast_tui.painting.painted import GrowingPanel
from trainfast_tui.text import oom_words
from trainfast_tui.text.lines import Line, paragraph
from trainfast_tui.widgets.main.ending_words import Ending, ending_of

if TYPE_CHECKING:
    from trainfast_runner.records.run_file import RunFile
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_tui.next_run.next_run import NextRun
    from trainfast_tui.session import Session

MAX_REASON_LINES = 4
CHANGE_KEYS = ("", "1 sets it", "1 or 2 sets it", "1, 2 or 3 sets it")
"""Keys by the number of changes."""


class _AppliedChange(msgspec.Struct, frozen=True):
    """A change that was applied after the end of a run."""

    run_id: str
    """The run that ended."""
    before: NextRun
    """The next run without the change."""
    after: NextRun
    """The next run with the change."""


class EndingPanel(GrowingPanel):
    """The reason and the changes, and their keys."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._ending: Ending | None = None
        self._run_id = ""
        self._run_file: RunFile | None = None
        self._applied: _AppliedChange | None = None
        """The change applied last."""

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
        """Give the next run one of the proposed changes, in place of the one applied before."""
        next_run = self._session.next_run
        if self._ending is None or self._run_file is None or index >= len(self._ending.changes) or next_run is None:
            return
        if (self._run_file.script or next_run.script) and not has_same_model(self._run_file, next_run.spec):
            self.screen.notify(
                f"The changes are for {self._run_file.name}; the next run is {next_run.spec.name}.", severity="warning"
            )
            return
        before = self._without_last_change(next_run)
        self._session.set_knobs(self._ending.changes[index].settings.items(), before)
        self._applied = _AppliedChange(self._run_id, before, self._session.next_run or before)

    def _without_last_change(self, next_run: NextRun) -> NextRun:
        """Undo the last change, since one is enough; knobs turned since then stay as they are."""
        applied = self._applied
        if applied is None or applied.run_id != self._run_id:
            return next_run
        for name, value in applied.after.spec.knobs.items():
            if value != applied.before.spec.knobs.get(name) and next_run.spec.knobs.get(name) == value:
                next_run = next_run.with_value_of(name, applied.before)
        return next_run

    def lines(self, width: int, height: int) -> list[Line]:
        ending = self._ending
        if ending is None:
            return []
        alarm = ending.tone == "error"
        head = f" {ending.headline.upper()} " if alarm else ending.headline
        line: Line = [(head, "alarm" if alarm else ending.tone)]
        if ending.tone == "success":
            return [[*line, (f"  {ending.advice}", "muted")]]
        lines: list[Line] = [line, *paragraph(ending.reason, width, "text", MAX_REASON_LINES)]
        for fact in ending.facts:
            lines += paragraph(fact, width, "text", 2)
        lines += _change_lines(ending.changes, width)
        lines += [[("│ ", "muted"), (text, "text")] for text in ending.log]
        return [*lines, *paragraph(ending.advice, width, "muted", 2)]


def with_same_keys(changes: Sequence[OomChange], shown_changes: Sequence[OomChange]) -> tuple[OomChange, ...]:
    """Return the changes in the order of their keys; a change in `shown_changes` keeps its key.

    The key of a change that is gone goes to a new change, else to the last one: the keys have no gap.
    """
    by_settings = {tuple(sorted(change.settings.items())): change for change in changes}
    kept_changes = [by_settings.pop(tuple(sorted(change.settings.items())), None) for change in shown_changes]
    added_changes = iter(by_settings.values())
    by_key = [next(added_changes, None) if change is None else change for change in kept_changes]
    by_key += added_changes
    while None in by_key:
        last = by_key.pop()
        if last is not None:
            by_key[by_key.index(None)] = last
    return tuple(change for change in by_key if change is not None)


def _change_lines(changes: tuple[OomChange, ...], width: int) -> list[Line]:
    """Return each change with its key, the memory it needs or frees, and its cost, beside it or below."""
    if not changes:
        return []
    lines: list[Line] = paragraph(f"{CHANGE_KEYS[len(changes)]}; {oom_words.changes_title(changes)}", width, "muted", 2)
    head_width = max(len(oom_words.change_words(change)) for change in changes)
    for index, change in enumerate(changes, 1):
        head, words = oom_words.change_words(change), oom_words.effect_words(change)
        lines.append([(f" {index} ", "key"), (head, "title")])
        if 3 + head_width + 2 + len(words) <= width:
            lines[-1].append((f"{'':{head_width - len(head)}}  {words}", "text"))
        else:
            lines += [[("   ", "text"), *line] for line in paragraph(words, width - 3, "text", 2)]
    return lines

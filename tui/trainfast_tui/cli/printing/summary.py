"""Print a result: figures, notes, bottlenecks, and after an out-of-memory error the changes that would fit."""

from __future__ import annotations

from trainfast_runner.records.result import Result
from trainfast_runner.records.run_states import exit_code_of
from trainfast_tui.cli.printing.output import print_json, print_lines
from trainfast_tui.text import oom_words
from trainfast_tui.text.result_figures import figure_rows, headline, result_notes
from trainfast_tui.text.tables import pair_lines


def print_result(result: Result, as_json: bool) -> int:
    """Print a result for a person or a program and return its exit code."""
    if as_json:
        print_json(result)
    else:
        print_lines(summary_lines(result))
    return exit_code_of(result.state)


def summary_lines(result: Result) -> list[str]:
    """Return the whole summary in lines of text."""
    return [*figure_lines(result), *oom_lines(result)]


def figure_lines(result: Result) -> list[str]:
    """Return the verdict, the figures, notes and bottlenecks in lines of text."""
    lines = [headline(result), *pair_lines(figure_rows(result)), *(f"note: {note}" for note in result_notes(result))]
    for index, diagnosis in enumerate(result.diagnosis):
        lines += [f"{'also' if index else 'bottleneck'}: {diagnosis.line}", f"  try: {diagnosis.advice}"]
    return lines


def oom_lines(result: Result) -> list[str]:
    """Return the explanation of an out-of-memory error and the changes that would fit; empty for another end."""
    explained = result.oom
    if explained is None or result.state != "oom":
        return []
    lines = list(oom_words.oom_sentences(explained))
    if explained.changes:
        lines.append(f"to make it fit, {oom_words.changes_title(explained.changes)}")
        lines += pair_lines(
            (f"  {oom_words.change_options(change)}", oom_words.effect_words(change)) for change in explained.changes
        )
    return lines

"""Effects that earlier searches of the same model found on the same device: the start of a new search."""

from __future__ import annotations

from pathlib import Path

from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.run_file import SCHEMA
from trainfast_runner.records.search_directories import newest_search_directories
from trainfast_runner.search.journal.best import BestEnded, BestQuestion, EarlierEffect, read_best_journal
from trainfast_runner.search.searches import BEST_KIND, first_line

SEARCHES_READ_FOR_EFFECTS = 50
"""Number of newest searches whose effects are read."""


def earlier_effects(home: Home, question: BestQuestion, own_directory: Path) -> list[EarlierEffect]:
    """Return the newest effect of each value of a varied knob, by answered searches other than `own_directory`.

    Only searches of the same model, data, objective and device names count, and only gains of the rate in samples/s or
    samples/J: not those of `time`, which includes process starts, nor of seq_len, which are in tokens/s.
    Raises UserError when the searches cannot be listed.
    """
    if question.objective == "time":
        return []
    effects: dict[tuple[str, str], EarlierEffect] = {}
    for directory in newest_search_directories(home, SEARCHES_READ_FOR_EFFECTS):
        if directory == own_directory or first_line(directory).kind != BEST_KIND:
            continue
        lines = read_best_journal(directory)
        end = newest(lines, BestEnded)
        earlier_question = lines[0] if lines else None
        if not isinstance(earlier_question, BestQuestion) or not _is_same_training(earlier_question, question):
            continue
        if end is None or end.state != "answered" or end.answer is None:
            continue
        for effect in end.answer.effects:
            # That search only copied the effect from an earlier one.
            if effect.earlier:
                continue
            if effect.knob != "seq_len" and effect.value in question.vary.get(effect.knob, ()):
                earlier_effect = EarlierEffect(
                    knob=effect.knob,
                    value=effect.value,
                    before=effect.before,
                    gain_percent=effect.gain_percent,
                    search_id=directory.name,
                )
                effects.setdefault((effect.knob, repr(effect.value)), earlier_effect)
    return list(effects.values())


def _is_same_training(earlier: BestQuestion, question: BestQuestion) -> bool:
    """True if an earlier search was of the same training on the same device."""
    return earlier.schema <= SCHEMA and _training_on_device(earlier) == _training_on_device(question)


def _training_on_device(question: BestQuestion) -> tuple[object, ...]:
    return question.model, question.data, question.device, question.device_names, question.objective

"""A person's instructions to a live best-fit search: lines of `orders.jsonl`, which the conductor reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, Literal

from trainfast_runner.records.home import home_error
from trainfast_runner.records.json_lines import Appender, read_all
from trainfast_runner.search.best_journal import Candidate, Instruction, InstructionWord
from trainfast_runner.search.searches import value_text
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, knob

INSTRUCTIONS_FILE = "orders.jsonl"
"""The file of a search's directory that takes its instructions."""
SKIP: Final = "skip"
"""Never try this value, or this candidate."""
PIN: Final = "pin"
"""Try only this value of a knob."""
UNPIN: Final = "unpin"
"""Remove a knob's pin."""
ValueInstruction = Literal["pin", "skip"]
"""An instruction about one value of a knob."""


def give_instruction(directory: Path, do: InstructionWord, name: str, value: object = None) -> None:
    """Instruct a live search to skip a value, or to pin or unpin a knob; the search obeys before its next step.

    Raises UserError for an unknown knob or value, and when the instruction cannot be written.
    """
    typed_value = knob(name).read(value) if do != UNPIN else None
    _append(directory, Instruction(do=do, knob=name, value=typed_value))


def skip_candidate(directory: Path, number: int) -> None:
    """Instruct a live search never to try this candidate; the search obeys before its next step."""
    _append(directory, Instruction(do=SKIP, candidate_number=number))


def instructions_in_force(instructions: Iterable[Instruction]) -> list[Instruction]:
    """Return the instructions that no later one replaced: a knob has one pin."""
    in_force: list[Instruction] = []
    for given in instructions:
        if given.do != SKIP:
            in_force = [earlier for earlier in in_force if earlier.do == SKIP or earlier.knob != given.knob]
        if given.do != UNPIN:
            in_force.append(given)
    return in_force


def excluded_by_instructions(candidates: Sequence[Candidate], instructions: Iterable[Instruction]) -> dict[int, str]:
    """Return the candidates that the instructions leave out, by number, with the instruction in words."""
    excluded: dict[int, str] = {}
    for given in instructions_in_force(instructions):
        for number, candidate in enumerate(candidates):
            if number == given.candidate_number:
                excluded[number] = "you skipped it"
            elif given.knob in candidate.knobs and (given.do == SKIP) == (candidate.knobs[given.knob] == given.value):
                did = "skipped" if given.do == SKIP else "pinned"
                excluded[number] = f"you {did} {given.knob}={value_text(given.knob, given.value)}"
    return excluded


def open_values(
    candidates: Sequence[Candidate], instructions: Sequence[Instruction], do: ValueInstruction
) -> dict[tuple[str, str], int]:
    """Return the number of remaining candidates by knob and typed value, for values to pin or to skip (`do`).

    A value is left out if it is the only one that remains.
    """
    open_counts: dict[tuple[str, str], int] = {}
    for name in candidates[0].knobs if candidates else ():
        # A knob's next pin replaces its present one.
        others = [given for given in instructions if not (do == PIN == given.do and given.knob == name)]
        excluded = excluded_by_instructions(candidates, others)
        counts = Counter(
            KNOBS_BY_NAME[name].text_of(candidate.knobs[name])
            for number, candidate in enumerate(candidates)
            if candidate.excluded_as is None and number not in excluded
        )
        if len(counts) > 1:
            open_counts |= {(name, text): count for text, count in counts.items()}
    return open_counts


def read_instructions(directory: Path) -> list[Instruction]:
    """Return every readable instruction, oldest first; empty if none was given."""
    instructions, _ = read_all(directory / INSTRUCTIONS_FILE, Instruction)
    return instructions


def _append(directory: Path, instruction: Instruction) -> None:
    """Append the instruction. Raises UserError if it cannot be written."""
    try:
        with closing(Appender(directory / INSTRUCTIONS_FILE)) as file:
            file.write(instruction)
    except OSError as error:
        raise home_error(directory, error) from None

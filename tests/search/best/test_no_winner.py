"""An answer that the noise of the machine decides names no winner, in JSON and in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.best_fit_spaces import Synthetic

from trainfast_runner.search.best.best_so_far import BestSoFar
from trainfast_runner.search.best.choose.answer import CHOSEN_REASON, answer_of
from trainfast_runner.search.best.choose.state import state_of_best_journal
from trainfast_runner.search.best.report import best_report
from trainfast_runner.search.journal.best import BestEnded, BestLine, read_best_journal
from trainfast_runner.search.journal.lines import JournalWriter
from trainfast_tui.text.search.best_answer import answer_lines

from .synthetic import asking, confirmed, process_ready, trial


def searched(
    directory: Path, space: Synthetic, state: str, *rates: tuple[float, float], spent_s: float = 0.0
) -> tuple[dict[str, Any], str]:
    """JSON and words of a search of two settings, another and the baseline, confirmed at these samples/s."""
    base = space.space.baseline_number
    other = next(number for number in sorted(space.truth) if number != base)
    lines: list[BestLine] = [asking(space), space.space, *process_ready(space, base), trial(base, warm=False)]
    lines += [trial(other, ms=99.5), *confirmed(other, rates[0]), *confirmed(base, rates[1])]
    answer = answer_of(state_of_best_journal(lines, spent_s))
    journal = JournalWriter(directory)
    for line in (*lines, BestEnded(state=state, answer=answer)):
        journal.write(line)
    journal.close()
    so_far = BestSoFar(tuple(read_best_journal(directory)))
    return best_report(directory), "\n".join(answer_lines(so_far, directory.name))


def test_noise_decides_instead_of_a_winner(tmp_path: Path, space: Synthetic) -> None:
    noisy, text = searched(tmp_path, space, "answered", (80.0, 74.0), (77.0, 84.0))
    assert noisy["winner"] is None
    assert noisy["within_percent"] > 5
    assert noisy["best"] is not None, "a setting to go on with"
    assert f"within {noisy['within_percent']:.1f} %, the noise of this machine" in text
    assert "no winner" in text
    assert "\nbest " not in text
    assert "none beyond the noise: the baseline is kept" in text
    assert [one["reason"] for one in noisy["verdicts"] if one["knobs"] == noisy["best"]["knobs"]] == [CHOSEN_REASON]


def test_a_clear_answer_names_its_winner(tmp_path: Path, space: Synthetic) -> None:
    quiet, text = searched(tmp_path, space, "answered", (90.0, 90.1), (80.0, 80.1))
    assert quiet["winner"] == quiet["best"]["knobs"]
    assert quiet["within_percent"] is None
    assert text.startswith("best  ")
    assert "no winner" not in text


def test_a_search_cut_short_has_no_winner_yet(tmp_path: Path, space: Synthetic) -> None:
    cut, text = searched(tmp_path, space, "cancelled", (90.0, 90.1), (80.0, 80.1))
    assert cut["winner"] is None
    assert "best so far  " in text


def test_a_search_that_its_budget_ended_says_how_far_it_came(tmp_path: Path, space: Synthetic) -> None:
    cut, text = searched(tmp_path, space, "answered", (60.0, 60.1), (80.0, 80.1), spent_s=2e9)
    assert cut["tried_in_budget"] == 2
    assert cut["best"]["knobs"] == cut["baseline"]["knobs"]
    assert f"2 of {cut['candidates']} tried when the budget ended" in text
    assert "best so far  " in text
    assert "none so far: the baseline is the best" in text
    ran = [one["knobs"] for one in cut["trials"]]
    assert cut["effects"]
    assert all(any(knobs[one["knob"]] == one["value"] for knobs in ran) for one in cut["effects"]), "each was run"

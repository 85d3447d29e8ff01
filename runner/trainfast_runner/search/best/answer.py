"""Make a best-fit search's answer from its state: the winner, its gain, every knob's effect, and every verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import msgspec

from trainfast_runner.records.json_lines import newest
from trainfast_runner.results.distributions import NORMAL_95, pareto_front
from trainfast_runner.search.best.candidates import log_objective
from trainfast_runner.search.best.cold_runs import ColdCosts, ColdRanking, Difference
from trainfast_runner.search.best.decide import (
    LIKELY_CHANCE,
    Prospects,
    count_drifted_if_budget_spent,
    unconfirmed_reason,
)
from trainfast_runner.search.best.state import WORTHWHILE_LOG_GAIN, WORTHWHILE_PERCENT, BestState, state_of_best_journal
from trainfast_runner.search.best_journal import (
    UNDER_LIMIT,
    Attempt,
    BestAnswer,
    BestEnded,
    BestLine,
    CandidateVerdict,
    ColdRun,
    Effect,
    Interval,
    Space,
    Trial,
    VerdictWord,
)
from trainfast_runner.search.journal import worked_seconds
from trainfast_runner.search.measured_speeds import VOID_LOG_DRIFT, log_rate
from trainfast_runner.search.searches import value_text
from trainfast_runner.settings.knob_values import KnobValues
from trainfast_runner.units import chance_text, counted

NOTED_LOG_GAP = 0.03
"""Chosen, not measured: a difference between trials and cold runs that the answer mentions, in ln of the objective."""
MAX_FASTER_NOTED = 3
"""Candidates with a measurement better than the answer that the answer explains, the best first."""
CHOSEN_REASON = "chosen: no setting is faster beyond the noise of this machine"
"""The verdict on an answer that is not clearly the fastest."""


def answer_of(state: BestState) -> BestAnswer | None:
    """Return the answer, or the best so far of a running search; None before anything was measured."""
    state = count_drifted_if_budget_spent(state)
    if state.leader_number is None:
        return None
    ranking = ColdRanking(state)
    best_number, baseline_number = ranking.answer_number, ranking.baseline_number
    best_rate, baseline_rate = _rate(ranking, best_number), _rate(ranking, baseline_number)
    if best_rate is None:
        return None
    gain = None
    if best_number == baseline_number:
        gain = Difference(0.0, 0.0)
    elif baseline_rate is not None and baseline_number not in state.ruled_out:
        gain = ranking.difference(best_number, baseline_number)
    within_percent = _within_percent(ranking, gain)
    prospects = Prospects(state, ColdCosts(state))
    tried_numbers = {run.candidate_number for run in state.journal.attempts if run.outcome != "void"}
    verdicts = [_verdict(ranking, prospects, number) for number in range(len(state.candidates))]
    if within_percent is not None:
        verdicts[best_number] = msgspec.structs.replace(verdicts[best_number], reason=CHOSEN_REASON)
    return BestAnswer(
        best_number=best_number,
        best_rate=best_rate,
        baseline_rate=baseline_rate,
        best_value=_value(ranking, best_number),
        baseline_value=_value(ranking, baseline_number),
        gain_percent=None if gain is None else _percent(gain),
        best_run_ids=_run_ids(state, best_number),
        baseline_run_ids=_run_ids(state, baseline_number),
        within_percent=within_percent,
        tried_in_budget=len(tried_numbers) if prospects.is_budget_spent else None,
        tied_numbers=ranking.ties,
        effects=list(_effects(ranking)),
        verdicts=verdicts,
        pareto_numbers=_pareto_numbers(ranking),
        changes_training=state.changes_training(best_number),
        notes=list(_notes(ranking)),
    )


def answer_so_far(lines: Sequence[BestLine]) -> BestAnswer | None:
    """Return the answer so far of a search that is stopped; None before anything was measured.

    If every process drifted, their trials count all the same.
    """
    spent_s = worked_seconds(lines)
    answer = answer_of(state_of_best_journal(lines, spent_s))
    if answer is not None:
        return answer
    answer = answer_of(state_of_best_journal(lines, spent_s, voids_drifted=False))
    note = "continuing the search measures the settings of drifted processes again"
    return None if answer is None else msgspec.structs.replace(answer, notes=[*answer.notes, note])


def _verdict(ranking: ColdRanking, prospects: Prospects, number: int) -> CandidateVerdict:
    state = ranking.state
    if number in state.ruled_out:
        return state.ruled_out[number]
    rate = _rate(ranking, number)
    verdict, reason = (
        _verdict_unmeasured(state, prospects, number) if rate is None else _verdict_measured(ranking, number)
    )
    return CandidateVerdict(candidate_number=number, verdict=verdict, reason=reason, rate=rate)


def _verdict_measured(ranking: ColdRanking, number: int) -> tuple[VerdictWord, str]:
    reason = _against_best(ranking, number)
    if number in ranking.unchecked:
        reason += "; no time was left to run it under memory_limit"
    return "measured", reason


def _verdict_unmeasured(state: BestState, prospects: Prospects, number: int) -> tuple[VerdictWord, str]:
    if number in state.excluded_by_instructions:
        return "not_tried", state.excluded_by_instructions[number]
    least_s = state.candidates[number].least_s_per_sample
    if least_s and state.leader_number is not None and state.is_bound(number, state.leader_number):
        return "bound", f"at most {1 / least_s:.4g} samples/s by its FLOPs and the device's peak"
    chance = prospects.chances.get(number, 0.0)
    text = f"{chance_text(chance, decimals=1)} chance of being {WORTHWHILE_PERCENT} % better than the best"
    return ("beaten", text) if chance <= LIKELY_CHANCE else ("not_tried", f"no time left: {text}")


def _against_best(ranking: ColdRanking, number: int) -> str:
    """Return a measured candidate's difference from the best, in words."""
    if number == ranking.answer_number:
        return "the best"
    difference = ranking.difference(number, ranking.answer_number)
    text = f"{100 * math.expm1(difference.mean):+.1f} %"
    if not difference.is_clear:
        return f"{text}, within the noise of the best"
    return f"{text} by its trial, not confirmed" if difference.mean > 0 else f"{text} against the best"


def _percent(difference: Difference) -> Interval:
    low, median, high = (100 * math.expm1(difference.mean + shift * difference.half_width) for shift in (-1, 0, 1))
    return Interval(median=median, low=low, high=high)


def _log_rate(ranking: ColdRanking, number: int) -> tuple[float, float] | None:
    """Return the ln samples/s of a candidate and half of its interval: by cold runs, else by trials; else None."""
    state = ranking.state
    rates = ranking.speed_runs.log_rates.get(number)
    if rates:
        return statistics.fmean(rates), ranking.speed_runs.rate_noise.half_width(len(rates))
    trials = state.counted_trials.get(number)
    if not trials:
        return None
    if state.question.objective == "samples_per_joule":
        logs = [value for trial in trials if (value := log_rate(trial)) is not None]
        variance = statistics.fmean(state.measured.variance(trial) for trial in trials) / len(trials)
        return statistics.fmean(logs), NORMAL_95 * math.sqrt(variance + state.posterior.scales.process**2)
    return state.posterior.mean[number], NORMAL_95 * math.sqrt(max(state.posterior.variance[number], 0.0))


def _rate(ranking: ColdRanking, number: int) -> Interval | None:
    """Return the samples/s of a candidate; None if it was not measured."""
    known_rate = _log_rate(ranking, number)
    return None if known_rate is None else _interval(*known_rate)


def _interval(middle: float, half_width: float) -> Interval:
    return Interval(median=math.exp(middle), low=math.exp(middle - half_width), high=math.exp(middle + half_width))


def _value(ranking: ColdRanking, number: int) -> Interval | None:
    """Return the objective of a candidate in its unit (seconds for `time`); None if it was not measured."""
    state = ranking.state
    values = ranking.speed_runs.log_objectives.get(number)
    if values:
        middle = statistics.fmean(values)
        half_width = ranking.speed_runs.noise.half_width(len(values))
    elif number in state.counted_trials:
        middle, slope = state.log_objective(number)
        half_width = NORMAL_95 * slope * math.sqrt(max(state.posterior.variance[number], 0.0))
    else:
        return None
    return _interval(-middle if state.question.objective == "time" else middle, half_width)


def _run_ids(state: BestState, number: int) -> list[str]:
    """Return the ids of the cold runs that measured a candidate."""
    return [
        run.run_id
        for run in state.journal.cold_runs
        if run.candidate_number == number and run.outcome == "measured" and run.role != UNDER_LIMIT
    ]


def _within_percent(ranking: ColdRanking, gain: Difference | None) -> float | None:
    """Return the smallest gain, in percent, that A B B A runs can show here.

    None if that gain is below WORTHWHILE_PERCENT or the winner is clear.
    """
    half_width = ranking.speed_runs.noise.half_width(1)
    return 100 * math.expm1(half_width) if half_width >= WORTHWHILE_LOG_GAIN and _is_open(ranking, gain) else None


def _is_open(ranking: ColdRanking, gain: Difference | None) -> bool:
    """True if the gain may be zero, a rival may be the best, or a measured candidate may beat the baseline."""
    state, best_number = ranking.state, ranking.answer_number
    if ranking.ties:
        return True
    if best_number != ranking.baseline_number:
        return gain is not None and not gain.is_clear
    other_numbers = [
        number for number in state.counted_trials if number != best_number and number not in state.ruled_out
    ]
    return not all(ranking.difference(number, best_number).is_clear for number in other_numbers)


def _effects(ranking: ColdRanking) -> Iterator[Effect]:
    """Yield the gain over the baseline's value of each value that was run or that earlier searches measured.

    The other knobs are as in the answer.
    """
    state = ranking.state
    levels = state.posterior.levels
    earlier = {(effect.knob, repr(effect.value)) for effect in state.question.earlier}
    for index, name in enumerate(levels.names):
        base_level = levels.points[ranking.baseline_number][index]
        levels_run = {levels.points[number][index] for number in state.counted_trials}
        for level, value in enumerate(levels.values[name]):
            pair = None if level == base_level else _pair_with_levels(ranking, name, level, base_level)
            if pair is None:
                continue
            measured_difference = ranking.speed_runs.difference(*pair)
            was_run = {level, base_level} <= levels_run
            is_earlier = (name, repr(value)) in earlier
            if measured_difference is None and not was_run and not is_earlier:
                continue
            yield Effect(
                knob=name,
                value=value,
                before=levels.values[name][base_level],
                gain_percent=_percent(measured_difference or ranking.by_trials(*pair)),
                measured=measured_difference is not None,
                earlier=is_earlier and level not in levels_run,
            )


def _pair_with_levels(ranking: ColdRanking, name: str, level: int, base_level: int) -> tuple[int, int] | None:
    """Return the best candidate with the two levels of a knob, else the baseline with them; None if neither exists."""
    levels = ranking.state.posterior.levels
    for number in (ranking.answer_number, ranking.baseline_number):
        with_value, with_base = (levels.with_level(number, name, other) for other in (level, base_level))
        if with_value is not None and with_base is not None:
            return with_value, with_base
    return None


def _pareto_numbers(ranking: ColdRanking) -> list[int]:
    """Return the measured candidates that no other beats in both rate and memory, the fastest first."""
    state = ranking.state
    points: dict[int, tuple[float, float]] = {}
    for number in range(len(state.candidates)):
        rate = _log_rate(ranking, number)
        needed_bytes = ranking.memory_bytes(number)
        if rate is not None and needed_bytes is not None and number not in state.ruled_out:
            points[number] = needed_bytes, rate[0]
    numbers = list(points)
    return [numbers[index] for index in pareto_front([*points.values()])]


def _notes(ranking: ColdRanking) -> Iterator[str]:
    """Yield sentences on the limits of the claim."""
    state = ranking.state
    best_number = ranking.answer_number
    baseline_number = ranking.baseline_number
    if (unconfirmed := unconfirmed_reason(ranking)) is not None:
        yield unconfirmed
    if baseline_number in state.ruled_out:
        problem = "has no figure" if _rate(ranking, baseline_number) is None else "does not fit"
        yield f"the baseline {problem}: {state.ruled_out[baseline_number].reason}"
    if state.question.objective != "samples_per_joule":
        names = {best_number: "best"}
        names.setdefault(baseline_number, "baseline")
        for number, name in names.items():
            values = ranking.speed_runs.log_objectives.get(number)
            if values and number in state.counted_trials:
                gap = statistics.fmean(values) - state.log_objective(number).value
                if abs(gap) > NOTED_LOG_GAP:
                    yield f"the {name} is {100 * math.expm1(gap):+.1f} % in fresh processes against its trial"
    yield from _faster_attempts(ranking)
    void_percent = f"{100 * VOID_LOG_DRIFT:.0f} %"
    if state.measured.drift_variance_by_run:
        drifted = counted(len(state.measured.drift_variance_by_run), "process", "processes")
        yield f"{drifted} drifted by more than {void_percent}: their settings' intervals include the drift"
    if state.measured.void_run_ids:
        drifted = counted(len(state.measured.void_run_ids), "process", "processes")
        yield f"{drifted} drifted by more than {void_percent}; their settings were measured again"
    if state.question.earlier:
        yield "effects of earlier searches, with widened spread, chose the order of the trials"


def _faster_attempts(ranking: ColdRanking) -> Iterator[str]:
    """Yield, for each candidate with a measurement clearly better than the answer, why it is not the answer."""
    state, number = ranking.state, ranking.answer_number
    runs = ranking.speed_runs.log_objectives.get(number)
    answer_value = statistics.fmean(runs) if runs else state.log_objective(number).value
    better: dict[int, tuple[float, Trial | ColdRun]] = {}
    for attempt in state.journal.attempts:
        if attempt.candidate_number == number and isinstance(attempt, ColdRun):
            continue  # it did decide: the answer's interval says how far its runs lie apart
        value = _attempt_log_objective(state, attempt)
        gain = 0.0 if value is None else value - answer_value
        found = better.get(attempt.candidate_number)
        if gain > (WORTHWHILE_LOG_GAIN if found is None else found[0]):
            better[attempt.candidate_number] = gain, attempt
    for gain, faster in sorted(better.values(), key=lambda found: -found[0])[:MAX_FASTER_NOTED]:
        noun = "trial" if isinstance(faster, Trial) else "run"
        knobs = " ".join(f"{name}={value_text(name, value)}" for name, value in _overrides(state, faster).items())
        yield (
            f"a {noun} of {knobs or 'the baseline'} was {100 * math.expm1(gain):+.1f} % better than the answer"
            f" and did not decide: {_undecided_reason(ranking, faster)}"
        )


def _attempt_log_objective(state: BestState, attempt: Trial | ColdRun) -> float | None:
    """Return the ln of the objective of one trial or run by itself; None without a figure."""
    question, number = state.question, attempt.candidate_number
    per_joule = question.objective == "samples_per_joule"
    if isinstance(attempt, ColdRun):
        rate = attempt.samples_per_joule if per_joule else attempt.samples_per_s
        value = math.log(rate) if rate and attempt.role != UNDER_LIMIT else None
    else:
        timed = bool(attempt.step_ms) and min(attempt.step_ms) > 0
        value = log_rate(attempt, per_joule=per_joule) if timed else None
    start_s = attempt.start_s if isinstance(attempt, ColdRun) else state.start_s(number)
    return None if value is None else log_objective(question, state.candidates[number], value, start_s).value


def _overrides(state: BestState, attempt: Attempt) -> KnobValues:
    baseline = state.candidates[state.space.baseline_number].knobs
    knobs = state.candidates[attempt.candidate_number].knobs
    return {name: value for name, value in knobs.items() if value != baseline.get(name)}


def _undecided_reason(ranking: ColdRanking, attempt: Attempt) -> str:
    """Return the reason that a measurement better than the answer is not the answer."""
    state, number = ranking.state, attempt.candidate_number
    if attempt.outcome == "void":
        return f"it is void ({attempt.reason})"
    if number in state.ruled_out:
        return state.ruled_out[number].reason
    if attempt.run_id in state.measured.void_run_ids:
        return "its process drifted, and all its trials are void"
    disturbed = f"{attempt.reason}; " if attempt.counts_disturbed else ""
    if number in ranking.speed_runs.log_objectives and isinstance(attempt, Trial):
        return f"{disturbed}its runs in fresh processes, which decide, were slower"
    if number == ranking.answer_number:
        return f"{disturbed}the answer's figure is that of all its measurements"
    return f"{disturbed}all measurements together make the setting {_against_best(ranking, number)}"


def verdicts_without_answer(lines: Sequence[BestLine]) -> list[CandidateVerdict]:
    """Return one verdict for every candidate, in their order, of a search that ended without an answer.

    Empty before the end; a cancelled search has not ended, because the same command continues it.
    """
    end = newest(lines, BestEnded)
    if end is None or end.state == "cancelled" or not any(isinstance(line, Space) for line in lines):
        return []
    state = state_of_best_journal(lines, end.seconds)
    reasons = {
        number: state.excluded_by_instructions.get(number, end.reason) for number in range(len(state.candidates))
    }
    return [
        state.ruled_out.get(number, CandidateVerdict(candidate_number=number, verdict="not_tried", reason=reason))
        for number, reason in reasons.items()
    ]

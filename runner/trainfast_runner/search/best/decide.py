"""Decide the next step of a best-fit search from the state of its journal, with the reason in words. Touches nothing.

The baseline is tried first. Its phases and the work of each candidate tell what to expect of every lever (`levers`);
the next trial is that of the greatest expected improvement a second, until no candidate is likely to be 2 % better, or
the budget ends. Cold runs choose among the leaders and confirm the winner. Their noise is pooled over repeated runs of
the same candidate, with the noise of the trials as four runs' worth of evidence; intervals are Student's.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainfast_runner.errors import lowest
from trainfast_runner.results.comparison import loss_difference
from trainfast_runner.results.distributions import NORMAL_95, student_95
from trainfast_runner.search import effects
from trainfast_runner.search.best.levers import MIN_BOUND, PHASES, phase_shares, prior_of
from trainfast_runner.search.best.question import TOO_LARGE, changes_training, lever_point, oom_verdict, unneeded_levers
from trainfast_runner.search.best_journal import (
    CONFIRM,
    RACE,
    TIMED_OUTCOMES,
    TURN_BACK,
    UNDER_LIMIT,
    Attempt,
    AttemptOutcome,
    BestJournal,
    BestLine,
    BestStep,
    CandidateVerdict,
    ColdRole,
    ColdRun,
    ProcessReady,
    Space,
    Trial,
)
from trainfast_runner.search.journal import EndState
from trainfast_runner.search.searches import BATCH_KNOBS, KnobsKey, knobs_key, value_text
from trainfast_runner.units import chance_text, duration

WORTHWHILE_PERCENT = 2
"""The least gain that is worth further trials."""
WORTHWHILE_LOG_GAIN = math.log1p(WORTHWHILE_PERCENT / 100)
"""The same gain, in ln rate."""
HOPELESS_SHARE = 0.7
"""Chosen, not measured: a trial ends early when its best step is below this share of the leader's pace."""
LIKELY_CHANCE = 0.03
"""Trials continue while some candidate has this chance of being 2 % better than the leader."""
OPENING_TRIALS = 4
"""Number of first trials whose reason names the baseline's bottleneck."""
PROBABLE_CHANCE = 0.5
"""Chosen, not measured: with more than this chance a trial may take the time kept for the runs that confirm."""
MAX_VOID_ATTEMPTS = 3
"""A candidate with this many void trials or runs is given up."""
MAX_VOID_COLD_RUNS = 2 * MAX_VOID_ATTEMPTS
"""After this many void cold runs of any candidates no further one is started."""
MAX_BEFORE_TURN_BACK = 12
"""From this number of counted cold runs on no knob is turned back."""
PRIOR_RUNS = 4
"""The noise of the trials counts as this many repeated runs."""
COLD_RULE = effects.StepRule(min_steps=8, max_steps=60, standard_error=0.007)
"""Chosen, not measured: the timed steps of a cold run, and the wanted standard error of their median."""
CONFIRMING_RUNS = 4
"""Cold runs that confirm an answer: the winner and the baseline, A B B A."""
CONFIRMING_SHARE = 0.5
"""Share of the budget that is kept for the runs that confirm; the trials always have the rest."""
NEAR_LOG_GAIN = 0.03
"""Chosen, not measured: candidates within this of the leader, in ln of the objective, take part in the race."""
MAX_FINALISTS = 4
"""Chosen, not measured: the most candidates in the race. Each candidate takes cold runs."""
MIN_FASTEST_CHANCE = 0.2
"""Chosen, not measured: a candidate with a smaller chance than this to be the fastest takes no part."""
EQUAL_LOG_GAIN = 0.005
"""Candidates that differ by less than this, and by less than the noise, are equal: the simpler one wins.

With 0.01 the simpler one was up to 3.2 % off the best."""
EQUAL_MEMORY_SHARE = 0.05
"""Chosen, not measured: memory that exceeds the least by at most this share is the same."""
MIN_GAIN_VARIANCE = 1e-12
"""Variance of a gain at least: rounding can leave a difference of two variances at zero or below."""
LOSS_SHARE = 0.05
"""A loss leaves the baseline's if the difference is over this share of the baseline's last or first loss.

fp16 and bf16 stay within a few percent.
"""
UNUSABLE_OUTCOMES: tuple[AttemptOutcome, ...] = ("failed", "incompatible")
"""Outcomes of a candidate that is never the answer."""
SPEED_ROLES: tuple[ColdRole, ...] = (RACE, CONFIRM, TURN_BACK)
"""Roles of the cold runs that measure a speed: the real memory_limit slows every step of a CPU run."""
COLD_ROLES: tuple[ColdRole, ...] = (*SPEED_ROLES, UNDER_LIMIT)
"""Roles of all cold runs."""
BoolArray = NDArray[np.bool_]
_erfc = np.vectorize(math.erfc, otypes=[float])


@dataclass(frozen=True)
class BestDecision:
    """The next step, for the journal, and the steps and process that it needs."""

    step: BestStep
    needs_new_process: bool = False
    """True for a trial that the warm process cannot take."""
    step_rule: effects.StepRule = field(default_factory=effects.StepRule)
    """The steps of a trial or a cold run."""
    end_state: EndState | None = None
    """The state of a search whose step is its end; None for another step."""


def decide(state: BestState) -> BestDecision:
    """Return the next step, with the leader's figures, and the chance and the price of the most promising trial."""
    cold, decision = state.cold, None
    if state.leader_number is None or not cold.has_begun:
        decision = _first_trial(state) or _most_promising_trial(state)
    if decision is None and (step := next_cold_run(cold)) is not None:
        decision = BestDecision(step, step_rule=replace(COLD_RULE, min_steps=cold.steps, max_steps=cold.steps))
    if decision is None:
        decision = _end("answered", _trials_end_reason(state) or "the runs that confirm had begun")
    decision = _repeat_before_leaving(state, decision)
    number, next_number = state.leader_number, state.next_number
    if number is None:
        return decision
    rate, half_width = float(state.posterior.mean[number]), NORMAL_95 * math.sqrt(state.posterior.variance[number])
    step = msgspec.structs.replace(
        decision.step,
        leader_number=number,
        rate=math.exp(rate),
        low=math.exp(rate - half_width),
        high=math.exp(rate + half_width),
        next_number=next_number,
        chance=None if next_number is None else float(state.chances[next_number]),
        price_s=None if next_number is None else float(state.costs_s[next_number]),
    )
    return replace(decision, step=step)


def _end(end_state: EndState, reason: str) -> BestDecision:
    return BestDecision(BestStep(action="end", why=reason), end_state=end_state)


def _trial_of(state: BestState, number: int, reason: str) -> BestDecision:
    """Return the trial of a candidate, which ends early far below the leader's samples/s if these are the objective."""
    give_up_ms = None
    if state.leader_number is not None and state.question.objective == "samples_per_s":
        least_rate = HOPELESS_SHARE * math.exp(state.posterior.mean[state.leader_number])
        give_up_ms = 1000 * state.candidates[number].samples_per_step / least_rate
    step = BestStep(action="trial", why=reason, candidate_number=number)
    return BestDecision(step, not state.is_warm[number], effects.StepRule(give_up_ms=give_up_ms))


def _first_trial(state: BestState) -> BestDecision | None:
    """Return the trial of the baseline, or of the smallest candidate without a baseline figure; None after these."""
    baseline_number = state.space.baseline_number
    ruling = state.ruled_out.get(baseline_number)
    if baseline_number not in state.counted_trials:
        if ruling is None:
            return _trial_of(state, baseline_number, "the baseline, to compare with")
        was_tried = any(trial.candidate_number == baseline_number for trial in state.journal.trials)
        if was_tried and ruling.verdict != TOO_LARGE:
            return _end("failed", f"the baseline failed: {ruling.reason}")
    if state.leader_number is not None:
        return None
    if not state.remaining:
        if {verdict.verdict for verdict in state.ruled_out.values()} <= {TOO_LARGE, "incompatible"}:
            return _end("nothing_fits", "no setting fits")
        return _end("failed", "no setting could be measured")
    if state.spent_s > state.question.budget_s:
        return _end("failed", f"no setting could be measured in the budget of {duration(state.question.budget_s)}")

    def size(number: int) -> tuple[float, int]:
        predicted_bytes = state.candidates[number].predicted_bytes
        return math.inf if predicted_bytes is None else predicted_bytes, state.candidates[number].batch_size

    cause = "" if ruling is None else f" ({ruling.reason})"
    reason = f"the baseline is left out{cause}: the smallest setting first"
    return _trial_of(state, min(state.remaining, key=size), reason)


def _most_promising_trial(state: BestState) -> BestDecision | None:
    """Return the trial of the greatest expected improvement a second; None when the trials end."""
    if _trials_end_reason(state):
        return None
    number = state.most_promising(state.is_likely & state.is_affordable)
    is_opening = len(state.journal.trials) < OPENING_TRIALS
    return _trial_of(state, number, "; ".join([state.outlook(number), *state.journal.diagnosis[: int(is_opening)]]))


def _trials_end_reason(state: BestState) -> str | None:
    """Return the reason that the trials end, with the next one's name, price and chance; None if they do not."""
    number = state.next_number
    if number is None:
        return f"no setting left has a chance above {100 * LIKELY_CHANCE:.0f} % of being {WORTHWHILE_PERCENT} % better"
    if not state.is_budget_spent:
        return None
    knobs, others = (state.candidates[one].knobs for one in (number, state.leader_number or 0))
    overridden = [f"{name}={value_text(name, value)}" for name, value in knobs.items() if value != others[name]]
    budget = duration(state.question.budget_s)
    return f"the budget of {budget} pays for no further trial; next: {', '.join(overridden)}, {state.outlook(number)}"


def _repeat_before_leaving(state: BestState, decision: BestDecision) -> BestDecision:
    """Return the decision, or, before the search leaves the warm process, a repeat of its first trial: shows drift."""
    action, reference = decision.step.action, effects.reference_of(state.warm_trials)
    stays = action == "end" or (action == "trial" and not decision.needs_new_process)
    timed = [trial for trial in state.warm_trials if trial.outcome in TIMED_OUTCOMES]
    repeats = [trial for trial in state.warm_trials if trial.repeats]
    has_one_candidate = len({trial.candidate_number for trial in timed}) < 2
    is_repeated = any(trial in timed for trial in repeats) or len(repeats) >= MAX_VOID_ATTEMPTS
    if stays or reference is None or has_one_candidate or is_repeated:
        return decision
    reason = "the first setting measured in this process again: a change would be drift"
    step = BestStep(action="trial", why=reason, candidate_number=reference.candidate_number, repeats=True)
    min_steps = max(effects.MIN_TIMED_STEPS, len(reference.step_ms))
    return BestDecision(step, step_rule=effects.StepRule(min_steps=min_steps))


def next_cold_run(cold: ColdRuns) -> BestStep | None:
    """Return the next cold run; None when the answer is confirmed, or after too many void runs."""
    if sum(run.outcome == "void" for run in cold.state.journal.cold_runs) >= MAX_VOID_COLD_RUNS:
        return None
    done = Counter((run.candidate_number, run.role) for run in cold.counted)
    for step in _cold_runs(cold, done.copy()):
        key = step.candidate_number or 0, step.action
        if not done[key]:
            return step
        done[key] -= 1
    return None


def _cold_runs(cold: ColdRuns, done: Counter[tuple[int, str]]) -> Iterator[BestStep]:
    """Yield every cold run that the state calls for in its order, those that were `done` among them."""
    state, baseline_number, finalists = cold.state, cold.baseline_number, cold.finalists

    def run(number: int, role: ColdRole, reason: str, knob: str | None = None) -> BestStep:
        return BestStep(action=role, why=reason, candidate_number=number, knob=knob)

    def limited(number: int) -> list[BestStep]:
        """Return a candidate's run under memory_limit, which no trial of a preset is under; empty if it needs none."""
        is_needed = not state.question.is_script and state.question.limits_bytes and not done[number, UNDER_LIMIT]
        return [run(number, UNDER_LIMIT, "the best setting, under memory_limit")] if is_needed else []

    # The leader runs under the limit before the race: without it trials may go on.
    yield from limited(finalists[0])
    raced = f"one of {len(finalists)} settings within {100 * NEAR_LOG_GAIN:.0f} % of the leader"
    is_confirming = any(done[number, CONFIRM] for number in {number for number, _ in done})
    for turn, order in ((1, finalists), (2, cold.contenders[::-1])):
        # A, B, then B, A; a turn that the budget does not pay for is not begun, nor one after the race.
        is_begun = any(done[number, RACE] >= turn for number in order)
        if len(order) < 2 or not (is_begun or (not is_confirming and cold.are_affordable(order))):
            break
        yield from (run(number, RACE, raced) for number in order)
    winner_number = cold.winner_number
    yield from limited(winner_number)
    order = [winner_number, baseline_number, baseline_number, winner_number]
    if winner_number == baseline_number or baseline_number in state.ruled_out:
        order = [winner_number, winner_number]
    if any(done[number, RACE] < 2 for number in order):
        for number in order:
            role = "baseline" if number == baseline_number else "winner"
            yield run(number, CONFIRM, f"the {role} in a fresh process")
    answer_number = cold.answer_number
    yield from limited(answer_number)
    overridden = cold.overridden_levels(answer_number)
    if len(overridden) < 2 or len(cold.counted) >= MAX_BEFORE_TURN_BACK:
        return
    # Each knob turned back alone, greatest gain first, unless the trials tell its gain.
    turned_back = {state.levels.with_level(answer_number, knob, base): knob for knob, base in overridden.items()}
    remaining = [number for number in state.remaining if number in turned_back]
    for number in sorted(remaining, key=state.log_objectives[0].__getitem__):
        is_known = cold.by_trials(number, answer_number).half_width < NEAR_LOG_GAIN
        is_done = any(done[number, role] for role in COLD_ROLES)
        if not (is_known or is_done) and cold.are_affordable([number]):
            knob = turned_back[number]
            reason = f"the winner with {knob} turned back to the baseline's value, to measure the gain of {knob}"
            yield run(number, TURN_BACK, reason, knob)


class LogGains(NamedTuple):
    """The predicted ln of each candidate's objective over another candidate's: normal distributions."""

    mean: effects.Array
    deviation: effects.Array

    def chance_above(self, log_gain: float) -> effects.Array:
        """Return the probability that each gain exceeds `log_gain`."""
        chances: effects.Array = 0.5 * _erfc((log_gain - self.mean) / self.deviation / math.sqrt(2))
        return chances


class BestState:
    """The state of a search after the lines of its journal, once its candidates are listed.

    Arrays and lists are by candidate number. `spent_s` are the seconds that conductors worked on the search;
    `warm_run_id` is the run of the warm process, None without one.
    """

    def __init__(self, lines: Sequence[BestLine], spent_s: float, warm_run_id: str | None = None) -> None:
        self.journal = BestJournal(tuple(lines))
        question, space = self.journal.question, self.journal.space
        assert question is not None, "a journal begins with its question"
        assert space is not None, "the candidates are listed before the first decision"
        self.question, self.space, self.candidates, self.spent_s = question, space, space.candidates, spent_s
        # Void trials are repeated while the trials have time.
        self.measured = effects.Measurements(lines, can_repeat=spent_s < (1 - CONFIRMING_SHARE) * question.budget_s)
        self.counted_trials: dict[int, list[Trial]] = defaultdict(list)
        """The trials that count, by candidate."""
        for trial in self.measured.trials:
            self.counted_trials[trial.candidate_number].append(trial)
        self.levels, keys, self.processes = _layout_of(space)
        """`processes` has the number of each candidate's process, an index into `keys`."""
        prior = prior_of(question, space, self.levels.names, self.counted_trials)
        per_joule = question.objective == "samples_per_joule"
        self.posterior = effects.Posterior(self.levels, prior, self.measured, per_joule=per_joule)
        starts = effects.ProcessStarts(lines)
        self.switch_s = starts.switch_s
        self.starts_s = np.array([starts.seconds(key) for key in keys])[self.processes]
        """The expected seconds until a process of each candidate takes its first timed step."""
        warm_run_id = None if warm_run_id in self.measured.void_processes else warm_run_id
        self.warm_trials = [trial for trial in self.journal.trials if trial.run_id == warm_run_id]
        ready = [line.process_knobs for line in self.journal.all_of(ProcessReady) if line.run_id == warm_run_id]
        is_warm = [bool(ready) and key == knobs_key(ready[0]) for key in keys]
        self.is_warm: BoolArray = np.array(is_warm)[self.processes]
        """True for each candidate that the warm process can try."""
        self._samples = np.array([candidate.samples_per_step for candidate in self.candidates], dtype=float)

    def _mask(self, numbers: Iterable[int]) -> BoolArray:
        """Return True for these candidates."""
        mask = np.zeros(len(self.candidates), dtype=bool)
        mask[[*numbers]] = True
        return mask

    @cached_property
    def cold(self) -> ColdRuns:
        """The cold runs."""
        return ColdRuns(self)

    @cached_property
    def ruled_out(self) -> dict[int, CandidateVerdict]:
        """The candidates that can no longer be the answer, by number, with their first verdicts."""
        verdicts: dict[int, CandidateVerdict] = {}
        for verdict in _rulings(self.space, self.journal, self.levels):
            verdicts.setdefault(verdict.candidate_number, verdict)
        return verdicts

    @cached_property
    def remaining(self) -> list[int]:
        """Numbers of the candidates that may still be the answer."""
        return [number for number in range(len(self.candidates)) if number not in self.ruled_out]

    @cached_property
    def leader_number(self) -> int | None:
        """The measured candidate of the highest objective; None before any was measured."""
        measured_numbers = [number for number in self.remaining if number in self.counted_trials]
        return max(measured_numbers, key=self.log_objectives[0].__getitem__, default=None)

    @cached_property
    def log_objectives(self) -> tuple[effects.Array, effects.Array]:
        """The ln of each candidate's objective by the effects model, and its derivative by the ln rate.

        For `time`, T = start + steps x samples / rate: d(-ln T) / d(ln rate) = (T - start) / T.
        """
        if self.question.objective != "time":
            return self.posterior.mean, np.ones_like(self.posterior.mean)
        work_s = (self.question.for_steps or 1) * self._samples / np.exp(self.posterior.mean)
        return -np.log(self.starts_s + work_s), work_s / (self.starts_s + work_s)

    def log_gains(self, other_number: int) -> LogGains:
        """Return the ln of each candidate's objective over another's by the effects model."""
        values, slopes = self.log_objectives
        variances, covariances = self.posterior.variance, self.posterior.covariances(other_number)
        slope = slopes[other_number]
        variance = slopes**2 * variances + slope**2 * variances[other_number] - 2 * slopes * slope * covariances
        return LogGains(values - values[other_number], np.sqrt(np.maximum(variance, MIN_GAIN_VARIANCE)))

    @cached_property
    def gains(self) -> LogGains:
        """The gain of each candidate over the leader."""
        assert self.leader_number is not None
        return self.log_gains(self.leader_number)

    @cached_property
    def chances(self) -> effects.Array:
        """The probability that each candidate is 2 % better than the leader; 0 for all without a leader."""
        if self.leader_number is None:
            return np.zeros(len(self.candidates))
        return self.gains.chance_above(WORTHWHILE_LOG_GAIN)

    @cached_property
    def bounds(self) -> dict[int, str]:
        """The candidates that cannot beat the leader, with the reason; empty for joules.

        It saves memory that is not needed, the FLOPs alone take longer than the leader's sample, or a knob differs
        whose part of the step, of the baseline's and of the leader's, is too small to matter.
        """
        if self.leader_number is None or self.question.objective == "samples_per_joule":
            return {}
        leader, leader_value = self.leader_number, float(self.log_objectives[0][self.leader_number])
        bounds = unneeded_levers(self.question, self.candidates, self.ruled_out)
        for number, candidate in enumerate(self.candidates):
            if candidate.least_s_per_sample:
                rate, start_s = 1 / candidate.least_s_per_sample, float(self.starts_s[number])
                if self.question.log_objective(candidate, rate, start_s) < leader_value:
                    bounds[number] = f"at most {rate:.4g} samples/s by its FLOPs and the device's peak"
        trials = [*self.counted_trials.get(self.space.baseline_number, ()), *self.counted_trials[leader]]
        shares = [phase_shares(self.space, trial) for trial in trials]
        # A time to the last step also has a start, on which a loader acts.
        names = self.levels.names if self.question.objective == "samples_per_s" else ()
        strides = np.cumprod([1, *(len(self.levels.values[name]) for name in self.levels.names)])[:-1]
        codes = self.levels.array @ strides
        possible = np.delete(codes, [*self.ruled_out])
        for index, name in enumerate(names):
            if (share := max(of_trial.get(name, 1.0) for of_trial in shares)) < MIN_BOUND:
                reason = f"{name} acts on {PHASES[name]} alone, {100 * share:.2g} % of the step"
                levels = self.levels.array[:, index]
                # A candidate that only this value lets fit, or allows, acts by more than the phase.
                siblings = codes + (levels[leader] - levels) * strides[index]
                acts_alone = (levels != levels[leader]) & np.isin(siblings, possible)
                bounds |= {int(number): reason for number in np.flatnonzero(acts_alone)}
        return bounds

    @cached_property
    def is_open(self) -> BoolArray:
        """Untried candidates that a trial could make the leader; the race, not a second trial, separates equals."""
        return self._mask(self.remaining) & ~self._mask(self.counted_trials) & ~self._mask(self.bounds)

    @cached_property
    def is_likely(self) -> BoolArray:
        """Open candidates that are likely enough to be 2 % better than the leader."""
        return self.is_open & (self.chances > LIKELY_CHANCE)

    def outlook(self, number: int) -> str:
        """Return the expected gain of a candidate over the leader, the price of its trial and its chance, in words."""
        gain, chance = 100 * math.expm1(self.gains.mean[number]), chance_text(self.chances[number])
        price = duration(float(self.costs_s[number]))
        return f"about {price}, {chance} chance of {WORTHWHILE_PERCENT} % or more, expected {gain:+.0f} %"

    @cached_property
    def is_affordable(self) -> BoolArray:
        """Open candidates whose trial is expected to end within the time of the trials.

        One that will probably be better may take the time that is kept for the runs that confirm.
        """
        budget_s = self.question.budget_s
        kept_s = max(budget_s - self.cold.reserve_s(), (1 - CONFIRMING_SHARE) * budget_s)
        left_s = np.where(self.chances > PROBABLE_CHANCE, budget_s, kept_s) - self.spent_s
        return self.is_open & (self.costs_s <= left_s)

    @property
    def is_budget_spent(self) -> bool:
        """True if some candidate is likely to be better and the budget pays for none of those."""
        return bool(self.is_likely.any() and not (self.is_likely & self.is_affordable).any())

    @cached_property
    def improvements_per_s(self) -> effects.Array:
        """The expected improvement of each candidate in ln of the objective, per second of its cost."""
        mean, deviation = self.gains
        density = np.exp(-0.5 * (mean / deviation) ** 2) / math.sqrt(2 * math.pi)
        improvements: effects.Array = (mean * self.gains.chance_above(0.0) + deviation * density) / self.costs_s
        return improvements

    @cached_property
    def step_s(self) -> effects.Array:
        """The expected seconds of each candidate's step; at the highest measured rate if the model is of joules."""
        log_rates: effects.Array | float = self.posterior.mean
        if self.question.objective == "samples_per_joule":
            log_rates = max((effects.log_rate(trial) or 0.0 for trial in self.measured.trials), default=0.0)
        seconds: effects.Array = self._samples / np.exp(log_rates)
        return seconds

    @cached_property
    def costs_s(self) -> effects.Array:
        """The expected seconds of each trial: its steps, and the start of a process if it needs a new one."""
        steps = effects.UNTIMED_TRIAL_STEPS + effects.StepRule().steps_at(self.measured.step_deviation)
        costs: effects.Array = steps * self.step_s + self.switch_s + np.where(self.is_warm, 0.0, self.starts_s)
        return costs

    def most_promising(self, among: BoolArray) -> int:
        """Return the candidate of the greatest expected improvement a second."""
        return int(np.where(among, self.improvements_per_s, -math.inf).argmax())

    @property
    def next_center(self) -> int | None:
        """The candidate around which a space of stages grows next: the leader, or what needs least where nothing fits.

        None while the space has the candidates around it, and without time for a trial.
        """
        space, number = self.space, self.leader_number
        if number is None and not self.remaining:
            excess_bytes = {number: ruling.excess_bytes for number, ruling in self.ruled_out.items()}
            too_large = {number: excess for number, excess in excess_bytes.items() if excess is not None}
            number = min(too_large, key=too_large.__getitem__, default=None)
        has_time = self.spent_s < (1 - CONFIRMING_SHARE) * self.question.budget_s
        if not space.around or number is None or not has_time or self.cold.has_begun:
            return None
        known = [lever_point(self.candidates[each].knobs) for each in space.around]
        return None if lever_point(self.candidates[number].knobs) in known else number

    @cached_property
    def next_number(self) -> int | None:
        """The most promising candidate that is worth a trial, within the budget or not; None if none is."""
        if self.leader_number is None or not self.is_likely.any():
            return None
        return self.most_promising(self.is_likely)


@lru_cache(maxsize=1)
def _layout_of(space: Space) -> tuple[effects.Levels, list[KnobsKey], NDArray[np.int_]]:
    """Return the levels, the processes, and the process of each candidate: made once, as they take half a decision."""
    keys = [knobs_key(candidate.process_knobs) for candidate in space.candidates]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return (
        effects.Levels([candidate.knobs for candidate in space.candidates]),
        [*numbers],
        np.array([numbers[key] for key in keys]),
    )


def _rulings(space: Space, journal: BestJournal, levels: effects.Levels) -> Iterator[CandidateVerdict]:
    """Yield the verdicts that rule a candidate out; a candidate may have several."""

    def ruling(number: int, verdict: str, reason: str, excess_bytes: int | None = None) -> CandidateVerdict:
        return CandidateVerdict(candidate_number=number, verdict=verdict, reason=reason, excess_bytes=excess_bytes)

    candidates, attempts = space.candidates, journal.attempts
    for number, candidate in enumerate(candidates):
        if candidate.excluded_as is not None:
            yield ruling(number, candidate.excluded_as, candidate.reason, candidate.excess_bytes)
    timed_numbers = {attempt.candidate_number for attempt in attempts if attempt.outcome in TIMED_OUTCOMES}
    void_counts: Counter[int] = Counter()
    for attempt in attempts:
        number, candidate = attempt.candidate_number, journal.candidate(attempt.candidate_number)
        void_counts[number] += attempt.outcome == "void"
        if attempt.outcome == "oom":
            reason = oom_verdict(attempt.reason, candidate)
            yield ruling(number, TOO_LARGE, reason, candidate.excess_bytes)
            # Trials are not under memory_limit: one that fitted is no evidence for a run under the limit.
            fitted = set() if isinstance(attempt, ColdRun) and attempt.role == UNDER_LIMIT else timed_numbers
            same = {name: value for name, value in candidate.knobs.items() if name not in BATCH_KNOBS}.items()
            for other_number, other in enumerate(candidates):
                is_larger = other.batch_size > candidate.batch_size and same <= other.knobs.items()
                if is_larger and other_number not in fitted:
                    yield ruling(other_number, TOO_LARGE, f"a smaller batch: {reason}", candidate.excess_bytes)
        elif attempt.outcome in UNUSABLE_OUTCOMES:
            yield ruling(number, attempt.outcome, attempt.reason)
        elif attempt.outcome == "void" and void_counts[number] >= MAX_VOID_ATTEMPTS and number not in timed_numbers:
            yield ruling(number, "not_tried", f"void in {void_counts[number]} trials; the last: {attempt.reason}")
    for number, reason in _other_losses(space, journal):
        yield ruling(number, "failed", reason)
    failed = {attempt.candidate_number: attempt for attempt in attempts if attempt.outcome in UNUSABLE_OUTCOMES}
    for number, outcome, reason in _failed_values(failed, timed_numbers, levels):
        yield ruling(number, outcome, reason)


def _other_losses(space: Space, journal: BestJournal) -> Iterator[tuple[int, str]]:
    """Yield the candidates that train the same as the baseline and reach another loss on the same samples."""
    baseline = space.candidates[space.baseline_number]
    fixed_knobs = {} if journal.question is None else journal.question.knobs
    for attempts in (journal.trials, journal.cold_runs):
        compared = [attempt for attempt in attempts if attempt.outcome in TIMED_OUTCOMES and attempt.losses]
        expected = next((line.losses for line in compared if line.candidate_number == space.baseline_number), [])
        for line in compared if expected else ():
            step = min(len(line.losses), len(expected)) - 1
            loss, expected_loss = line.losses[step], expected[step]
            if loss is None or expected_loss is None:
                continue
            candidate = space.candidates[line.candidate_number]
            if attempts is journal.trials:
                # A trial does not tell of dropout, and leaves out steps that compile: those levers wait for a cold run.
                knobs, plain = ({**fixed_knobs, **one.knobs} for one in (candidate, baseline))
                losses = zip(line.losses, expected, strict=False)
                difference = loss_difference(knobs, plain, losses, redraws=True)
                if difference is not None and difference.excess:
                    yield line.candidate_number, f"{difference.excess}, compared with the baseline's"
                    continue
            # After a large fall the tolerance is a share of the first loss, not of the small last one.
            is_other = abs(loss - expected_loss) > LOSS_SHARE * max(abs(expected_loss), abs(expected[0] or 0.0))
            if is_other and not changes_training(candidate, baseline):
                yield line.candidate_number, f"the loss was {loss:.4g} where the baseline's was {expected_loss:.4g}"


def _failed_values(
    failed: Mapping[int, Attempt], timed_numbers: Collection[int], levels: effects.Levels
) -> Iterator[tuple[int, str, str]]:
    """Yield the candidates with the knob values that two failed candidates share and no timed one has."""
    timed_pairs = {pair for number in timed_numbers for pair in enumerate(levels.points[number])}
    suspects = {number: set(enumerate(levels.points[number])) - timed_pairs for number in failed}
    shared = (suspects[one] & suspects[other] for one, other in itertools.combinations(failed, 2))
    for cause in dict.fromkeys(frozenset(pairs) for pairs in shared if pairs):
        first, *more = [failed[number] for number in failed if cause <= suspects[number]]
        names = [(levels.names[index], level) for index, level in sorted(cause)]
        text = " with ".join(f"{name}={value_text(name, levels.values[name][level])}" for name, level in names)
        reason = f"{text} failed in {1 + len(more)} settings: {first.reason}"
        for number, point in enumerate(levels.points):
            if cause <= set(enumerate(point)):
                yield number, first.outcome, reason


@dataclass(frozen=True)
class Difference:
    """The ln of one candidate's objective less another's, and half of its 95 % interval."""

    mean: float
    half_width: float

    @property
    def is_clear(self) -> bool:
        """True if the interval excludes zero."""
        return abs(self.mean) > self.half_width


class ColdRuns:
    """The cold runs of a state: their figures and costs, and the finalists, the winner and the ties that they leave."""

    def __init__(self, state: BestState) -> None:
        self.state, self.baseline_number = state, state.space.baseline_number
        self.counted = [run for run in state.journal.cold_runs if run.outcome != "void"]
        """The cold runs that are not void, in their order."""
        self.measured = [run for run in self.counted if run.role in SPEED_ROLES and run.outcome == "measured"]
        """The runs that measured a speed."""
        self.figures, self._race_figures = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
        """The ln of the objective in each run that measured a speed, by candidate number, and in those of the race."""
        for run in self.measured:
            rate = run.samples_per_joule if state.question.objective == "samples_per_joule" else run.samples_per_s
            if rate:
                figure = state.question.log_objective(state.candidates[run.candidate_number], rate, run.start_s)
                self.figures[run.candidate_number].append(figure)
                if run.role == RACE:
                    self._race_figures[run.candidate_number].append(figure)

    def half_width(self, figures: Mapping[int, Sequence[float]], runs: float = 1) -> float:
        """Return half of the 95 % interval of the mean of so many runs, by the noise pooled over repeated runs."""
        squares = PRIOR_RUNS * (self.state.posterior.scales.process**2 + COLD_RULE.standard_error**2)
        freedom = PRIOR_RUNS
        for values in figures.values():
            if len(values) > 1:
                squares += statistics.variance(values) * (len(values) - 1)
                freedom += len(values) - 1
        return student_95(freedom) * math.sqrt(squares / freedom / runs)

    def by_runs(
        self, number: int, other_number: int, figures: Mapping[int, Sequence[float]] | None = None
    ) -> Difference | None:
        """Return the difference of two candidates by all cold runs, or by these; None unless both have some."""
        figures = self.figures if figures is None else figures
        if number not in figures or other_number not in figures:
            return None
        values, others = figures[number], figures[other_number]
        runs = 1 / (1 / len(values) + 1 / len(others))
        return Difference(statistics.fmean(values) - statistics.fmean(others), self.half_width(figures, runs))

    def by_trials(self, number: int, other_number: int) -> Difference:
        """Return the difference of two candidates by the trials and the effects alone."""
        gains = self.state.log_gains(other_number)
        return Difference(float(gains.mean[number]), NORMAL_95 * float(gains.deviation[number]))

    def difference(self, number: int, other_number: int) -> Difference:
        """Return the difference of two candidates: by cold runs if both had some, else by the trials."""
        return self.by_runs(number, other_number) or self.by_trials(number, other_number)

    @property
    def has_begun(self) -> bool:
        """True once a cold run was chosen for its speed: from then on there are no more trials.

        A run under memory_limit does not count: such a run may rule out every measured candidate.
        """
        journal = self.state.journal
        actions = (step.action for step in journal.all_of(BestStep))
        return bool({*actions, *(run.role for run in journal.cold_runs)} & {*SPEED_ROLES})

    @cached_property
    def finalists(self) -> list[int]:
        """The leader, and the measured candidates near it that may be as fast, the fastest first."""
        state, leader_number = self.state, self.state.leader_number
        if leader_number is None:
            return []
        is_near = (state.gains.mean > -NEAR_LOG_GAIN) & (state.gains.chance_above(0.0) > MIN_FASTEST_CHANCE)
        is_near[leader_number] = True
        near = [number for number in state.remaining if number in state.counted_trials and is_near[number]]
        return sorted(near, key=lambda number: -state.gains.mean[number])[:MAX_FINALISTS]

    @cached_property
    def _behind_fastest(self) -> dict[int, Difference]:
        """The lead of the fastest in the race over each raced finalist; empty without a race."""
        raced = [number for number in self.finalists if number in self._race_figures]
        fastest = max(raced, key=lambda number: statistics.fmean(self._race_figures[number]), default=-1)
        leads = {number: self.by_runs(fastest, number, self._race_figures) for number in raced}
        return {number: lead for number, lead in leads.items() if lead is not None}

    @cached_property
    def contenders(self) -> list[int]:
        """The finalists that are not clearly slower than the fastest in the race."""
        behind = self._behind_fastest
        return [number for number in self.finalists if number not in behind or not behind[number].is_clear]

    @cached_property
    def winner_number(self) -> int:
        """The fastest of the race, or the leader; ties go to less memory, fewer overrides, then a cheaper start."""
        leads, journal = self._behind_fastest.items(), self.state.journal
        equals = [number for number, lead in leads if not lead.is_clear and lead.mean < EQUAL_LOG_GAIN]
        equals = equals or self.finalists[:1]
        least_bytes = lowest(map(journal.memory_bytes, equals)) or 0

        def preference(number: int) -> tuple[bool, int, float]:
            needs_more = (journal.memory_bytes(number) or 0) > least_bytes * (1 + EQUAL_MEMORY_SHARE)
            return needs_more, len(self.overridden_levels(number)), float(self.state.starts_s[number])

        return min(equals, key=preference)

    @cached_property
    def answer_number(self) -> int:
        """The winner, or the baseline if that may be the answer and the runs that confirm show no gain over it."""
        winner_number, baseline_number = self.winner_number, self.baseline_number
        gain = self.by_runs(winner_number, baseline_number)
        if gain is None or baseline_number in self.state.ruled_out:
            return winner_number
        return winner_number if gain.mean >= EQUAL_LOG_GAIN or (gain.is_clear and gain.mean > 0) else baseline_number

    @cached_property
    def ties(self) -> list[int]:
        """The contenders that the runs cannot tell from the answer."""
        others = [number for number in self.contenders if number != self.answer_number]
        return [number for number in others if not self.difference(number, self.answer_number).is_clear]

    def overridden_levels(self, number: int) -> dict[str, int]:
        """Return the baseline's levels of the knobs that differ, without accumulation if the batch decides it."""
        levels = self.state.levels
        points = zip(levels.names, levels.points[number], levels.points[self.baseline_number], strict=True)
        return {name: base_level for name, level, base_level in points if level != base_level}

    @cached_property
    def steps(self) -> int:
        """Timed steps of each run: enough for the wanted error, but confirming takes half of the budget at most."""
        state = self.state
        budget_per_run_s = CONFIRMING_SHARE * state.question.budget_s / CONFIRMING_RUNS
        affordable = min((budget_per_run_s - state.starts_s[number]) / state.step_s[number] for number in self._sides)
        return max(COLD_RULE.min_steps, min(COLD_RULE.steps_at(state.measured.step_deviation), int(affordable)))

    def are_affordable(self, numbers: Sequence[int]) -> bool:
        """True if the budget pays for one run of every candidate in `numbers`."""
        return self.state.spent_s + sum(map(self._run_s, numbers)) <= self.state.question.budget_s

    def reserve_s(self) -> float:
        """Expected seconds of the runs that confirm: two of the leader and two of the baseline."""
        return 2 * sum(map(self._run_s, self._sides))

    def _run_s(self, number: int) -> float:
        return float(self.state.starts_s[number] + self.steps * self.state.step_s[number])

    @property
    def _sides(self) -> list[int]:
        """The leader, if there is one, and the baseline."""
        return [number for number in (self.state.leader_number, self.baseline_number) if number is not None]

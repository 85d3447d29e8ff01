"""The decisions of a best-fit search under a fake clock, over synthetic spaces and lines written by hand."""

import math
import re
from dataclasses import replace

import msgspec
from benchmarks.best_fit_replay import FakeConductor, question
from benchmarks.best_fit_spaces import LaunchBound, Synthetic

from trainfast_runner.search.best.answer import answer_of
from trainfast_runner.search.best.decide import COLD_RULE, BestState, decide
from trainfast_runner.search.best_journal import ProcessReady, Space, StepProfile
from trainfast_runner.search.effects import MAX_TIMED_STEPS, MIN_TIMED_STEPS, StepRule

from .synthetic import asking, cold, process_ready, state_of, trial


def test_the_baseline_opens_and_its_bottleneck_is_given_with_the_gain_and_the_price_of_the_next(space, base, begun):
    first = decide(state_of(space))
    assert (first.step.action, first.step.candidate_number, first.needs_new_process) == ("trial", base, True)
    ready, measured = begun
    slow_host = "the GPU is idle for 48 % of the time"
    second = decide(state_of(space, ready, msgspec.structs.replace(measured, diagnosis=[slow_host]), warm="one")).step
    assert second.next_number == second.candidate_number != base
    pattern = r"about [\d.]+ s, (over )?\d+ % chance of 2 % or more, expected [+-]\d+ %; "
    assert re.fullmatch(pattern + slow_host, second.why)


def test_a_knob_of_a_phase_under_a_percent_is_left_out_until_the_phase_matters(space, base, begun):
    """Of a step of 100 ms the loader takes 0.5 ms; once another setting takes 30 ms, 0.5 ms are over 1 %."""
    name = next(name for name in ("workers", "pin_memory") if name in space.space.candidates[base].knobs)
    ready, measured = begun
    profile = StepProfile(data_ms=0.5, optimizer_ms=20.0)
    lines = [ready, msgspec.structs.replace(measured, profile=profile)]
    state = state_of(space, *lines, warm="one")
    knobs = {number: space.space.candidates[number].knobs for number in space.truth}
    other_loader = [number for number in knobs if knobs[number][name] != knobs[base][name]]
    words = f"{name} acts on the wait for data alone, 0.5 % of the step"
    assert {state.bounds[number] for number in other_loader} == {words}
    assert not state.is_open[other_loader].any()
    same_loader = next(number for number in space.truth if number != base and number not in other_loader)
    faster = trial(same_loader, ms=30.0, profile=profile)
    assert not state_of(space, *lines, faster, warm="one").bounds


def test_physics_expects_of_a_launch_bound_gpu_what_a_compiler_can_give_and_of_no_trace_no_more_calls():
    terrain = LaunchBound(0)
    conductor = FakeConductor(terrain, question(terrain.name, terrain.space), 0)
    conductor.trial(conductor.next())
    conductor.next()
    state = conductor.latest
    assert state is not None
    knobs = [one.knobs for one in terrain.space.candidates]
    compiled, recomputed, cut = (
        math.exp(state.gains.mean[knobs.index({**knobs[0], **turned})])
        for turned in ({"compile": "default"}, {"checkpointing": "full"}, {"batch_size": 1, "grad_accum": 8})
    )
    assert 1.5 < compiled < 3.5
    assert 0.6 < recomputed < 0.85, "a third more calls"
    assert cut < 0.2, "eight times the calls"
    words = r"predicted: about [\d.]+x samples/s by a global batch of \d+ instead of 8, if your training allows"
    assert re.fullmatch(words, answer_of(state).unused_lever)
    terrain = LaunchBound(0)
    untraced = [msgspec.structs.replace(one, host_s=None, device_s=None) for one in terrain.space.candidates]
    terrain.space = msgspec.structs.replace(terrain.space, candidates=untraced)
    conductor = FakeConductor(terrain, question(terrain.name, terrain.space), 0)
    conductor.trial(conductor.next())
    number = conductor.next().step.candidate_number
    assert number is not None
    knobs = untraced[number].knobs
    assert (knobs["batch_size"], knobs["checkpointing"], knobs["attention"]) == (8, "off", "auto")


def test_a_batch_that_runs_out_of_memory_rules_out_larger_ones(space, begun):
    lines = begun
    second = decide(state_of(space, *lines, warm="one")).step.candidate_number
    assert second is not None
    lines += [trial(second, outcome="oom", step_ms=[], reason="ran out of memory")]
    later = state_of(space, *lines)
    assert later.ruled_out[second].verdict == "too_large"
    third = decide(later)
    assert third.step.candidate_number is not None
    assert third.step.candidate_number not in later.ruled_out
    assert third.needs_new_process, "running out of memory ended the process"


def test_a_baseline_that_fails_ends_the_search_and_the_smallest_setting_follows_one_too_large(space, base):
    failed = trial(space.space.baseline_number, outcome="failed", step_ms=[], reason="no data")
    decision = decide(state_of(space, failed))
    assert (decision.step.action, decision.end_state) == ("end", "failed")
    assert "no data" in decision.step.why
    decision = decide(state_of(space, trial(base, outcome="oom", step_ms=[], reason="ran out of memory")))
    assert decision.step.action == "trial"
    assert decision.step.candidate_number is not None
    sizes = [space.space.candidates[number].predicted_bytes or 0 for number in space.truth if number != base]
    assert space.space.candidates[decision.step.candidate_number].predicted_bytes == min(sizes)
    terrain = Synthetic(3)
    terrain.space = Space(
        candidates=[
            one if number == terrain.space.baseline_number else msgspec.structs.replace(one, excluded_as="too_large")
            for number, one in enumerate(terrain.space.candidates)
        ],
        baseline_number=terrain.space.baseline_number,
    )
    lines = [trial(terrain.space.baseline_number, outcome="oom", step_ms=[])]
    assert decide(state_of(terrain, *lines)).end_state == "nothing_fits"
    assert answer_of(state_of(terrain, *lines)) is None


def test_a_setting_that_was_given_up_as_slow_is_not_repeated_to_show_drift(space, base, begun):
    process = space.space.candidates[base].process_knobs
    slow, fast, faster = [
        number
        for number in sorted(space.truth)
        if number != base and space.space.candidates[number].process_knobs == process
    ][:3]
    elsewhere = next(n for n in sorted(space.truth) if space.space.candidates[n].process_knobs != process)
    lines = begun
    # As after a kill: a new process began with the setting that was under way.
    hopeless = trial(slow, run_id="two", outcome="slow", ms=15_000.0, warm=False)
    lines += [*process_ready(space, slow, run_id="two"), hopeless]
    alone = state_of(space, *lines, warm="two", spent_s=130.0)
    assert alone.is_affordable[fast]
    assert decide(alone).step.action == "trial"
    lines += [trial(fast, run_id="two"), trial(faster, run_id="two")]
    lines += [trial(number, run_id="two") for number in sorted(space.truth) if number not in (base, slow, elsewhere)]
    after = state_of(space, *lines, warm="two", spent_s=200.0)
    closing = decide(after).step
    assert (closing.candidate_number, closing.repeats) == (fast, True)


def drifted(space, base, run_id):
    """The lines of the baseline's process, of two settings and of the repeat of the first, 5 % slower."""
    candidates = space.space.candidates
    warm = [n for n in sorted(space.truth) if candidates[n].process_knobs == candidates[base].process_knobs]
    second = next(number for number in warm if number != base)
    trials = [trial(base, run_id, warm=False), trial(second, run_id, ms=60.0), trial(base, run_id, 105.0, repeats=True)]
    return [*process_ready(space, base, run_id), *trials]


def test_the_trials_of_a_process_that_drifted_are_void_and_repeated_in_a_new_one(space, base):
    once = state_of(space, *drifted(space, base, "one"), warm="one")
    assert not once.counted_trials
    again = decide(once)
    assert (again.step.action, again.step.candidate_number, again.needs_new_process) == ("trial", base, True)
    steady = trial(base, "two", warm=False)
    repeated = state_of(space, *drifted(space, base, "one"), *process_ready(space, base, "two"), steady, spent_s=1e9)
    assert repeated.counted_trials[base] == [steady], "also without time, what was repeated stays void"
    lines = [line for run_id in ("one", "two", "three") for line in drifted(space, base, run_id)]
    counted = state_of(space, *lines).measured.trials
    assert {line.run_id for line in counted} == {"three"}, "a third drift is the noise of the machine"


def test_the_drift_of_a_process_is_noise_where_no_time_is_left_to_repeat(space, base, begun):
    first, second = [number for number in sorted(space.truth) if number != base][:2]
    lines = [*begun, *process_ready(space, first, "two")]
    lines += [trial(first, run_id="two", ms=80.0), trial(second, run_id="two"), trial(first, "two", 96.0, repeats=True)]
    answer = answer_of(state_of(space, *lines, spent_s=1e9))
    measured = {one.candidate_number: one.rate for one in answer.verdicts if one.verdict == "measured"}
    assert measured.keys() == {base, first, second}
    width = {number: rate.high / rate.low for number, rate in measured.items() if rate is not None}
    assert width[first] > 1.15 > 1.05 > width[base], "the interval is as wide as the drift of its process"
    assert any("1 process drifted" in note for note in answer.notes)
    steady = [*lines[:-1], trial(first, "two", 81.0, repeats=True)]
    assert not state_of(space, *steady).measured.drifts


def test_void_trials_count_for_nothing(space, base, other):
    void = trial(base, outcome="void", step_ms=[], reason="another run took the machine")
    assert decide(state_of(space, void)).step.candidate_number == base
    hot = msgspec.structs.replace(void, reason="GPU 0 was throttled (thermal) for 5% of the time")
    given_up = decide(state_of(space, void, void, hot))
    reason = "void in 3 trials; the last: GPU 0 was throttled (thermal) for 5% of the time"
    assert (given_up.end_state, given_up.step.why) == ("failed", f"the baseline failed: {reason}")
    of_other = [msgspec.structs.replace(line, candidate_number=other) for line in (void, void, hot)]
    assert state_of(space, trial(base), *of_other).ruled_out[other].reason == reason


def test_no_trial_begins_that_is_expected_to_pass_the_budget(space, begun):
    compiled = next(n for n in sorted(space.truth) if space.space.candidates[n].knobs["compile"] == "default")
    slow = ProcessReady(run_id="two", process_knobs=space.space.candidates[compiled].process_knobs, start_s=500.0)
    lines = [*begun, slow]
    asked = [asking(space, budget_s=600.0), space.space, *lines]
    late = BestState(asked, 120.0)
    assert late.is_open[compiled]
    assert not late.is_affordable[compiled], "its process alone starts for 500 s of 480"
    assert late.is_affordable.any(), "others start in 5 s"
    assert late.is_affordable[decide(late).step.candidate_number]


def test_an_oom_under_the_real_limit_rules_the_leader_out(space):
    asked = msgspec.structs.replace(asking(space), limits_bytes=[2**20])
    conductor = FakeConductor(space, asked, 1)
    while (decision := conductor.next()).step.action == "trial":
        conductor.trial(decision)
    assert decision.step.action == "limit"
    leader = decision.step.candidate_number
    assert leader is not None
    end = cold(leader, "limit", "oom", run_id="limited", reason="ran out of memory")
    conductor.lines.append(end)
    tried = []
    while (decision := conductor.next()).step.action == "trial":
        tried.append(decision.step.candidate_number)
        conductor.trial(decision)
    assert leader not in tried, "trials go on where the next best leaves them a chance"
    assert decision.step.action == "limit"
    assert decision.step.candidate_number != leader


def test_a_trial_takes_more_steps_until_it_is_sure_and_stops_early_when_it_is_slow():
    rule = StepRule(give_up_ms=150.0)
    assert (rule.judge([100.0] * (MIN_TIMED_STEPS - 1)), rule.judge([100.0] * MIN_TIMED_STEPS)) == ("more", "enough")
    assert rule.judge([90.0, 110.0, 85.0, 118.0, 100.0]) == "more"
    assert (rule.judge([90.0, 110.0] * MAX_TIMED_STEPS), rule.judge([200.0, 190.0])) == ("enough", "slow")
    assert replace(rule, give_up_ms=None).judge([200.0, 190.0]) == "more"


def test_beyond_the_budget_the_answer_is_confirmed_in_shorter_runs_of_slow_steps(space, other, begun, base):
    lines = [*begun, trial(other, ms=99.0)]
    asked = asking(space, budget_s=600.0)
    late = [decide(BestState([asked, space.space, *lines], spent_s)).step for spent_s in (599.0, 700.0)]
    assert [(step.action, step.candidate_number) for step in late] == [("confirm", other)] * 2
    samples = space.space.candidates[base].samples_per_step
    for ms, steps in ((100.0, 60), (4800.0, 14), (60_000.0, COLD_RULE.min_steps)):
        slow = [ms * share * 8 / samples for share in (0.9, 1.1)]
        noisy = trial(base, warm=False, step_ms=slow * 5, seconds=1.0)
        lines = [asking(space, budget_s=600.0), space.space, *process_ready(space, base), noisy]
        assert BestState(lines, 0.0).cold.steps == steps

"""Throttled time of a window against the scenario that the samples were taken from, a tick a second."""

import random

import pytest
from scenario import HW_THERMAL, POWER_BRAKE, SW_POWER_CAP, SW_THERMAL, THERMAL, Moment, Scenario

from trainfast_runner.machine.telemetry.throttle import decode
from trainfast_runner.records.run_lines import Step
from trainfast_runner.records.tick import DeviceReading
from trainfast_runner.results.device_conditions import Window, join_of
from trainfast_runner.results.summary import window_throttle

S = 1_000_000_000
GPU = "GPU-0"


def cause_counters(scenario, t):
    return {
        "sw_thermal_slowdown_ns": 7 * S + int(scenario.held_s(0, SW_THERMAL, t) * S),
        "hw_thermal_slowdown_ns": 9 * S + int(scenario.held_s(0, HW_THERMAL, t) * S),
        "hw_power_brake_ns": int(scenario.held_s(0, POWER_BRAKE, t) * S),
    }


def policy_counters(scenario, t):
    return {
        "thermal_violation_ns": 3 * S + int(scenario.held_s(0, THERMAL, t) * S),
        "power_violation_ns": int(scenario.held_s(0, SW_POWER_CAP, t) * S),
    }


def sampled(scenario, times, *counters):
    """The GPU's samples at those seconds, with its throttle reasons and what the counters say."""
    found = []
    for t in times:
        now = scenario.at(0, t)
        fields = {"throttle_reasons": decode(now.reasons)}
        for counter in counters:
            fields |= counter(scenario, t)
        sample = DeviceReading(
            uuid=GPU, index=0, temperature_c=now.temperature_c, sm_clock_mhz=now.sm_mhz, sm_clock_max_mhz=1980, **fields
        )
        found.append((round(t * S), sample))
    return {GPU: found}


def fraction_error(scenario, times, begin, end, *counters):
    """How far the result's thermal fraction of a window is from what the scenario did."""
    window = Window(round(begin * S), round(end * S))
    devices = join_of(sampled(scenario, times, *counters), [GPU]).conditions_between(window.begin_ns, window.end_ns)
    text = window_throttle(devices, window, 1).thermal_fraction
    return abs(text - scenario.fraction(0, THERMAL, window.begin_ns, window.end_ns))


def hot(*spells, reasons=SW_THERMAL):
    """A GPU that is slowed down from and to those seconds."""
    ramp = [Moment(0, 70, 0, 300, 1980)]
    for begin, end in spells:
        ramp += [Moment(begin, 90, reasons, 220, 990), Moment(end, 80, 0, 300, 1980)]
    return Scenario(0, ramps={0: ramp})


def ticks(until, phase=0.0):
    return [phase + n for n in range(int(until - phase) + 2)]


@pytest.mark.parametrize("reasons", [(SW_THERMAL,), (HW_THERMAL,), (SW_THERMAL, HW_THERMAL, THERMAL)])
@pytest.mark.parametrize("counters", [(cause_counters, policy_counters), (policy_counters,)])
def test_wherever_spells_ticks_and_the_window_begin_and_end(reasons, counters):
    draw = random.Random(5)
    for _ in range(60):
        spells, t = [], draw.uniform(0.3, 3)
        while t < 40:
            spells.append((t, t + draw.uniform(1.1, 6)))
            t = spells[-1][1] + draw.uniform(1.1, 6)
        scenario = hot(*spells)
        scenario.ramps[0] = [
            Moment(m.at_s, m.temperature_c, draw.choice(reasons) if m.reasons else 0, m.power_w, m.sm_mhz)
            for m in scenario.ramps[0]
        ]
        begin = draw.uniform(1.5, 20)
        end = begin + draw.uniform(4, 12)
        late = [n + draw.uniform(0, 0.02) for n in ticks(end, draw.random())]
        # At each end of the window half a second at most: a counter's growth is spread over the time between samples.
        assert fraction_error(scenario, late, begin, end, *counters) * (end - begin) < 0.52


def test_a_step_gets_the_milliseconds_of_its_own_time_and_reasons_at_once_count_once():
    """Steps of 100 ms between two ticks: each gets its share of what the counter grew between them."""
    join = join_of(sampled(hot((3.4, 9)), ticks(12), cause_counters, policy_counters), [GPU])
    for n in range(1, 61):
        join.add(Step(t_ns=round((n / 10 + 0.05) * S), step=n, samples=1, tokens=1, step_ms=100.0))
    conditions = {one.step: one for one in join.joined(final=True)}
    assert [round(conditions[n].throttled_ms["thermal"] or 0) for n in (29, 32, 33, 39, 45)] == [0, 60, 60, 60, 100]
    assert conditions[45].devices[0].lost_ms["thermal"] == pytest.approx(50), "the clock is at half of its maximum"
    scenario = hot((4, 7), reasons=THERMAL)
    for counters in ((cause_counters, policy_counters), (cause_counters,)):
        assert fraction_error(scenario, ticks(12), 1, 11, *counters) < 0.001


def throttled_ms(samples, begin, end):
    """The milliseconds that heat held the GPU back between those seconds."""
    (found,) = join_of(samples, [GPU]).conditions_between(begin * S, end * S)
    return found.throttled_ms["thermal"]


def test_counters_that_start_again_lose_one_interval_and_without_any_there_is_no_figure():
    """The driver was reloaded at second 6: from there on the counter goes on from 0."""
    scenario = hot((3, 9))

    def reloaded(one, t):
        since = 6.5 if t > 6.5 else 0.0
        return {"thermal_violation_ns": int((one.held_s(0, THERMAL, t) - one.held_s(0, THERMAL, since)) * S)}

    assert throttled_ms(sampled(scenario, ticks(14), reloaded), 2, 12) == pytest.approx(6000)
    samples = [(t * S, DeviceReading(uuid=GPU, index=0, temperature_c=50)) for t in range(12)]
    window = Window(2 * S, 10 * S)
    devices = join_of({GPU: samples}, [GPU]).conditions_between(window.begin_ns, window.end_ns)
    found = window_throttle(devices, window, 8)
    assert (found.thermal_fraction, found.power_fraction) == (None, None)
    (row,) = found.devices
    assert (row.uuid, row.thermal_fraction) == (GPU, None)


def silent(spell, *counters):
    """Samples of a GPU that is held back in the spell and does not answer from second 8 to 12."""
    nothing = DeviceReading(uuid=GPU, index=0)
    samples = sampled(hot(spell), ticks(22), *counters)[GPU]
    return {GPU: [(t_ns, nothing if 8 * S < t_ns < 12 * S else one) for t_ns, one in samples]}


BOTH = (cause_counters, policy_counters)


@pytest.mark.parametrize("spell", [(3, 5), (9, 11), (7.2, 13.4)])
def test_what_a_gpu_counted_while_it_did_not_answer_is_in_the_figure(spell):
    assert throttled_ms(silent(spell, *BOTH), 0, 20) == pytest.approx(1000 * (spell[1] - spell[0]))


def test_of_an_outage_counts_its_part_in_the_window_and_a_silent_step_has_no_figure():
    """Two of its four seconds were throttled, and one of the four lies before the window."""
    assert throttled_ms(silent((9, 11), *BOTH), 9, 19) == pytest.approx(2000 * 3 / 4)
    # Twenty seconds less the four between the last answer and the next.
    assert throttled_ms(silent((3, 5)), 0, 20) == pytest.approx(2000 * 20 / 16, rel=0.02)
    join = join_of(silent((9, 11), *BOTH), [GPU])
    join.add(Step(t_ns=10 * S, step=1, samples=1, tokens=1, step_ms=100.0))
    assert join.joined(final=True)[0].throttled_ms["thermal"] is None

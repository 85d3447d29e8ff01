"""Steps and windows joined to device samples whose right answers are known, or come from a scenario."""

import itertools
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scenario import HW_THERMAL, POWER_BRAKE, SW_POWER_CAP, SW_THERMAL, THERMAL, Moment, Scenario

from trainfast_runner.machine.telemetry.throttle import decode
from trainfast_runner.records.run_lines import Step
from trainfast_runner.records.tick import DeviceReading
from trainfast_runner.results.device_conditions import StepJoin, Window, join_of
from trainfast_runner.results.summary import window_throttle

MS = 1_000_000
S = 1_000 * MS
GPU = "GPU-0"


def sample(uuid=GPU, **fields):
    return DeviceReading(uuid=uuid, index=int(uuid[-1]), **fields)


def step(number, end_ms, ms, samples=4):
    return Step(t_ns=round(end_ms * MS), step=number, samples=samples, tokens=0, step_ms=ms)


def window(samples, begin_s, end_s):
    join = join_of({GPU: [(round(t * S), one) for t, one in samples]}, [GPU])
    return join.conditions_between(round(begin_s * S), round(end_s * S))[0]


def test_a_step_gets_its_share_of_what_the_counters_grew_between_two_samples():
    join = StepJoin([GPU], samples_factor=2)
    clock = {"sm_clock_mhz": 1500, "sm_clock_max_mhz": 2000}
    join.add_tick(0, [sample(thermal_violation_ns=0, energy_mj=0, temperature_c=60, **clock)])
    join.add(step(1, end_ms=600, ms=200))
    join.add(step(2, end_ms=1200, ms=600))
    assert join.joined() == []
    join.add_tick(S, [sample(thermal_violation_ns=500 * MS, energy_mj=300_000, temperature_c=70, **clock)])
    (first,) = join.joined()
    assert (first.step, first.throttled_ms["thermal"]) == (1, pytest.approx(100))
    assert first.throttled_ms["power"] is None
    assert (first.energy_joules, first.joules_per_sample) == (pytest.approx(60), pytest.approx(60 / 8))
    assert (first.clock_loss_fraction, first.temperature_c) == (pytest.approx(0.25), 60)
    assert first.devices[0].lost_ms["thermal"] == pytest.approx(25)
    # The second ends after the last sample: when no more will come, what grew before is taken to go on.
    assert join.joined() == []
    (second,) = join.joined(final=True)
    assert second.throttled_ms["thermal"] == pytest.approx(300)


def test_the_worst_device_speaks_for_a_step_and_energy_is_summed():
    join = StepJoin(["GPU-0", "GPU-1"])
    for t in (0, 1):
        join.add_tick(
            t * S,
            [
                sample("GPU-0", sync_boost_violation_ns=0, energy_mj=t * 1000),
                sample("GPU-1", sync_boost_violation_ns=t * 100 * MS, energy_mj=t * 3000),
                sample("GPU-2", sync_boost_violation_ns=t * 900 * MS),
            ],
        )
    join.add(step(1, end_ms=1000, ms=1000))
    (one,) = join.joined()
    assert (one.throttled_ms["sync_boost"], one.energy_joules) == (pytest.approx(100), pytest.approx(4))
    assert [device.index for device in one.devices] == [0, 1]


def test_the_counter_of_the_reason_goes_before_the_policys_and_that_before_sampled_reasons():
    hot = ["sw_thermal"]
    both = [
        (float(t), sample(sw_thermal_slowdown_ns=t * 100 * MS, hw_thermal_slowdown_ns=t * 50 * MS,
                          thermal_violation_ns=t * 500 * MS, throttle_reasons=hot))
        for t in range(4)
    ]  # fmt: skip
    found = window(both, 0, 3)
    assert found.throttled_ms["thermal"] == pytest.approx(450)
    policy = [(float(t), sample(thermal_violation_ns=t * 500 * MS, throttle_reasons=hot)) for t in range(4)]
    found = window(policy, 0, 3)
    assert found.throttled_ms["thermal"] == pytest.approx(1500)
    bits = [(float(t), sample(throttle_reasons=hot if t == 1 else [])) for t in range(4)]
    found = window(bits, 0, 3)
    assert (found.throttled_ms["thermal"], found.throttled_ms["brake"]) == (pytest.approx(1000), 0)


def test_a_gpu_lost_has_what_its_counter_grew_and_what_held_last_goes_on_for_one_interval():
    counted = [(float(t), sample(energy_mj=t * 1000) if t < 3 or t > 8 else sample()) for t in range(11)]
    assert window(counted, 0, 10).energy_joules == pytest.approx(10)
    assert window(counted[:9], 0, 8).energy_joules is None, "no answer has come since"
    powered = [(t, sample(power_w=100.0) if one.energy_mj is not None else one) for t, one in counted]
    assert window(powered, 0, 10).energy_joules is None
    assert window(powered, 0, 2).energy_joules == pytest.approx(200)
    samples = [(float(t), sample(thermal_violation_ns=min(t, 4) * S)) for t in range(9)]
    assert window(samples, 0, 8.9).throttled_ms["thermal"] == pytest.approx(4000)
    assert window(samples, 0, 12).throttled_ms["thermal"] == pytest.approx(4000 * 12 / 9)


def test_power_is_integrated_without_a_counter_and_a_counter_is_believed_by_its_time():
    samples = [(float(t), sample(power_w=100.0 + 100 * t)) for t in range(3)]
    found = window(samples, 0, 2)
    assert (found.energy_joules, found.energy_source) == (pytest.approx(400), "integrated power")
    samples = [(float(t), sample(power_violation_ns=[0, 0, 2 * S][t])) for t in range(3)]
    assert window(samples, 1, 2).throttled_ms["power"] == pytest.approx(1000)
    stepping = [(float(t), sample(power_violation_ns=[0, 700_000, 699_999, 900_000][t])) for t in range(4)]
    assert window(stepping, 0, 3).throttled_ms["power"] == pytest.approx(0.900_001)
    racing = [(float(t), sample(power_violation_ns=t * 5 * S, throttle_reasons=["sw_power_cap"])) for t in range(4)]
    found = window(racing, 0, 3)
    assert found.throttled_ms["power"] == pytest.approx(3000)


def test_a_long_live_run_keeps_only_what_new_steps_need():
    join = StepJoin([GPU], keep=10)
    for t in range(1000):
        join.add_tick(t * S, [sample(thermal_violation_ns=t * 100 * MS, energy_mj=t * 1000)])
        join.add(step(t + 1, end_ms=t * 1000, ms=500))
        for one in join.joined():
            if t > 1:
                assert (one.throttled_ms["thermal"], one.energy_joules) == (pytest.approx(50), pytest.approx(0.5))


READING = st.fixed_dictionaries(
    {},
    optional={
        "thermal_violation_ns": st.integers(0, 5 * S),
        "energy_mj": st.integers(0, 10**6),
        "power_w": st.floats(0, 700),
        "sm_clock_mhz": st.integers(0, 2000),
        "sm_clock_max_mhz": st.just(1980),
        "temperature_c": st.integers(20, 95),
        "throttle_reasons": st.lists(st.sampled_from(["sw_thermal", "sw_power_cap", "idle", "0x400"]), max_size=2),
    },
)


def without_energy(conditions):
    devices = tuple(replace(d, energy_joules=None, energy_source=None, energy_reason=None) for d in conditions.devices)
    return replace(conditions, energy_joules=None, joules_per_sample=None, devices=devices)


@example(
    readings=[{"thermal_violation_ns": 0}, {"thermal_violation_ns": 0}, {}, {"thermal_violation_ns": 1}],
    steps=[101.0, 900.0],
    polls={0, 1, 2},
)
@settings(max_examples=60, deadline=None)
@given(
    readings=st.lists(READING, min_size=2, max_size=12),
    steps=st.lists(st.floats(1, 900), min_size=1, max_size=12),
    polls=st.sets(st.integers(0, 12)),
)
def test_step_by_step_it_says_what_it_says_at_once(readings, steps, polls):
    """However the two files grow, the live view and the history agree, but for a counter that later samples refute."""
    ends = list(itertools.accumulate(steps))
    recorded = [step(n, end_ms=end, ms=ms) for n, (end, ms) in enumerate(zip(ends, steps, strict=True), 1)]
    samples = [(t * S, sample(**reading)) for t, reading in enumerate(readings)]
    whole = StepJoin([GPU])
    for one in recorded:
        whole.add(one)
    for t_ns, reading in samples:
        whole.add_tick(t_ns, [reading])
    live, found, left = StepJoin([GPU]), [], list(recorded)
    for place, (t_ns, reading) in enumerate(samples):
        live.add_tick(t_ns, [reading])
        while left and left[0].t_ns <= t_ns:
            live.add(left.pop(0))
        if place in polls:
            found += live.joined()
    for one in left:
        live.add(one)
    found, at_once = found + live.joined(final=True), whole.joined(final=True)
    if any(device.energy_reason for one in at_once for device in one.devices):
        found, at_once = [without_energy(one) for one in found], [without_energy(one) for one in at_once]
    assert found == at_once
    devices = whole.conditions_between(0, recorded[-1].t_ns)
    for one in (ms for device in devices for ms in device.throttled_ms.values()):
        assert one is None or 0 <= one <= recorded[-1].t_ns / MS * (1 + 1e-9)


def test_an_idle_gpu_loses_no_clock_and_without_devices_there_is_nothing_to_join():
    """It saves power: 345 of 1980 MHz with nothing to do is no loss to anybody."""
    idle = sample(sm_clock_mhz=345, sm_clock_max_mhz=1980, throttle_reasons=["idle"])
    busy = sample(sm_clock_mhz=1485, sm_clock_max_mhz=1980, throttle_reasons=[])
    assert window([(float(t), idle) for t in range(5)], 0, 4).clock_loss_fraction is None
    mixed = [(float(t), idle if t > 8 else busy) for t in range(11)]
    assert window(mixed, 0, 10).clock_loss_fraction == pytest.approx(0.25)
    join = StepJoin([])
    join.add(step(1, end_ms=500, ms=500))
    join.add_tick(S, [])
    assert join.joined(final=True) == []


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

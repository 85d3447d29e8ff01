"""Trainings that something really holds back: what is said of them is what was true."""

import time

import pytest
from scenario import HW_THERMAL, POWER_BRAKE, SW_POWER_CAP, SW_THERMAL, SYNC_BOOST, Moment, Scenario

from cli.command import SMALL, until
from trainfast_runner.records.json_lines import read_all
from trainfast_runner.records.run_directory import read_records
from trainfast_runner.records.run_lines import Event, Step

pytestmark = pytest.mark.long
GPU = "GPU-00000000-0000-0000-0000-000000000000"
ENDLESS = ["--set", "steps=1000000", "--set", "watch=0"]
HW_SLOWDOWN = 0x8
HOT_S = 4.0
FREE_S = 2.0


PICTURES = [
    *("--set", "model.num_hidden_layers=1", "--set", "model.hidden_size=32", "--set", "model.intermediate_size=64"),
    *("--set", "model.num_attention_heads=2", "--set", "precision=fp32", "--set", "optimizer=sgd"),
    *("--set", "batch_size=4", "--set", "steps=7", "--set", "workers=0"),
]
"""A model so small that decoding its JPEG files takes longer than training on them."""


def test_a_loader_that_is_really_slow_is_what_holds_the_run_back(cli, tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name in ("cats/one", "cats/two", "dogs/one", "dogs/two"):
        path = tmp_path / "pictures" / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.effect_noise((2400, 1800), 80).convert("RGB").save(path)
    done = cli("run", "vit-large", *PICTURES, "--set", f"data.paths={tmp_path / 'pictures'}", "--json")
    finding = next(finding for finding in done.json["diagnosis"] if finding["rule"] == "data-bound")
    steps = read_all(cli.home / "runs" / done.json["run_id"] / "steps.jsonl", Step)[0]
    waited_ms = sum(step.data_ms or 0.0 for step in steps if not step.warmup)
    whole_ms = sum(step.step_ms for step in steps if not step.warmup)
    assert finding["evidence"]["data_percent"] == pytest.approx(100 * waited_ms / whole_ms)
    assert finding["evidence"]["data_percent"] > 10
    assert finding["try"].startswith("workers=")
    assert "waiting for data" in cli("runs", "show", "last").out


def test_throttled_time_is_the_scenarios_and_reaches_every_step(cli, gpus, tmp_path):
    """A CPU training joined to a GPU that a scenario heats until it is slowed down."""
    scenario = Scenario(origin_ns=time.monotonic_ns(), ramps={0: [Moment(0, 70, 0, 300, 1980)]})
    machine = gpus(2)
    script = scenario.write(tmp_path / "scenario")
    run_id = cli("run", "tiny-llama", *SMALL, *ENDLESS, "--detach", **machine).out.strip()
    directory = cli.home / "runs" / run_id
    until(lambda: any(not step.warmup for step in read_all(directory / "steps.jsonl", Step)[0]), "a measured step")
    # The heat comes and goes while measured steps run, so both ends of the window are free of it.
    hot = (time.monotonic_ns() - scenario.origin_ns) / 1e9 + FREE_S
    scenario.ramps[0] += [
        Moment(hot, 90, SW_THERMAL, 220, 1200),
        Moment(hot + HOT_S, 90, 0, 300, 1980),
        Moment(hot + HOT_S + 100, 60, 0, 300, 1980),
    ]
    scenario.write(script)
    over_ns = scenario.origin_ns + round((hot + HOT_S + FREE_S) * 1e9)
    until(lambda: read_records(directory).device_samples[GPU][-1][0] > over_ns, "a tick after the heat")
    cli("stop", run_id)
    result = cli("runs", "show", run_id, "--json").json

    measured = [step for step in read_all(directory / "steps.jsonl", Step)[0] if not step.warmup]
    begin_ns = measured[0].begin_ns
    true_fraction = scenario.fraction(0, SW_THERMAL, begin_ns, measured[-1].t_ns)
    assert 0.05 < true_fraction < 0.7
    assert result["throttle"]["thermal_fraction"] == pytest.approx(true_fraction, abs=0.02)
    assert result["throttle"]["power_fraction"] == 0

    steps = cli("runs", "show", run_id, "--steps", "--json").json["steps"]
    throttled = [step["throttled_ms"]["thermal"] for step in steps]
    assert sum(throttled) == pytest.approx(HOT_S * 1000, rel=0.05)
    assert any(ms == pytest.approx(step["step_ms"], rel=0.01) for ms, step in zip(throttled, steps, strict=True))
    assert throttled[-1] == 0

    finding = next(finding for finding in result["diagnosis"] if finding["rule"] == "thermal")
    assert finding["device"] == 0
    assert "GPU 0 is throttled by heat" in finding["line"]
    assert "at 90 °C, 3 °C over the 87 °C at which it slows down" in finding["line"]
    throttled = [event for event in read_all(directory / "events.jsonl", Event)[0] if event.kind.startswith("throttle")]
    assert [(event.kind, event.device, event.detail) for event in throttled] == [
        ("throttle_on", 0, "sw_thermal"),
        ("throttle_off", 0, "sw_thermal"),
    ]


def test_each_of_eight_gpus_has_the_bottleneck_of_its_scenario(cli, gpus, tmp_path):
    """A CPU training joined to eight GPUs: each rule about a GPU names the one that it is true of, and no other."""

    def gpu(reasons, mhz=1980, degrees=60):
        return [Moment(0, degrees, reasons, 300, mhz)]

    scenario = Scenario(
        origin_ns=time.monotonic_ns(),
        ramps={
            0: gpu(0),
            1: gpu(SW_POWER_CAP, 1880),
            2: gpu(HW_SLOWDOWN | POWER_BRAKE),
            3: gpu(SYNC_BOOST),
            4: gpu(0),
            5: gpu(HW_SLOWDOWN | HW_THERMAL, degrees=94),
            6: gpu(0, 1500),
            7: gpu(0),
        },
        also=["pcie 4 4 8", "process 7 4242 2048 0 100000"],
    )
    machine = gpus(8)
    scenario.write(tmp_path / "scenario")
    watch = ["--set", "steps=1000000", "--set", "watch=" + "+".join(map(str, range(8)))]
    run_id = cli("run", "tiny-llama", *SMALL, *watch, "--detach", **machine).out.strip()
    directory = cli.home / "runs" / run_id
    until(lambda: len(read_all(directory / "steps.jsonl", Step)[0]) > 20, "steps")
    since_ns = read_all(directory / "steps.jsonl", Step)[0][-1].t_ns
    until(lambda: read_records(directory).device_samples[GPU][-1][0] > since_ns + 2 * 10**9, "two ticks with steps")
    cli("stop", run_id)
    result = cli("runs", "show", run_id, "--json").json
    found = {finding["rule"]: finding for finding in result["diagnosis"]}
    held = {rule: finding["device"] for rule, finding in found.items() if finding["device"] is not None}
    assert held == {
        "power-capped": 1,
        "power-brake": 2,
        "sync-boost": 3,
        "pcie-width": 4,
        "thermal": 5,
        "straggler-gpu": 6,
        "foreign-process": 7,
    }
    assert {rule for rule in held if found[rule]["severity"] == "info"} == {"power-capped", "sync-boost", "pcie-width"}
    assert "at 94 °C, 7 °C over the 87 °C" in found["thermal"]["line"]
    assert "pid 4242" in found["foreign-process"]["line"]
    causes = ("thermal", "power", "brake", "sync_boost")
    shares = [[round(row[f"{cause}_fraction"], 2) for cause in causes] for row in result["throttle"]["devices"]]
    assert [shares[index] for index in (1, 2, 3, 5)] == [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]]
    assert [shares[index] for index in (0, 4, 6, 7)] == [[0, 0, 0, 0]] * 4
    opened = cli("runs", "show", run_id, "--why").out
    for finding in found.values():
        assert finding["line"].split(":")[0] in opened
    assert opened.count("   counts ") >= len(found)


def test_two_ranks_that_compute_little_and_exchange_much_are_bound_by_it(cli):
    """Thirteen megabytes of gradients for sixteen tokens."""
    tiny = ["--set", "data.kind=random", "--set", "batch_size=1", "--set", "seq_len=16", "--set", "steps=13"]
    done = cli(
        "run", "tiny-llama", *tiny, "--set", "precision=fp32", "--set", "strategy=ddp", "--set", "devices=2", "--json"
    )
    finding = next(finding for finding in done.json["diagnosis"] if finding["rule"] == "communication-bound")
    figures = finding["evidence"]
    assert (figures["world_size"], figures["link"]) == (2, "shared memory")
    assert figures["backward_ms"] == pytest.approx(figures["computed_backward_ms"] + figures["exposed_ms"])
    assert "grad_accum=2 exchanges half as often" in finding["try"]

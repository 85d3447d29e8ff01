"""A GPU that is lost and comes back while a run trains and the app is open."""

import time

import pytest
import shared_object
from scenario import Scenario

from cli.command import COMMAND, SMALL, until
from end_to_end.terminal import Terminal, needs_tmux
from trainfast_runner.records.json_lines import read_all
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.tick import Tick

pytestmark = [needs_tmux, pytest.mark.long]
ENDLESS = ["--set", "steps=1000000", "--set", "watch=0+1+2"]


def test_the_others_have_no_gap_two_events_are_written_and_the_app_stays(cli, tmp_path):
    scenario = Scenario(origin_ns=time.monotonic_ns())
    script = scenario.write(tmp_path / "scenario")
    (tmp_path / "nvml").mkdir()
    variables = shared_object.environment(shared_object.build(tmp_path / "nvml"), gpus=3, scenario=script)
    machine = {name: variables[name] for name in variables if name.startswith(("NVML_", "LD_LIBRARY"))}
    run_id = cli("run", "tiny-llama", *SMALL, *ENDLESS, "--detach", **machine).out.strip()
    directory = cli.home / "runs" / run_id

    def changes():
        events = read_all(directory / "events.jsonl", Event)[0]
        return [(event.kind, event.device) for event in events if event.kind.startswith("gpu_")]

    def while_lost():
        return [tick for tick in read_all(directory / "telemetry.jsonl", Tick)[0] if tick.devices[1].error]

    terminal = Terminal(tmp_path, 160, 48, {**cli.environment, **machine})
    try:
        terminal.open([*COMMAND])
        terminal.until_shows("samples/s")
        until(lambda: read_all(directory / "telemetry.jsonl", Tick)[0], "a tick")
        now_s = scenario.now_s()
        scenario.also = [f"lost 1 {now_s:.3f} 1e9"]
        scenario.write(script)
        terminal.until_shows("GPU is lost")
        # One tick notices the loss; were the others held up by it, there would be no second.
        until(lambda: len(while_lost()) >= 2, "two ticks without it")
        scenario.also = [f"lost 1 {now_s:.3f} {scenario.now_s():.3f}"]
        scenario.write(script)
        until(lambda: len(changes()) == 2, "both events")
        until(lambda: "GPU is lost" not in terminal.screen(), "the GPU on the screen again")
        cli("stop", run_id)
        terminal.until_shows("stopped")
    finally:
        terminal.close()
    assert changes() == [("gpu_lost", 1), ("gpu_back", 1)]
    ticks = read_all(directory / "telemetry.jsonl", Tick)[0]
    for gpu in (0, 2):
        assert all(tick.devices[gpu].temperature_c is not None for tick in ticks)

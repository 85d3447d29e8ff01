"""A driver whose calls do not come back: neither the training's end nor its result waits for it."""

import time

import pytest
import shared_object
from scenario import Scenario

from cli.command import until
from trainfast_runner.records.json_lines import read_all
from trainfast_runner.records.tick import Tick

pytestmark = pytest.mark.long
NEVER_S = 600


@pytest.mark.parametrize("hanging", [f"slow 1 {NEVER_S} 0 {NEVER_S}", f"opening {NEVER_S} 0 {NEVER_S}"])
def test_the_result_comes_while_a_call_hangs(run, tmp_path, hanging):
    (tmp_path / "nvml").mkdir()
    script = Scenario(origin_ns=time.monotonic_ns(), also=[hanging]).write(tmp_path / "scenario")
    library = shared_object.build(tmp_path / "nvml")
    go = run.directory / "go"
    run.prepare(
        f"""
        train(5)
        while not os.path.exists({str(go)!r}): time.sleep(0.01)
        say("finished")
        """
    )
    run.supervise(env=shared_object.environment(library, gpus=2, scenario=script))
    telemetry = run.directory / "telemetry.jsonl"

    def hangs():
        missing = [reason for tick in read_all(telemetry, Tick)[0] for reason in tick.missing.values()]
        return any("has not answered for" in reason for reason in missing)

    until(hangs, "a tick that says so")
    go.touch()
    result = run.end()
    assert result.state == "finished"
    seen = read_all(telemetry, Tick)[0]
    assert all(tick.host.memory_used_bytes is not None for tick in seen)
    # The training's own end, and the sampler's: not the ten minutes of the call, nor the patience for it.
    finished_ns = run.worker("finished")[0]["t_ns"]
    ended_ns = run.events("state")[-1].t_ns
    assert (ended_ns - finished_ns) / 1e9 < NEVER_S / 2

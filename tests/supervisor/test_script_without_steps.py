"""A script that takes no step that the hooks see: its person is told how to make them seen."""

from __future__ import annotations

from trainfast_runner.records.script_run import ScriptAsked
from trainfast_runner.running.supervisor import SupervisorBounds

from .conftest import Run


def test_script_without_a_step_is_told_the_three_ways_while_it_runs(run: Run) -> None:
    result = run.result_of(
        """
        while "no_step" not in open("events.jsonl").read():
            time.sleep(0.02)
        """,
        SupervisorBounds(no_step_s=0.1),
        script=ScriptAsked(command=["python", "train.py"], argv=["python", "train.py"]),
    )
    [notice] = run.events("no_step")
    assert notice.detail is not None
    assert notice.detail.startswith("no optimizer step seen in 0.1 s: ")
    for way in ("an optimizer of torch.optim", "trainfast_door.step()` after each step", "--steps-from-log REGEX"):
        assert way in notice.detail
    assert result.state == "finished"
    assert result.reason is not None
    assert "--steps-from-log REGEX" in result.reason

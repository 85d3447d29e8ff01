"""A script that takes no step that the hooks see: its person is told how to make them seen."""

from trainfast_runner.records.run_file import ScriptAsked
from trainfast_runner.running.supervisor import SupervisorBounds


def test_a_live_run_of_a_script_without_steps_lists_the_three_ways(run):
    result = run.result_of(
        """
        while "no_step" not in open("events.jsonl").read():
            time.sleep(0.02)
        """,
        SupervisorBounds(no_step_s=0.1),
        script=ScriptAsked(command=["python", "train.py"], argv=["python", "train.py"]),
    )
    [notice] = run.events("no_step")
    assert notice.detail.startswith("no optimizer step seen in 0.1 s: the script may still load or compile; ")
    for way in ("an optimizer of torch.optim", "trainfast_door.step()` after each step", "--steps-from-log REGEX"):
        assert way in notice.detail
    assert result.state == "finished"
    assert "--steps-from-log REGEX" in result.reason

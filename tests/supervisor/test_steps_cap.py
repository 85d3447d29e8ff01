"""steps.jsonl of a run that takes very many steps: head and tail are kept, and nobody waits for it."""

from trainfast_runner.records.run_records import read_records
from trainfast_runner.running.supervision.supervisor import SupervisorBounds

CAP_BYTES = 256 << 10


def test_a_flood_of_steps_keeps_its_head_and_tail(run):
    result = run.result_of(
        """
        def is_cut(rank_file):
            found = os.stat(os.path.join(RUN_DIR, rank_file))
            return found.st_blocks * 512 < found.st_size - (64 << 10)

        begin(); train(3)
        number = 3
        while not is_cut("steps.jsonl"):
            number += 1
            step(number)
        train(50, first=number + 1)
        say("finished", step=number + 50)
        """,
        SupervisorBounds(steps_bytes=CAP_BYTES),
    )
    assert result.state == "finished"
    details = [event.detail for event in run.events("steps_trimmed")]
    assert details == [f"over {CAP_BYTES} bytes: the middle is dropped"]
    lines = (run.directory / "steps.jsonl").read_bytes().splitlines()
    assert sum(line.startswith(b'{"dropped_bytes":') for line in lines) == 1
    records = read_records(run.directory)
    assert records.unreadable_lines == 0
    first, *_, last = records.steps[0]
    assert first.step == 1
    assert result.steps.measured + result.steps.warmup == last.step
    assert result.thinning.steps_dropped == last.step - len(records.steps[0])

"""Several ranks: one that is lost or fails is the verdict for all, and nobody is left waiting."""

import os
import signal

from cli.command import until

LAUNCHER = """
def end(*_):
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    os._exit(1)
signal.signal(signal.SIGTERM, end)
"""


def test_rank_that_vanishes_ends_the_run(run, ended_clean):
    run.waits = {"supervisor.REPORT_S": 0.5}
    run.start(
        LAUNCHER
        + "life = lambda: (train(5, world_size=2), wait_for_ever())\n"
        + "pids = [spawn_rank(n, 2, life) for n in range(2)]; wait_for_ever()",
        world_size=2,
    )
    until(lambda: run.worker("phase", 0)[1:] and run.worker("phase", 1)[1:], "both ranks in training")
    run.in_training()
    lost = run.worker("started", 1)[0]["pid"]
    os.kill(lost, signal.SIGKILL)
    # Unnoticed it would go on for ever: that it ends at all is what shows that the supervisor saw it.
    result = run.end()
    assert result.state == "failed"
    assert result.reason.startswith("rank 1 exited without reporting an error (after step")
    assert (result.error.rank, result.error.phase) == (1, "train")
    assert [event.rank for event in run.events("rank_gone")] == [1]
    ended_clean(run)


def test_exception_of_one_rank_ends_the_others_that_wait_for_it(run, ended_clean):
    run.waits = {"supervisor.EXCEPTION_S": 0.2}
    result = run.result_of(
        LAUNCHER
        + """
        def life():
            train(3)
            if RANK == 1:
                fail("ValueError", "bad batch", phase="data", step=4)
                os._exit(1)
            wait_for_ever()
        pids = [spawn_rank(n, 2, life) for n in range(2)]
        wait_for_ever()
        """.replace("\n        ", "\n"),
        world_size=2,
        knobs={},
    )
    assert (result.state, result.reason) == ("failed", "ValueError: bad batch (rank 1, step 4, phase data)")
    assert (result.error.rank, result.error.type) == (1, "ValueError")
    ended_clean(run)


def test_a_rank_ended_by_an_outside_signal_is_named(run):
    result = run.result_of(
        """
        def life():
            train(3, world_size=2)
            say("finished") if RANK == 0 else say("signal")
        for n in range(2):
            os.waitpid(spawn_rank(n, 2, life), 0)
        """,
        world_size=2,
    )
    assert result.state == "failed"
    assert result.reason == "rank 1 was ended by SIGTERM, which trainfast-tui did not send (phase train)"


def test_throughput_is_the_sum_of_the_ranks(run):
    result = run.result_of(
        """
        def life():
            train(6, world_size=2, wrapper="DistributedDataParallel"); say("finished")
        for pid in [spawn_rank(n, 2, life) for n in range(2)]:
            os.waitpid(pid, 0)
        """,
        world_size=2,
        knobs={"strategy": "ddp"},
    )
    assert result.state == "finished", result.reason
    assert (result.throughput.samples_per_s.median, result.throughput.tokens_per_s.median) == (800, 8000)
    assert result.steps.measured == 4

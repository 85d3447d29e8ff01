"""The verdict on facts that no test can bring about for real: the kernel's OOM killer, torchrun's own words."""

from dataclasses import replace

import msgspec
import pytest

from trainfast_runner.records.run_file import ClockAnchor, RunFile, ScriptAsked
from trainfast_runner.records.run_lines import TrainingEnd
from trainfast_runner.records.worker_lines import ActualLine, WorkerLine
from trainfast_runner.results.verdict import EndFacts, Verdict, judge, one_line

RUN = RunFile(run_id="r", preset="p", world_size=2, clock=ClockAnchor(monotonic_ns=0, wall_ns=0))
ALONE = msgspec.structs.replace(RUN, world_size=1)
NPROC = "RLIMIT_NPROC"
TORCHRUN_REPORT = """
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
bootstrap.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_06:41:41
  host      : box
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 12345)
  error_file: <N/A>
============================================================
"""


def life(*kinds, t_ns=10, **last):
    """A rank's lines: started, in training, then one of each kind, the last with more fields."""
    lines = [
        {"t_ns": 1, "kind": "started"},
        {"t_ns": 2, "kind": "phase", "phase": "train"},
        *({"t_ns": t_ns, "kind": kind} for kind in kinds[:-1]),
        *({"t_ns": t_ns, "kind": kind, **last} for kind in kinds[-1:]),
    ]
    return [msgspec.convert(line, WorkerLine) for line in lines]


def error_in(phase, error):
    """The lines of one rank that raised this type with this message in a phase."""
    began, _, exception = life("exception", phase=phase, type=error[0], message=error[1])
    return {0: [began, msgspec.convert({"t_ns": 2, "kind": "phase", "phase": phase}, WorkerLine), exception]}


def judged(run=RUN, exit_code=1, **facts):
    """The verdict on a training of two ranks that ended with status 1, unless they are others."""
    return judge(end_facts(run=run, exit_code=exit_code, **facts))


def end_facts(**facts):
    """The supervisor's own facts and those of the records, told apart by their names."""
    end = {name: facts.pop(name) for name in TrainingEnd.__struct_fields__ if name in facts}
    return EndFacts(end=TrainingEnd(**end), **facts)


PEER_LOST = {"type": "RuntimeError", "message": "[gloo/transport/tcp/pair.cc:598] Connection closed by peer"}


@pytest.mark.parametrize(
    ("limit", "phase", "error", "output", "state", "words"),
    [
        ("RLIMIT_AS", "import", ("MemoryError", ""), "", "failed_to_start", "; RLIMIT_AS (ulimit -v) is 586 MiB"),
        ("RLIMIT_DATA", "forward", ("MemoryError", ""), "", "oom", "; RLIMIT_DATA (ulimit -d) is 586 MiB"),
        ("cgroup", "data", ("MemoryError", ""), "", "oom", "MemoryError (phase data)"),
        ("RLIMIT_AS", "import", ("ImportError", "no attribute"), "", "failed_to_start", "no attribute (phase import)"),
        (NPROC, "data", ("RuntimeError", "can't start new thread"), "", "failed_to_start", "of this user"),
        (NPROC, "data", ("RuntimeError", "code -2"), "pthread_create failed", "failed_to_start", "of this user"),
    ],
)
def test_f06_f08_an_end_that_a_limit_explains_names_the_limit(limit, phase, error, output, state, words):
    run = msgspec.structs.replace(ALONE, limits={limit: 600_000 << 10})
    verdict = judged(run, worker_lines=error_in(phase, error), output_tail=output)
    assert verdict.state == state
    assert verdict.reason.endswith(words)


CUDA_OOM = ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB")
THREAD_STACK = ("MemoryError", "can't start new thread: memory_limit leaves no room for its stack")


@pytest.mark.parametrize(
    ("phase", "error", "memory_limit", "state"),
    [
        ("forward", CUDA_OOM, None, "oom"),
        ("data", CUDA_OOM, None, "oom"),
        ("data", ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), None, "oom"),
        ("forward", ("torch.AcceleratorError", "CUDA error: an illegal memory access"), None, "failed_to_start"),
        ("data", ("TypeError", "unexpected keyword argument 'pin_memory_device'"), None, "failed_to_start"),
        ("data", ("MemoryError", ""), [1 << 30], "oom"),
        ("data", THREAD_STACK, [1 << 30], "oom"),
    ],
)
def test_an_error_that_no_inherited_limit_caused_names_none(phase, error, memory_limit, state):
    limits = dict.fromkeys(("cgroup", "RLIMIT_AS", "RLIMIT_DATA", NPROC), 600_000 << 10)
    run = msgspec.structs.replace(ALONE, limits=limits, memory_limit_bytes=memory_limit)
    verdict = judged(run, worker_lines=error_in(phase, error))
    assert verdict.state == state
    assert verdict.reason.endswith(f"(phase {phase})")


def test_kernel_oom_killer_took_a_rank_or_a_loader_and_names_the_limit_of_the_group_alone():
    worker_lines = {0: life("exception", **PEER_LOST), 1: life()}
    report = {"output_tail": TORCHRUN_REPORT.format(code=-9), "lost_ranks": (1,), "oom_kills": 1}
    verdict = judged(worker_lines=worker_lines, last_step={0: 7, 1: 7}, **report)
    assert verdict.state == "oom"
    assert verdict.reason == (
        "the kernel's out-of-memory killer ended the process: host memory was full (rank 1, after step 7, phase train)"
    )
    assert verdict.error.rank == 1
    message = "DataLoader worker (pid 77) is killed by signal: Killed. "
    worker_lines = {0: life("exception", type="RuntimeError", message=message), 1: life("finished")}
    assert judged(worker_lines=worker_lines, oom_kills=1).state == "oom"
    assert judged(worker_lines=worker_lines).state == "failed"
    limits = dict.fromkeys(("cgroup", "RLIMIT_AS"), 600_000 << 10)
    run = msgspec.structs.replace(ALONE, limits=limits)
    verdict = judged(run, -9, worker_lines={0: life()}, oom_kills=1)
    assert verdict.state == "oom"
    assert verdict.reason.endswith("(phase train); cgroup (memory.max) is 586 MiB")


@pytest.mark.parametrize(("oom_kills", "state"), [(0, "killed"), (1, "oom")])
def test_sigkill_of_the_only_process(oom_kills, state):
    assert judged(ALONE, -9, worker_lines={0: life()}, oom_kills=oom_kills).state == state


REPORT_OF_BOTH = TORCHRUN_REPORT.format(code=-9).replace("Root Cause", "Failures") + TORCHRUN_REPORT.replace(
    "rank      : 1 (local_rank: 1)", "rank      : 0 (local_rank: 0)"
).format(code=1)


@pytest.mark.parametrize("report", [TORCHRUN_REPORT.format(code=-9), REPORT_OF_BOTH])
def test_lost_rank_is_blamed_and_not_the_one_that_noticed_or_that_torchrun_saw_first(report):
    worker_lines = {0: life("exception", **PEER_LOST), 1: life()}
    verdict = judged(worker_lines=worker_lines, lost_ranks=(1,), output_tail=report)
    assert (verdict.state, verdict.reason) == ("failed", "rank 1 died of SIGKILL (phase train)")


def test_ranks_that_torchrun_ended_are_not_blamed_and_one_that_died_after_its_last_record_is():
    """Rank 1 raised; torchrun then ended rank 0, which had no time for a word."""
    error = {"type": "torch.distributed.DistBackendError", "message": "NCCL error: unhandled system error"}
    worker_lines = {0: life(), 1: life("exception", **error)}
    verdict = judged(worker_lines=worker_lines, lost_ranks=(0,), output_tail=TORCHRUN_REPORT.format(code=1))
    assert verdict.state == "failed"
    assert verdict.reason.startswith("torch.distributed.DistBackendError: NCCL error")
    assert verdict.error.rank == 1
    worker_lines = {rank: life("finished") for rank in (0, 1)}
    verdict = judged(worker_lines=worker_lines, output_tail=TORCHRUN_REPORT.format(code=-6))
    assert verdict.state == "failed"
    assert verdict.reason.startswith("the training exited with status 1: rank 1 died of SIGABRT (")


def test_memory_that_ran_out_outweighs_what_others_saw_first_and_a_later_stop_request():
    worker_lines = {
        0: life("exception", t_ns=10, **PEER_LOST),
        1: life("exception", t_ns=11, type="torch.OutOfMemoryError", message="CUDA out of memory. Tried 2 GiB"),
    }
    verdict = judged(worker_lines=worker_lines)
    assert (verdict.state, verdict.reason) == ("oom", "CUDA out of memory. Tried 2 GiB (rank 1, phase train)")
    worker_lines = {0: life("exception", t_ns=10, type="ValueError", message="bad"), 1: life("signal")}
    assert judged(worker_lines=worker_lines, stop_ns=20).state == "failed"
    assert judged(worker_lines=worker_lines, stop_ns=5).state == "stopped"


def test_sigterm_from_a_stranger_and_a_training_that_could_not_end_after_it_had_finished():
    verdict = judged(ALONE, 143, worker_lines={0: life("signal")})
    assert (verdict.state, "SIGTERM" in verdict.reason) == ("killed", True)
    worker_lines = {0: life("exception", t_ns=11, **PEER_LOST), 1: life("signal")}
    verdict = judged(worker_lines=worker_lines)
    assert (verdict.state, verdict.reason) == (
        "failed",
        "rank 1 was ended by SIGTERM, which trainfast-tui did not send (phase train)",
    )
    worker_lines = {0: life("exception", t_ns=9, type="ValueError", message="bad"), 1: life("signal")}
    assert judged(worker_lines=worker_lines).reason == "ValueError: bad (rank 0, phase train)"
    worker_lines = {0: life("finished"), 1: life("finished")}
    verdict = judged(exit_code=-15, worker_lines=worker_lines, torn_down_reason="every rank finished, but ...")
    assert (verdict.state, verdict.reason) == ("failed", "every rank finished, but ...")


@pytest.mark.parametrize(
    ("field", "asked", "ran"),
    [
        ("world_size", {}, {"world_size": 1}),
        ("strategy", {"strategy": "fsdp"}, {"wrapper": "DistributedDataParallel"}),
        ("optimizer", {"optimizer": "adamw-8bit"}, {"optimizer": "AdamW"}),
        ("optimizer", {"optimizer": "adamw-fused"}, {"optimizer": "AdamW", "optimizer_implementation": "foreach"}),
        ("precision", {"precision": "bf16"}, {"compute_dtype": "float32"}),
        ("checkpointing", {"checkpointing": "full"}, {"checkpointing": "off"}),
    ],
)
def test_what_ran_is_not_what_was_asked(field, asked, ran):
    run = RunFile(run_id="r", preset="p", world_size=2, knobs=asked, clock=RUN.clock)
    honest = {0: life("actual", "finished"), 1: life("actual", "finished")}
    assert judge(end_facts(run=run, exit_code=0, worker_lines=honest)).state == "finished"
    actual = ActualLine(t_ns=5, **ran)
    verdict = judge(end_facts(run=run, exit_code=0, worker_lines={0: honest[0], 1: [*life("finished"), actual]}))
    assert verdict.state == "failed"
    assert verdict.reason.startswith(field)
    assert "rank 1" in verdict.reason


def test_a_reason_is_one_short_line():
    assert (one_line("\n\n  first \nsecond"), len(one_line("x" * 1000)), one_line("")) == ("first", 300, "")


@pytest.mark.parametrize(
    ("fields", "state", "ending"),
    [
        ({"is_oom": True, "free_bytes": 1 << 28}, "oom", "(rank 0, phase train)"),
        ({"is_oom": False, "free_bytes": 37 << 30}, "failed", "37.0 GiB of the GPU's memory was free"),
        ({"is_oom": False}, "failed", "this can mean out of memory: how much was free is unknown"),
    ],
)
def test_an_error_that_hints_at_memory_is_judged_by_what_was_free(fields, state, ending):
    message = "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed a non-contiguous input"
    worker_lines = {0: life("exception", type="RuntimeError", message=message, **fields), 1: life()}
    verdict = judged(worker_lines=worker_lines)
    assert verdict.state == state
    assert verdict.reason.endswith(ending)


def script_of(steps, ranks=2):
    """A run of a script of the user's own."""
    asked = ScriptAsked(command=["torchrun", "train.py"], argv=["torchrun", "train.py"], steps=steps)
    return RunFile(run_id="r", preset="p", world_size=ranks, clock=ClockAnchor(monotonic_ns=0, wall_ns=0), script=asked)


def aborted():
    """A script of two ranks that took its ten steps, and whose rank 1 then aborted."""
    return end_facts(
        run=script_of(10),
        exit_code=1,
        worker_lines={0: life("finished"), 1: life("finished")},
        last_step={0: 10, 1: 10},
        output_tail=TORCHRUN_REPORT.format(code=-6),
    )


def test_script_whose_group_aborts_after_its_last_step_has_finished():
    ended = aborted()
    assert judge(ended) == Verdict("finished", "took the 10 steps asked for; then rank 1 died of SIGABRT")
    alone = replace(ended, run=script_of(10, ranks=1), end=TrainingEnd(exit_code=-6), output_tail="")
    assert judge(alone) == Verdict("finished", "took the 10 steps asked for; then its process died of SIGABRT")


@pytest.mark.parametrize("steps", [1, 1000])
def test_the_steps_taken_are_counted_in_words(steps):
    words = {1: "1 step", 1000: "1,000 steps"}[steps]
    alone = replace(aborted(), run=script_of(steps), last_step={0: steps, 1: steps})
    assert judge(alone).reason.startswith(f"took the {words} asked for; ")
    preset = end_facts(run=None, exit_code=0, worker_lines={0: life("finished")}, last_step={0: steps})
    assert judge(preset).reason == {1: "took 1 step", 1000: "took all 1,000 steps"}[steps]


@pytest.mark.parametrize(
    "changed",
    [
        {"run": script_of(None)},
        {"last_step": {0: 10, 1: 9}},
        {"worker_lines": {0: life("finished"), 1: life()}},
        {"output_tail": TORCHRUN_REPORT.format(code=3)},
    ],
)
def test_script_that_fails_in_any_other_way_has_failed(changed):
    assert judge(replace(aborted(), **changed)).state == "failed"

"""Scripts that a run cannot follow as usual: each has an outcome with a name, and a whole run directory."""

import signal

import pytest

from cli.command import until
from own_scripts.conftest import no_step, run_script, script, written
from trainfast_runner.records.run_directory import is_alive_after_grace


def test_a_script_that_ends_before_its_first_step_lists_the_ways(cli, tmp_path):
    done = cli("run", "--json", *written(tmp_path, "import torch\nprint(torch.ones(3).sum())\n"))
    reason = no_step(done)
    assert "torch was imported" in reason
    assert "trainfast_door.step()" in reason
    assert "--steps-from-log" in reason


def test_steps_may_be_counted_in_the_output(cli, tmp_path):
    lines = "import time\nfor n in range(8):\n    print(f'iter {n} loss {9 - n}.5', flush=True)\n    time.sleep(0.02)\n"
    result = run_script(cli, r"--steps-from-log=iter \d+ loss (?P<loss>\S+)", *written(tmp_path, lines))
    assert (result["steps"], result["loss"]["first"]) == ({"measured": 5, "warmup": 3}, 7.5)
    assert result["throughput"]["samples_per_s"]["median"] is None
    assert result["throughput"]["steps_per_s"]["median"] > 0


def test_steps_at_the_end_of_much_output_are_counted(cli, tmp_path):
    lines = "for n in range(8):\n    print('x' * (1 << 20))\n    print(f'iter {n}', end='\\n' if n < 7 else '')\n"
    result = run_script(cli, r"--steps-from-log=^iter \d", *written(tmp_path, lines))
    assert result["steps"] == {"measured": 5, "warmup": 3}


def test_loop_without_torch_optim_may_report_its_own_steps(cli, tmp_path):
    words = written(tmp_path, "import trainfast_door\nfor _ in range(6):\n    trainfast_door.step()\n")
    result = run_script(cli, "--samples-per-step=5", *words)
    script = result["script"]
    assert result["steps"] == {"measured": 3, "warmup": 3}
    assert (script["framework"], script["samples_from"]) == ("trainfast_door.step()", "--samples-per-step")


def test_script_that_forks_and_leaves_is_ended_with_its_children(cli, tmp_path):
    words = written(tmp_path, "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n")
    done = cli("run", "--json", *words)
    no_step(done)
    assert any("the command ended before 1 process that it had started" in trouble for trouble in done.json["troubles"])
    assert not is_alive_after_grace(cli.home / "runs" / done.json["run_id"])


def test_script_that_prints_much_keeps_its_steps_and_a_bounded_log(cli, tmp_path):
    lines = "import trainfast_door\nfor _ in range(8):\n    print('x' * (1 << 20) * 10)\n    trainfast_door.step()\n"
    result = run_script(cli, *written(tmp_path, lines))
    assert result["steps"]["measured"] == 5
    assert (cli.home / "runs" / result["run_id"] / "output.log").stat().st_size <= 64 << 20


def test_script_with_its_own_signal_handler_is_stopped(cli, tmp_path):
    lines = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nprint('ready', flush=True)\n"
        "while True:\n    time.sleep(0.05)\n"
    )
    started = cli.start("run", "--json", *written(tmp_path, lines))
    started.until_printed("is starting")
    log = until(lambda: next(iter(cli.home.glob("runs/*/output.log")), None), "the run's log")
    until(lambda: "ready" in log.read_text(), "the script's handler")
    started.signal(signal.SIGINT)
    done = started.end()
    assert (done.code, done.json["state"]) == (130, "stopped")


@pytest.mark.ci
@pytest.mark.long
def test_script_that_catches_the_clean_stop_is_ended(cli):
    result = run_script(cli, "--steps=5", *script("plain_torch.py", "--steps=1000000", "--catch-exit"))
    assert result["reason"] == "took the 5 steps asked for; the script caught SystemExit and was ended"
    assert result["steps"] == {"measured": 2, "warmup": 3}


@pytest.mark.long
@pytest.mark.ci
def test_out_of_memory_before_the_first_step_names_its_phase(cli):
    result = run_script(cli, *script("plain_torch.py", "--huge"), code=3)
    assert (result["state"], result["error"]["phase"], result["script"]["exit_code"]) == ("oom", "forward", 1)
    assert "forward" in cli("runs", "show", "last").out


@pytest.mark.long
def test_a_minute_without_a_step_lists_the_ways(cli, tmp_path):
    go = tmp_path / "go"
    lines = f"import os, time, torch\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.05)\n"
    started = cli.start("run", "--json", *written(tmp_path, lines))
    started.until_printed("no optimizer step seen in 60 s")
    go.touch()
    done = started.end()
    no_step(done)
    assert "trainfast_door.step()" in done.err


def test_hooks_note_their_own_errors_and_leave_the_script_alone(cli, tmp_path):
    lines = (
        "import torch\nclass Odd(torch.optim.SGD):\n    def step(self):\n        self.param_groups = None\n"
        "Odd([torch.ones(2, requires_grad=True)], lr=0.1).step()\nprint('went on')\n"
    )
    done = cli("run", "--json", *written(tmp_path, lines))
    assert (cli.home / "runs" / done.json["run_id"] / "output.log").read_text() == "went on\n"
    assert any("the hooks in the script: " in trouble for trouble in done.json["troubles"])
    no_step(done)


def test_framework_that_the_script_looks_up_before_it_imports_it_is_followed(cli, tmp_path):
    engine = tmp_path / "deepspeed" / "runtime" / "engine.py"
    engine.parent.mkdir(parents=True)
    for file in (engine.parent.parent / "__init__.py", engine.parent / "__init__.py"):
        file.write_text("")
    engine.write_text(
        "class DeepSpeedEngine:\n    global_steps = 0\n    def step(self):\n        self.global_steps += 1\n"
        "    def zero_optimization_stage(self):\n        return 1\n"
        "    train_micro_batch_size_per_gpu = gradient_accumulation_steps = lambda self: 2\n"
    )
    lines = (
        "import importlib.util, torch\nfor _ in range(2):\n    importlib.util.find_spec('deepspeed.runtime.engine')\n"
        "from deepspeed.runtime.engine import DeepSpeedEngine\nengine = DeepSpeedEngine()\n"
        "for _ in range(6):\n    engine.step()\n"
    )
    result = run_script(cli, *written(tmp_path, lines))
    assert result["steps"] == {"measured": 3, "warmup": 3}
    assert (result["script"]["framework"], result["actual"]["zero_stage"]) == ("DeepSpeed", 1)

"""`run -- COMMAND`: six scripts as people write them, unchanged, and what a run says of each."""

import json
import os
import re
import statistics
import subprocess
import sys
import zipfile

import pytest

from own_scripts.conftest import PYTHON, SCRIPTS, TORCHRUN, counted, run_script, samples_of_steps, script


def printed(cli, result):
    """The output of the script."""
    return (cli.home / "runs" / result["run_id"] / "output.log").read_text()


def steps_of(cli, result):
    """The records of rank 0's steps, warm-up included."""
    lines = (cli.home / "runs" / result["run_id"] / "steps.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_plain_torch_is_a_run_like_any_other(cli, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    flags = ("--steps=30", f"--chdir={elsewhere}", "--handle-signals", f"--save={tmp_path / 'model.pt'}")
    result = run_script(cli, *script("plain_torch.py", *flags))
    assert (result["state"], result["reason"], result["preset"]) == ("finished", "took 30 steps", "plain_torch.py")
    assert result["steps"] == {"measured": 27, "warmup": 3}
    own = re.search(r"took 30 steps, ms of each but the first: ([\d. ]+)", printed(cli, result))
    ours = [step["step_ms"] for step in steps_of(cli, result)]
    # Step by step: what else the machine does lengthens both clocks' steps alike.
    off = [abs(one - float(other)) for one, other in zip(ours[1:], own[1].split(), strict=True)]
    assert statistics.median(off) <= max(0.1, 0.02 * result["step_ms"]["p50"])
    assert result["step_ms"]["p50"] == pytest.approx(statistics.median(ours[3:]), abs=0.01)
    assert result["throughput"]["samples_per_s"]["median"] > 0
    assert result["throughput"]["steps_per_s"]["median"] == pytest.approx(1e3 / result["step_ms"]["p50"], rel=0.01)
    assert result["step_ms"]["data"] > 0
    assert result["step_ms"]["forward"] > 0
    assert result["step_ms"]["optimizer"] > 0
    assert result["step_ms"]["backward"] is None
    assert result["step_ms"]["other"] > 0
    assert result["memory"]["peak_allocated_bytes"] > 0
    assert (result["cpu"]["allocator"], result["actual"]["optimizer"]) == ("ordinary allocator", "AdamW")
    assert result["script"]["exit_code"] == 0
    assert (result["script"]["framework"], result["script"]["samples_from"]) == ("torch", "DataLoader")
    assert {"optimizer step hook", "DataLoader", "model forward hook"} == set(result["script"]["hooks"])
    assert {"loss", "tokens", "backward_ms"} == set(result["script"]["unknown"])
    assert result["troubles"] == []
    assert list(elsewhere.iterdir()) == []
    with zipfile.ZipFile(tmp_path / "model.pt") as saved:
        pickled = saved.read(next(name for name in saved.namelist() if name.endswith("data.pkl")))
    assert b"trainfast" not in pickled, "the saved model loads where the hooks are not"
    text = cli("runs", "show", "last").out
    assert "plain_torch.py" in text
    assert "samples by DataLoader" in text
    assert cli("runs", "list", "--json").json["runs"][0]["run_id"] == result["run_id"]
    assert (cli("attach", "last").code, cli("runs", "compare", "last", result["run_id"]).code) == (0, 0)
    assert cli("report", "last", "-o", str(tmp_path / "report.md")).code == 0
    assert "plain_torch.py" in (tmp_path / "report.md").read_text()
    assert cli("export", "last", "--to", "command").out.splitlines()[-1].startswith(PYTHON)
    assert "ran a script of your own" in cli("export", "last", "--to", "deepspeed").refused()


def test_the_share_that_a_scripts_adapters_train_is_shown(cli):
    result = run_script(cli, *script("with_peft.py"))
    actual = result["actual"]
    assert (actual["method"], actual["trainable_parameters"]) == ("lora", 2 * 2 * 2 * 64 * 4)
    assert f"trained {actual['parameters']}" in printed(cli, result)
    share = actual["trainable_parameters"] / actual["parameters"]
    words = f"lora: {100 * share:.2f} % of {actual['parameters']:,} parameters trained"
    assert words in " ".join(cli("runs", "show", "last").out.split())


@pytest.mark.ci
@pytest.mark.long
def test_hard_coded_trainer(cli):
    result = run_script(cli, *script("hard_coded_trainer.py"))
    assert (counted(result), result["state"]) == (10, "finished")
    assert "took 10 steps" in printed(cli, result)
    assert (result["script"]["framework"], result["script"]["samples_from"]) == ("HF Trainer", "framework")
    assert result["loss"]["first"] > 0, "the Trainer logs the loss of every step"
    steps = (cli.home / "runs" / result["run_id"] / "steps.jsonl").read_text().splitlines()
    assert {json.loads(line)["samples"] for line in steps} == {8}
    assert all(json.loads(line)["loss"] for line in steps)


@pytest.mark.long
def test_hf_argument_parser_stops_after_the_steps_asked_for(cli, tmp_path):
    flags = (f"--output_dir={tmp_path / 'out'}", "--per_device_train_batch_size=2", "--use_cpu=true")
    flags += ("--report_to=none", "--save_strategy=no", "--num_train_epochs=1")
    result = run_script(cli, "--steps=7", *script("hf_argument_parser.py", *flags))
    assert counted(result) == 7
    assert "took 7 steps" in printed(cli, result), "the Trainer stopped by itself, and the script went on"
    assert result["script"]["framework"] == "HF Trainer"


@pytest.mark.long
def test_accelerate_counts_optimizer_steps_under_accumulation(cli):
    result = run_script(cli, *script("with_accelerate.py"))
    assert counted(result) == 12
    assert "took 12 steps" in printed(cli, result)
    assert result["script"]["framework"] == "accelerate"
    assert result["step_ms"]["optimizer"] > 0, "accelerate passes a closure that is None"
    assert samples_of_steps(cli, result) == {8}, "accelerate draws one batch ahead"


@pytest.mark.long
def test_two_ranks_of_ddp_under_torchrun(cli):
    result = run_script(cli, "--", *TORCHRUN, str(SCRIPTS / "nanogpt_ddp.py"))
    assert counted(result) == 10
    assert all(f"rank {rank} took 10 steps" in printed(cli, result) for rank in (0, 1))
    folder = cli.home / "runs" / result["run_id"]
    assert len((folder / "steps.rank1.jsonl").read_text().splitlines()) == 10
    assert (result["actual"]["wrapper"], result["actual"]["world_size"]) == ("DistributedDataParallel", 2)
    assert result["script"]["samples_from"] == "forward input"
    assert [samples_of_steps(cli, result, rank) for rank in (0, 1)] == [{8}, {8}], "two micro-batches of four"


def test_script_sees_only_our_folder_and_the_run(cli, tmp_path):
    (tmp_path / "beside.py").write_text("here = True\n")
    asking = tmp_path / "asks.py"
    asking.write_text(
        "import beside, json, os, sys\n"
        "print(json.dumps([dict(os.environ), sys.path, sys.flags.safe_path, os.getcwd()]))\n"
    )
    environment = {**cli.environment, "PYTHONPATH": "/somewhere", "ACCELERATE_MIXED_PRECISION": "no"}
    bare = subprocess.run([sys.executable, str(asking)], env=environment, capture_output=True, text=True, check=True)
    result = cli(
        "run", "--json", "--", sys.executable, str(asking), PYTHONPATH="/somewhere", ACCELERATE_MIXED_PRECISION="no"
    )
    before, path_before, safe_before, folder_before = json.loads(bare.stdout)
    after, path_after, safe_after, folder_after = json.loads(printed(cli, result.json))
    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    assert changed == {"PYTHONPATH", "TRAINFAST_RUN"}
    assert after["PYTHONPATH"].startswith(f"/somewhere{os.pathsep}")
    assert [place for place in path_after if place not in path_before] == after["PYTHONPATH"].split(os.pathsep)[1:]
    assert (safe_before, folder_before) == (safe_after, folder_after)
    asked = cli("run", "--json", "--set", "precision=bf16", "--", sys.executable, str(asking), PYTHONPATH="/somewhere")
    with_set = json.loads(printed(cli, asked.json))[0]
    changed = {name for name in {*before, *with_set} if before.get(name) != with_set.get(name)}
    assert changed == {"PYTHONPATH", "TRAINFAST_RUN", "ACCELERATE_MIXED_PRECISION", "PL_TRAINER_PRECISION"}

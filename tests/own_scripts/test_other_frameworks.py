"""Scripts of frameworks that the tests' own environment need not have: Lightning, Hydra and DeepSpeed."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from own_scripts.conftest import SCRIPTS, TORCHRUN, counted, preset_of, run_script, samples_of_steps, script

# Both frameworks write into the current folder.
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("work")]
lightning = pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")
hydra = pytest.mark.skipif(find_spec("hydra") is None, reason="Hydra is not installed")
deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


DEEPSPEED = (str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2")


def samples_a_step(result):
    """The median samples of a step, by both rates."""
    rates = result["throughput"]
    return float(rates["samples_per_s"]["median"] / rates["steps_per_s"]["median"])


def counted_by_rank(cli, result):
    """All steps of each rank, rank 0's first."""
    folder = cli.home / "runs" / result["run_id"]
    return [len(file.read_text().splitlines()) for file in sorted(folder.glob("steps*.jsonl"))]


def trials(cli, *words):
    """The rows of trials with two batches of the script behind these words."""
    preset_of(cli, *words)
    done = cli("bench", "mine", "--vary", "batch_size=4,8", "--set", "steps=6", "--json")
    assert done.code == 0, done.err
    return done.json["rows"]


@lightning
def test_lightning_is_counted_and_takes_knobs_by_its_environment(cli):
    asked = ("--set", "precision=bf16", "--set", "grad_accum=3", "--set", "grad_clip=0.5", "--set", "workers=1")
    result = run_script(cli, *asked, *script("lightning_flags.py", "--batch-size=8"))
    assert counted(result) == 10
    assert (result["script"]["framework"], result["script"]["overridden"]) == ("Lightning", [])
    assert result["actual"]["compute_dtype"] == "bfloat16"
    assert result["loss"]["first"] > 0
    assert samples_a_step(result) == pytest.approx(24, rel=0.1)
    assert result["troubles"] == []


@lightning
def test_argument_of_lightning_in_the_script_wins_and_is_named(cli):
    result = run_script(cli, "--set", "grad_accum=4", *script("with_lightning.py"))
    assert counted(result) == 10
    assert result["script"]["overridden"] == [{"knob": "grad_accum", "asked": 4, "ran": 2, "by": "Lightning"}]


@lightning
def test_lightning_stops_after_the_steps_asked_for_and_the_script_goes_on(cli):
    result = run_script(cli, "--steps=7", *script("lightning_flags.py", "--max-steps=1000"))
    assert counted(result) == 7
    log = cli.home / "runs" / result["run_id"] / "output.log"
    assert "took 7 steps" in log.read_text()


@lightning
def test_ranks_that_lightning_starts_itself_are_all_recorded(cli):
    result = run_script(cli, *script("lightning_flags.py", "--ranks=2"))
    assert counted_by_rank(cli, result) == [10, 10]
    assert result["script"]["framework"] == "Lightning"
    assert (result["actual"]["wrapper"], result["actual"]["world_size"]) == ("DistributedDataParallel", 2)
    assert [samples_of_steps(cli, result, rank) for rank in (0, 1)] == [{4}, {4}]
    assert result["troubles"] == []


@lightning
def test_trials_of_lightning_end_on_all_ranks_at_the_same_step(cli, work):
    rows = trials(cli, *script("lightning_flags.py", "--max-steps=1000", "--ranks=2"))
    assert [row["state"] for row in rows] == ["finished", "finished"]
    assert [counted_by_rank(cli, row["result"]) for row in rows] == [[6, 6], [6, 6]]
    assert list(work.iterdir()) == []


@deepspeed
@pytest.mark.parametrize("launcher", [TORCHRUN, DEEPSPEED], ids=["torchrun", "deepspeed"])
def test_both_ranks_of_deepspeed_are_recorded_whatever_starts_them(cli, monkeypatch, launcher):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    result = run_script(cli, "--", *launcher, str(SCRIPTS / "with_deepspeed.py"))
    assert counted_by_rank(cli, result) == [8, 8]
    assert (cli.home / "runs" / result["run_id"] / "output.log").read_text().count("took 8 steps") == 2
    assert result["script"]["framework"] == "DeepSpeed"
    assert (result["actual"]["wrapper"], result["actual"]["world_size"]) == ("DeepSpeedEngine", 2)
    assert (result["actual"]["zero_stage"], result["script"]["samples_from"]) == (1, "framework")
    assert [samples_of_steps(cli, result, rank) for rank in (0, 1)] == [{8}, {8}], "two micro-batches of four"


@deepspeed
def test_trials_of_deepspeed_end_on_both_ranks_at_the_same_step_and_save_nothing(cli, monkeypatch, work):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    words = (str(SCRIPTS / "with_deepspeed.py"), "--steps=1000", "--save=checkpoints")
    rows = trials(cli, "--", *TORCHRUN, *words)
    assert [row["state"] for row in rows] == ["finished", "finished"]
    assert [counted_by_rank(cli, row["result"]) for row in rows] == [[6, 6], [6, 6]]
    assert [samples_of_steps(cli, row["result"], rank=1) for row in rows] == [{8}, {16}]
    assert all("deepspeed: DeepSpeedEngine.save_checkpoint" in row["result"]["script"]["suppressed"] for row in rows)
    assert list(work.iterdir()) == []


@hydra
def test_hydra_script_runs_as_it_is_and_with_its_overrides(cli):
    result = run_script(cli, *script("hydra_training.py", "batch_size=8"))
    assert counted(result) == 12
    assert "took 12 steps" in (cli.home / "runs" / result["run_id"] / "output.log").read_text()
    assert (result["script"]["framework"], result["state"]) == ("torch", "finished")
    assert samples_a_step(result) == pytest.approx(8, rel=0.1)


@hydra
def test_trials_of_a_hydra_script_take_its_overrides(cli):
    rows = trials(cli, *script("hydra_training.py", "max_steps=1000"))
    assert [row["state"] for row in rows] == ["finished", "finished"]
    assert [counted(row["result"]) for row in rows] == [6, 6]
    assert all(row["result"]["script"]["overridden"] == [] for row in rows)

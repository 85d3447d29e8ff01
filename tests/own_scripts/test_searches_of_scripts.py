"""Batch searches of scripts of one's own: trials that leave nothing behind, the largest batch, and searches killed."""

import random
import shutil
import signal
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest

from cli.command import Started, until
from own_scripts.conftest import LINEAR, PYTHON, SCRIPTS, files_below, preset_of, script, written
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import read_all
from trainfast_runner.records.run_directory import is_alive_after_grace
from trainfast_runner.records.run_lines import Step
from trainfast_runner.running import launch
from trainfast_runner.running.planning import plan_script
from trainfast_runner.search.batch_conductor import BatchConductor, open_batch, plan_script_batch
from trainfast_runner.search.batch_journal import BatchSnapshot, ConfirmationRun, Probe
from trainfast_runner.search.best_journal import BestJournal, ColdRun, Trial
from trainfast_runner.search.conductor import SearchCaller, conduct, end_if_live
from trainfast_runner.search.journal import Conducted, JournalWriter
from trainfast_runner.search.searches import SearchOptions
from trainfast_runner.settings import script_preset
from trainfast_runner.worker.shared.words import PROBE


def searched(cli, *options):
    """The answer of a batch search of `mine`."""
    done = cli("search", "max-batch", "mine", "--json", "--proof-steps=5", *options)
    assert done.code == 0, done.err
    return done.json


@pytest.mark.long
def test_largest_batch_of_an_argparse_script_is_confirmed_and_a_larger_one_does_not_fit(cli, work):
    preset_of(cli, *script("wide_argparse.py"))
    answer = searched(cli, "--set", "memory_limit=256MiB")
    assert answer["max_batch"] > 100
    assert answer["too_large"] > answer["max_batch"], "a larger size ran out of memory"
    assert answer["proofs"][-1]["state"] == "finished"
    assert 0 <= answer["headroom_bytes"] < 64 << 20
    assert files_below(work) == [], "no trial has saved anything"
    listed = {run["run_id"] for run in cli("runs", "list", "--json").json["runs"]}
    assert listed == {proof["run_id"] for proof in answer["proofs"]}, "trials are listed with --probes alone"
    run_ids = [answer["proof_run_id"], *(probe["run_id"] for probe in answer["probes"])]
    for run_id in run_ids:
        shown = cli("runs", "show", run_id, "--json").json
        assert {"experiment trackers", "torch: save"} >= set(shown["script"]["suppressed"])
        assert not (cli.home / "runs" / run_id / "sandbox").exists()
    assert "torch: save" in cli("runs", "show", answer["proof_run_id"]).out


@pytest.mark.long
def test_trial_of_a_script_that_saves_every_step_leaves_no_file(cli, tmp_path, work):
    lines = (
        # Both import torch, with which the hooks come.
        "from safetensors.torch import save_file\nfrom accelerate import Accelerator\n"
        f"import tempfile\n{LINEAR}accelerator = Accelerator(cpu=True)\n"
        "model, optimizer, data = accelerator.prepare(model, optimizer, loader(400))\nfor (rows,) in data:\n"
        "    accelerator.backward(model(rows).mean())\n    optimizer.step()\n    accelerator.save_state('state')\n"
        "    save_file(dict(model.state_dict()), 'weights.safetensors')\n    torch.save(model, 'model.pt')\n"
        "    tempfile.NamedTemporaryFile(delete=False).write(b'x')\n"
    )
    preset_of(cli, *written(tmp_path, lines))
    done = cli("bench", "mine", "--vary", "batch_size=4", "--set", "steps=6", "--json")
    assert done.code == 0, done.err
    row = done.json["rows"][0]
    assert {"torch: save", "safetensors: save_file", "accelerate: Accelerator.save_state"} <= set(
        row["result"]["script"]["suppressed"]
    )
    assert files_below(work) == []
    assert not (cli.home / "runs" / row["result"]["run_id"] / "sandbox").exists()


@pytest.mark.long
def test_trial_of_a_script_that_uploads_by_the_functions_of_the_hub_uploads_nothing(cli, tmp_path):
    lines = (
        # Nothing listens there: an upload fails.
        "import os\nos.environ['HF_ENDPOINT'] = 'http://127.0.0.1:9'\n"
        # Before torch, with which the hooks come, and after it.
        "from huggingface_hub import upload_folder\nfrom huggingface_hub.hf_api import create_commit\n"
        f"{LINEAR}import huggingface_hub\n"
        "begin = {'repo_id': 'me/mine', 'token': 'hf_x'}\n"
        "upload_folder(folder_path=os.path.dirname(__file__), **begin)\n"
        "create_commit(operations=[], commit_message='begin', **begin)\n"
        "huggingface_hub.upload_file(path_or_fileobj=b'x', path_in_repo='x', **begin)\n"
        "for _ in range(100):\n    step(torch.ones(args.batch_size, 4))\n"
    )
    preset_of(cli, *written(tmp_path, lines))
    row = cli("bench", "mine", "--vary", "batch_size=4", "--set", "steps=6", "--json").json["rows"][0]
    assert row["state"] == "finished", row["reason"]
    functions = ("upload_folder", "create_commit", "upload_file")
    assert {f"huggingface_hub: {name}" for name in functions} <= set(row["result"]["script"]["suppressed"])


@pytest.mark.long
def test_batch_that_the_script_overrides_is_incompatible(cli, tmp_path):
    preset_of(cli, *written(tmp_path, f"{LINEAR}for (rows,) in loader(99, size=3):\n    step(rows)\n"))
    done = cli("search", "max-batch", "mine", "--set", "memory_limit=256MiB")
    assert done.code == 4
    assert "batch_size=4 is incompatible with the script: 3 ran, by torch" in done.out
    rows = cli("bench", "mine", "--vary", "batch_size=3,8", "--set", "steps=6", "--json").json["rows"]
    assert [row["state"] for row in rows] == ["refused", "finished", "refused"]


@pytest.mark.long
def test_search_ends_at_the_batch_that_the_data_fills(cli, tmp_path):
    lines = f"{LINEAR}for epoch in range(100):\n    for (rows,) in loader(99):\n        step(rows)\n"
    preset_of(cli, *written(tmp_path, lines))
    assert searched(cli, "--set", "memory_limit=256MiB")["max_batch"] == 99


def test_probe_that_a_killed_search_had_not_recorded_is_ended(cli):
    preset_of(cli, *script("plain_torch.py", "--pause=0.2", "--steps=1000"))
    home, options = Home(cli.home), SearchOptions()
    preset = script_preset.load(cli.presets / "mine.toml")
    batch_plan = plan_script_batch(preset, (), None)
    directory = open_batch(batch_plan, home, options)
    # The conductor that was killed wrote this line before it started anything.
    journal = JournalWriter(directory)
    journal.write(Conducted(pid=1, start_ticks=1, boot_id="killed"))
    journal.close()
    left = plan_script((), preset=preset, steps=1000, trial=True)
    probe = launch.start(replace(left, role=PROBE, search_id=directory.name), home)
    try:
        conduct(BatchConductor, directory, batch_plan, home, options, SearchCaller(is_cancelled=lambda: True))
        assert not is_alive_after_grace(probe)
    finally:
        end_if_live(probe)


@pytest.mark.long
def test_largest_batch_of_a_hard_coded_trainer(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    preset_of(cli, *script("saving_trainer.py"))
    answer = searched(cli, "--set", "memory_limit=192MiB")
    assert answer["max_batch"] > 4
    assert answer["too_large"] > answer["max_batch"]
    shown = cli("runs", "show", answer["proof_run_id"], "--json").json
    assert {"output_dir=out", "save_strategy=steps"} <= set(shown["script"]["suppressed"])
    assert files_below(tmp_path / "out") == [], "the script saves every step, and its model at the end"


@pytest.mark.long
@pytest.mark.ci
def test_batch_that_a_search_confirmed_fits_in_trials_under_the_same_limit(cli, tmp_path):
    lines = (
        "import argparse, torch\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--batch-size', type=int, default=64)\nargs = parser.parse_args()\n"
        "rows = torch.utils.data.TensorDataset(torch.randn(60000, 8))\n"
        "layers = [torch.nn.Linear(8, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU()]\n"
        "model = torch.nn.Sequential(*layers)\noptimizer = torch.optim.AdamW(model.parameters())\n"
        "for _ in range(20):\n"
        "    for (x,) in torch.utils.data.DataLoader(rows, args.batch_size, shuffle=True):\n"
        "        model(x).mean().backward()\n        optimizer.step()\n        optimizer.zero_grad()\n"
    )
    preset_of(cli, *written(tmp_path, lines))
    answer = searched(cli, "--set", "memory_limit=96MiB")
    assert answer["measured_under"] is not None, "strict malloc thresholds"
    batch = answer["max_batch"]
    vary = ("--vary", f"batch_size={batch}", "--set", "memory_limit=96MiB", "--set", "steps=24", "--repeat=2")
    for row in cli("bench", "mine", *vary, "--json").json["rows"]:
        assert row["state"] == "finished", row["reason"]
        steps = read_all(cli.home / "runs" / row["result"]["run_id"] / "steps.jsonl", Step)[0]
        measured = [step.step for step in steps if step.peak_allocated_bytes is not None]
        assert measured == [1, 2], "later steps are timed, without the limit and its malloc thresholds"


pytestmark = pytest.mark.long
KILLS = 6
MAX_LINES = 30
"""A run of a few steps records about as many lines."""


def processes_of(cli):
    """Every process that works for this home: commands, supervisors, trainings."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            if process.environ().get("TRAINFAST_HOME") == str(cli.home):
                found.append(process)
    return found


def lines_recorded(cli):
    """The lines of the journal and of all runs: a clock that goes as the search does."""
    files = [*cli.home.glob("searches/*/*.jsonl"), *cli.home.glob("runs/*/*.jsonl")]
    return sum(file.read_bytes().count(b"\n") for file in files)


def kill_everything(cli):
    """Send SIGKILL to every process of the home, until none is left."""

    def is_over():
        left = processes_of(cli)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return not left

    until(is_over, "the end of every process")


def killed(cli, command, lines, *, alone):
    """Start the command, and kill it when so many more lines are recorded: `alone`, or all that it has started too."""
    moment = lines_recorded(cli) + lines
    started = Started(cli, command)
    until(lambda: lines_recorded(cli) >= moment or started.process.poll() is not None, "the moment")
    assert started.process.poll() is None, f"it ended before it was killed:\n{started.err}"
    # The command first: it sees nothing of what becomes of its run.
    started.signal(signal.SIGKILL)
    if not alone:
        kill_everything(cli)
    started.end()


def answered_after_kills(cli, command, work):
    """The answer of a search of a script in `work` that was killed again and again, and the search's only directory."""
    shutil.copy(SCRIPTS / "wide_argparse.py", work / "train.py")
    preset_of(cli, "--", PYTHON, "train.py")
    moments = random.Random(13)
    for _ in range(KILLS):
        killed(cli, command, moments.randint(1, MAX_LINES), alone=moments.random() < 0.3)
    done = cli(*command)
    assert done.code == 0, done.err
    until(lambda: not processes_of(cli), "the last supervisor to end behind its result")
    assert files_below(work) == [work / "train.py"], "a trial has written into the script's folder"
    cli("runs", "list", "--probes")
    assert list(cli.home.glob("runs/*/sandbox")) == [], "a killed trial has left its files"
    (directory,) = (cli.home / "searches").iterdir()
    return done, directory


def test_batch_search_of_a_killed_script_tries_no_size_twice(cli, work):
    command = ("search", "max-batch", "mine", "--json", "--proof-steps=5", "--set", "memory_limit=256MiB")
    done, directory = answered_after_kills(cli, command, work)
    assert done.json["max_batch"] > 100
    assert done.json["too_large"] > done.json["max_batch"]
    lines = BatchSnapshot.read(directory).lines
    tried = [line.batch_size for line in lines if isinstance(line, Probe)]
    assert len(tried) == len(set(tried)), "a size was measured twice"
    confirmed = [line.run_id for line in lines if isinstance(line, ConfirmationRun)]
    assert len(confirmed) == len(set(confirmed)), "a run was recorded twice"


def test_best_fit_of_a_killed_script_goes_on_and_confirms_its_answer(cli, work):
    command = ("search", "best", "mine", "--json", "--budget=300s", "--vary=batch_size=2,4,8")
    done, directory = answered_after_kills(cli, command, work)
    assert len(done.json["best"]["run_ids"]) >= 2
    lines = BestJournal.read(directory).lines
    measured = [line.candidate_number for line in lines if isinstance(line, Trial) and line.outcome == "measured"]
    assert len(measured) == len(set(measured)), "a setting was measured twice"
    cold_runs = [line.run_id for line in lines if isinstance(line, ColdRun)]
    assert len(cold_runs) == len(set(cold_runs)), "a run was recorded twice"

"""Best-fit searches of scripts of one's own: each trial is a run by itself that leaves nothing behind."""

from dataclasses import replace

import pytest

from own_scripts.conftest import PYTHON, files_below, preset_of, script, written
from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.running import launch
from trainfast_runner.running.planning import plan_script
from trainfast_runner.search.best.question import open_best, plan_script_best
from trainfast_runner.search.best_journal import BestRequest
from trainfast_runner.search.conductor import end_run
from trainfast_runner.search.searches import SearchOptions
from trainfast_runner.settings import script_preset
from trainfast_runner.worker.shared.words import TRIAL

CLAMPED = (
    "import argparse, torch\nparser = argparse.ArgumentParser()\n"
    "parser.add_argument('--batch-size', type=int, default=2)\nparser.add_argument('--accum', type=int, default=1)\n"
    "asked = parser.parse_args()\n"
    "model = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "data = torch.utils.data.TensorDataset(torch.ones(9999, 4))\n"
    "for (rows,) in torch.utils.data.DataLoader(data, batch_size=min(3, asked.batch_size)):\n"
    "    model(rows).mean().backward()\n    optimizer.step()\n"
)
"""A script that takes no more than three samples at once, and ignores --accum."""
TAKES_FILES = CLAMPED.replace("asked =", "parser.add_argument('--config')\nparser.add_argument('--data')\nasked =")
HUNGRY = (
    "import argparse, torch\nparser = argparse.ArgumentParser()\n"
    "parser.add_argument('--batch-size', type=int, default=16)\nparser.add_argument('--accum', type=int, default=8)\n"
    "asked = parser.parse_args()\ntorch.set_num_threads(1)\n"
    "model = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "data = torch.utils.data.TensorDataset(torch.ones(1 << 17, 4))\n"
    "for place, (rows,) in enumerate(torch.utils.data.DataLoader(data, batch_size=asked.batch_size), start=1):\n"
    "    wide = rows.repeat(1, 1 << 16)\n    (model(rows).mean() + wide[0, 0]).backward()\n"
    "    if place % asked.accum == 0:\n        optimizer.step()\n        torch.save(model.state_dict(), 'model.pt')\n"
)
"""A script that takes a mebibyte a sample, and saves every step."""


def searched(cli, *options):
    """The answer of a best-fit search of `mine`."""
    # Enough for each candidate on a busy machine, and for short runs that confirm.
    done = cli("search", "best", "mine", "--json", "--budget=200s", *options)
    assert done.code == 0, f"{done.out}\n{done.err}"
    return done.json


def verdicts(answer):
    """Verdict and reason by batch size."""
    return {one["knobs"]["batch_size"]: (one["verdict"], one["reason"]) for one in answer["verdicts"]}


@pytest.mark.long
def test_fastest_batch_of_a_script_under_a_limit(cli, tmp_path, work):
    preset_of(cli, *written(tmp_path, HUNGRY))
    limited = ("--set", "memory_limit=224MiB")
    answer = searched(cli, "--vary=batch_size=16,32,256", "--global-batch=256", *limited)
    assert answer["global_batch"] == 256
    assert [one["knobs"] for one in answer["verdicts"]] == [
        {"batch_size": 16, "grad_accum": 16},
        {"batch_size": 32, "grad_accum": 8},
        {"batch_size": 256, "grad_accum": 1},
    ]
    assert verdicts(answer)[256][0] == "too_large", verdicts(answer)
    assert verdicts(answer)[16][0] == verdicts(answer)[32][0] == "measured"
    assert len(answer["best"]["run_ids"]) >= 2
    assert len(answer["baseline"]["run_ids"]) >= 2
    assert not any(trial["warm"] for trial in answer["trials"])
    assert files_below(work) == [], "no trial has saved anything"
    listed = {run["run_id"] for run in cli("runs", "list", "--json").json["runs"]}
    assert listed == {race["run_id"] for race in answer["races"]}, "trials are listed with --probes alone"
    assert cli("runs", "show", "last", "--json").json["run_id"] in listed
    trial = answer["trials"][0]["run_id"]
    assert "a search's trial of a setting" in cli("runs", "show", trial).out
    assert trial in {run["run_id"] for run in cli("runs", "list", "--probes", "--json").json["runs"]}
    assert {race["role"] for race in answer["races"]} <= {"race", "confirm"}, "every trial was under the limit already"


@pytest.mark.long
def test_setting_that_the_script_overrides_is_incompatible(cli, tmp_path):
    preset_of(cli, *written(tmp_path, CLAMPED))
    done = verdicts(searched(cli, "--vary=batch_size=2,4"))
    assert done[4] == ("incompatible", "batch_size=4 is incompatible with the script: 3 ran, by torch")
    assert done[2][0] == "measured"


@pytest.mark.long
def test_flag_that_the_script_ignores_shows_in_the_samples_of_a_step(cli, tmp_path):
    preset_of(cli, *written(tmp_path, CLAMPED))
    done = verdicts(searched(cli, "--vary=batch_size=1,2", "--global-batch=2"))
    assert done[1] == ("incompatible", "samples a step: 1 ran, 2 were asked for")


@pytest.mark.long
def test_fastest_settings_of_a_hard_coded_trainer(cli, work):
    preset_of(cli, *script("saving_trainer.py"))
    answer = searched(cli, "--vary=batch_size=2,4", "--set", "memory_limit=512MiB", "--budget=400s")
    assert {verdict for verdict, _ in verdicts(answer).values()} == {"measured"}
    assert files_below(work / "out") == [], "the script saves every step"


def test_knobs_with_a_named_value_are_varied_at_one_global_batch(cli):
    preset_of(cli, *script("wide_argparse.py"))
    found = cli("search", "best", "mine", "--dry-run", "--json").json
    assert (found["vary"]["batch_size"], found["global_batch"]) == ([1, 2, 4], 4)
    assert found["legal"] == found["candidates"] == 3 * len(found["vary"].get("workers", [0]))
    found = cli("search", "best", "mine", "--dry-run", "--json", "--vary=batch_size=4,8").json
    assert found["global_batch"] is None, "a batch that is varied by name is another global batch"


def planned(cli):
    """The question about two batch sizes of `mine`."""
    preset = script_preset.load(cli.presets / "mine.toml")
    return plan_script_best(preset, (), BestRequest(vary={"batch_size": ["1", "2"]}))


def test_edited_file_of_the_command_begins_a_new_search(cli, tmp_path, monkeypatch):
    words, home = (*written(tmp_path, TAKES_FILES), "--config=hyper.yaml", "--data", "corpus"), Home(cli.home)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "hyper.yaml").write_text("hidden: 8\n")
    preset_of(cli, *words)
    monkeypatch.chdir("/")
    first = open_best(planned(cli), home, SearchOptions())
    (tmp_path / "corpus" / "more.txt").write_text("a folder is only named")
    assert open_best(planned(cli), home, SearchOptions()) == first
    (tmp_path / "hyper.yaml").write_text("hidden: 16\n")
    second = open_best(planned(cli), home, SearchOptions())
    assert second != first
    (tmp_path / "hyper.yaml").write_text("hidden: 8\n")
    assert open_best(planned(cli), home, SearchOptions()) == first, "the file is as it was"


def test_unknown_value_of_a_mapping_is_incompatible_from_the_beginning(cli):
    path = cli.presets / "mine.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"schema = 1\n[script]\ncommand = ['{PYTHON}', '{script('plain_torch.py')[-1]}']\n"
        "[script.knobs]\nbatch_size = '--batch-size {}'\nprecision = { fp32 = '', bf16 = '--bf16' }\n"
        "[knobs]\nprecision = 'fp32'\n"
    )
    asked = BestRequest(vary={"precision": ["fp32", "bf16", "fp16"]})
    best = plan_script_best(script_preset.load(path), (), asked)
    ruled_out = {one.knobs["precision"]: one.reason for one in best.space.candidates if one.excluded_as is not None}
    assert list(ruled_out) == ["fp16"]
    assert "precision=fp16 has no flag in the preset" in ruled_out["fp16"]
    with pytest.raises(UserError, match="strategy has no place in mine"):
        plan_script_best(script_preset.load(path), (), BestRequest(vary={"strategy": ["ddp"]}))


def test_trial_is_not_listed_and_a_refusal_names_its_search(cli):
    preset_of(cli, *script("plain_torch.py", "--pause=0.2", "--steps=1000"))
    preset = script_preset.load(cli.presets / "mine.toml")
    plan = plan_script((), preset=preset, steps=1000, trial=True)
    search_id = "20261121-054455-mine-7f3a"
    directory = launch.start(replace(plan, role=TRIAL, search_id=search_id), Home(cli.home))
    try:
        text = cli("run", "mine").refused()
        assert f"the CPU is in use by {directory.name}, a run of search {search_id}" in text
        assert cli("runs", "list", "--json").json["runs"] == []
        assert "there is no run yet" in cli("runs", "show", "last").refused()
    finally:
        end_run(directory)

"""`search best`: questions that are refused before anything starts, each with one line that helps."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cli.command import SMALL
from on_disk import RECORDED
from trainfast_runner.errors import UserError
from trainfast_runner.machine.calibration import Ceiling
from trainfast_runner.records.home import PAUSE_FILE, Home, conductor_lock
from trainfast_runner.search.__main__ import conduct_request
from trainfast_runner.search.best import opening
from trainfast_runner.search.best.opening import budget_error, open_best
from trainfast_runner.search.best.plan import BestRequest, plan_preset_best
from trainfast_runner.search.best.survey import with_bounds
from trainfast_runner.search.best_journal import BestEnded, Trial, read_best_journal
from trainfast_runner.search.control import SearchRequest, pause
from trainfast_runner.search.journal import JournalWriter
from trainfast_runner.search.searches import SearchOptions
from trainfast_runner.settings.spec import resolve
from trainfast_tui.cli import main, search

BEST = ("search", "best", "tiny-llama", *SMALL)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--vary", "batchsize=2,4"), ("no knob 'batchsize'", "did you mean batch_size?")),
        (("--vary", "precision=fp32,bf17"), ("precision", "did you mean bf16?")),
        (("--vary", "precision"), ("--vary takes knob=a,b,c",)),
        (("--vary", "precision="), ("no value",)),
        (("--vary", "devices=1,2"), ("devices cannot be varied", "ceiling")),
        (("--objective", "sample_per_s"), ("no such objective", "did you mean samples_per_s?")),
        (("--vary", "seq_len=16,32"), ("seq_len", "--objective tokens_per_s")),
        (("--objective", "time"), ("--for-steps N",)),
        (("--for-steps", "100"), ("--for-steps needs --objective time",)),
        (("--objective", "time", "--for-steps", "9", "--vary", "batch_size=1,2"), ("needs --global-batch N",)),
        (("--objective", "samples_per_joule"), ("energy counter",)),
        (("--global-batch", "0"), ("must be a whole number from 1 on",)),
        (("--budget", "soon"), ("--budget: 'soon': not a time", "10m")),
        (("--budget", "9" * 400), ("--budget: must be at most 8760h, a year", "1.5h")),
        (("--vary", "batch_size=4,8", "--vary", "grad_accum=1", "--global-batch", "7"), ("did you mean 8?",)),
    ],
)
def test_a_bad_question_is_one_line(cli, words, expected):
    line = cli(*BEST, *words).refused()
    assert all(part in line for part in expected), line
    assert Home(cli.home).run_ids() == []


def test_advice_on_a_knob_that_cannot_be_varied_reads_well_on_a_screen():
    with pytest.raises(UserError, match="devices cannot be varied") as refused:
        plan_preset_best(resolve("tiny-llama", []), BestRequest(vary={"devices": ["1", "2"]}))
    assert refused.value.line_without_option().endswith("; try setting devices for the next run")


def test_a_dry_run_counts_and_starts_nothing(cli):
    done = cli(*BEST, "--vary", "batch_size=1,2,4", "--vary", "precision=fp32,bf16", "--global-batch", "4", "--dry-run")
    assert done.code == 0, done.err
    assert "6" in done.out
    assert "cold runs" in done.out
    found = cli(*BEST, "--vary", "batch_size=1,2,4", "--global-batch", "4", "--dry-run", "--json").json
    assert (found["candidates"], found["legal"]) == (3, 3)
    assert found["seconds"] > 0
    assert "assumed" in found["basis"]
    assert Home(cli.home).run_ids() == []


def test_only_a_new_search_on_a_busy_cpu_says_what_its_budget_tries(tmp_path, monkeypatch, capsys):
    looks, cores = [], len(os.sched_getaffinity(0))
    monkeypatch.setenv("TRAINFAST_HOME", str(tmp_path))
    monkeypatch.setattr(opening, "others_cores", lambda seconds: looks.append(seconds) or cores / 2)
    monkeypatch.setattr(search, "conduct_best", lambda *arguments: BestEnded(t_ns=1, state="cancelled"))
    words = [*BEST, "--set", "devices=cpu", "--vary", "precision=fp32,bf16"]
    assert main(words) == 130
    assert "others take 50 % of the CPU: this budget tries about 2 of 2 settings" in capsys.readouterr().err
    (searched,) = (tmp_path / "searches").iterdir()
    trial = {"candidate_number": 0, "run_id": "r", "outcome": "failed", "seconds": 1.0, "samples_per_step": 2}
    JournalWriter(searched).write(Trial(t_ns=1, warm=False, **trial))
    assert main(words) == 130
    printed = capsys.readouterr().err
    assert "continuing" in printed
    assert "this budget tries" not in printed
    assert len(looks) == 1


def test_a_quiet_cpu_and_a_gpu_are_not_estimated_before_a_search(monkeypatch):
    asked = BestRequest(vary={"precision": ["fp32", "bf16"]})
    best_plan = plan_preset_best(resolve("tiny-llama", ["devices=cpu"]), asked)
    looks: list[float] = []
    monkeypatch.setattr(opening, "others_cores", lambda seconds: looks.append(seconds))
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(best_plan.survey, "plan", replace(best_plan.plan, device=device))
        assert opening.estimate_beside_others(best_plan, Home(Path("/nonexistent"))) is None
    assert len(looks) == 1, "a GPU needs no look"


def test_without_vary_only_what_trains_the_same_is_varied(cli):
    found = cli(*BEST, "--dry-run", "--json").json
    assert "precision" in found["vary"]
    assert not {"lr", "seq_len", "seed"} & set(found["vary"])
    assert {"lr", "seq_len"} <= set(found["left_alone"])
    assert "bf16-pure" not in found["vary"]["precision"]
    assert found["global_batch"] == 2


def test_refused_budget_is_in_minutes_and_the_option_in_seconds():
    error = budget_error(600.0, 812.4, "")
    assert error.line_without_option() == (
        "the budget of 10 min is below the cost of the baseline; try a budget of 1 h 07 min or more"
    )
    assert error.line().endswith("try --budget 4062s or more")


def test_a_budget_below_the_start_of_earlier_runs_is_refused_before_anything_starts(cli):
    run = cli.home / "runs" / RECORDED.name
    shutil.copytree(RECORDED, run)
    words = ("search", "best", "tiny-llama", "--vary", "precision=fp32,bf16")
    line = cli(*words, "--budget", "0.5s").refused()
    assert "the budget of 0.5 s is below the cost of the baseline: a process starts in" in line
    assert "or more" in line
    assert cli(*words, "--budget", "0.5s", "--dry-run").refused() == line, "no plan of a search that is refused"
    assert not (cli.home / "searches").exists()
    assert Home(cli.home).run_ids() == [run.name]


def test_a_search_that_another_process_conducts_is_followed_and_stays_as_it_is(tmp_path):
    home, options = Home(tmp_path), SearchOptions()
    spec = resolve("tiny-llama", ["data.kind=random", "seq_len=32"])
    asked = BestRequest(vary={"precision": ["fp32", "bf16"]})
    directory = open_best(plan_preset_best(spec, asked), home, options)
    pause(directory)
    before = read_best_journal(directory)
    request = SearchRequest(home=str(home.path), **spec.record_fields(), best=asked)
    followed: list[Path] = []
    with conductor_lock(directory):
        conduct_request(request, followed.append, is_cancelled=lambda: False, began_ns=0)
    assert followed == [directory]
    assert (directory / PAUSE_FILE).exists(), "the first one's pause holds"
    assert read_best_journal(directory) == before


CEILING = Ceiling(device="cpu", name="", tflops={"fp32": 1.0}, copy_gb_per_s=10.0, operation_us=10.0)


def test_the_flops_of_one_sample_length_bound_no_candidate_of_another():
    """A continued search may begin with a candidate whose seq_len is not the preset's."""
    asked = BestRequest(vary={"seq_len": [32, 64]}, objective="tokens_per_s")
    best_plan = plan_preset_best(resolve("tiny-llama", ["devices=cpu", "seq_len=32"]), asked)
    bounded = with_bounds(best_plan.space, best_plan.survey, 1e9, 64, CEILING)
    assert {one.knobs["seq_len"]: one.least_s_per_sample is not None for one in bounded.candidates} == {
        32: False,
        64: True,
    }

"""`search best`: what is refused or only counted before anything starts, and the GPUs, chosen once, whichever has the
most free memory later; cli/transcripts has the refused questions."""

import pytest
import stand_in
from stand_in import Gpu, Machine

from cli.command import SMALL
from trainfast_runner.errors import UserError
from trainfast_runner.records.home import PAUSE_FILE, Home, conductor_lock
from trainfast_runner.running.planning import plan_run
from trainfast_runner.search.best.question import best_key, open_best, plan_preset_best
from trainfast_runner.search.best_journal import BestJournal, BestRequest
from trainfast_runner.search.control import SearchRequest, conduct_request, pause
from trainfast_runner.search.searches import SearchOptions, candidate_spec
from trainfast_runner.settings.spec import resolve

BEST = ("search", "best", "tiny-llama", *SMALL)


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
    assert (found["candidates"], found["legal"], found["seconds"]) == (3, 3, 600)
    assert Home(cli.home).run_ids() == []


def test_without_vary_only_what_trains_the_same_is_varied(cli):
    found = cli(*BEST, "--dry-run", "--json").json
    assert "precision" in found["vary"]
    assert not {"lr", "seq_len", "seed"} & set(found["vary"])
    assert {"lr", "seq_len"} <= set(found["left_alone"])
    assert "bf16-pure" not in found["vary"]["precision"]
    assert found["global_batch"] == 2


def test_a_search_that_another_process_conducts_is_followed_and_stays_as_it_is(tmp_path):
    home, options = Home(tmp_path), SearchOptions()
    spec = resolve("tiny-llama", ["data.kind=random", "seq_len=32"])
    asked = BestRequest(vary={"precision": ["fp32", "bf16"]})
    directory = open_best(plan_preset_best(spec, asked), home, options)
    pause(directory)
    before = BestJournal.read(directory).lines
    request = SearchRequest(home=str(home.path), **spec.record_fields(), best=asked)
    followed = []
    with conductor_lock(directory):
        conduct_request(request, followed.append, is_cancelled=lambda: False, began_ns=0)
    assert followed == [directory]
    assert (directory / PAUSE_FILE).exists(), "the first one's pause holds"
    assert BestJournal.read(directory).lines == before


ASKED = BestRequest(vary={"strategy": ["single", "ddp"]})


def four(*used_gib):
    return Machine([Gpu(uuid=f"GPU-{index}", bus=index + 1, memory_used=used_gib[index] << 30) for index in range(4)])


def planned(python, machine, *settings):
    with stand_in.installed(machine):
        return plan_preset_best(resolve("tiny-llama", ["devices=2", *settings]), ASKED, python)


def test_a_search_keeps_the_gpus_that_were_the_freest_when_it_began(python):
    best = planned(python, four(9, 1, 8, 2))
    assert best.question.device_uuids == ["GPU-1", "GPU-3"]
    assert best.plan.device_uuids == ["GPU-1"], "the baseline is single"
    with stand_in.installed(four(1, 9, 1, 9)):
        for strategy, uuids in (("ddp", ["GPU-1", "GPU-3"]), ("single", ["GPU-1"])):
            spec = candidate_spec(best.survey.spec, {"strategy": strategy})
            found = plan_run(spec, python, best.question.device_uuids[: len(uuids)])
            assert found.device_uuids == uuids


def test_the_same_command_continues_a_search_though_other_gpus_are_free_by_now(python):
    assert best_key(planned(python, four(9, 1, 8, 2))) == best_key(planned(python, four(1, 9, 1, 9)))


def test_a_gpu_of_the_search_that_is_gone_is_named(python):
    best = planned(python, four(9, 1, 8, 2))
    with stand_in.installed(Machine([Gpu(uuid="GPU-0"), Gpu(uuid="GPU-1")])), pytest.raises(UserError) as refused:
        plan_run(candidate_spec(best.survey.spec, {"strategy": "ddp"}), python, best.question.device_uuids)
    assert "GPU GPU-3 is not available any more" in refused.value.line()


def test_gpus_that_the_person_named_stay_the_persons(python):
    assert planned(python, four(9, 1, 8, 2), "devices=0+2").question.device_uuids == ["GPU-0", "GPU-2"]

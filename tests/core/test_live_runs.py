"""The live runs of a home, and waiting for one of them without looking through all of its history."""

from contextlib import ExitStack
from dataclasses import replace

import pytest

from on_disk import put, run_file
from on_disk import search as put_search
from plans import PLAN
from trainfast_runner.errors import UserError
from trainfast_runner.records.home import PAUSE_FILE, Home, conducted_search_of, conductor_lock
from trainfast_runner.records.run_directory import shared_lock
from trainfast_runner.running import planning, present_state


@pytest.fixture(autouse=True)
def no_sleep(monkeypatch):
    monkeypatch.setattr(planning.time, "sleep", lambda seconds: None)


def started(home, name, device="cpu", search_id=None):
    """A run with nothing but its `run.json` and its lock file."""
    _, directory = home.new_run(name)
    run = run_file(run_id=directory.name, preset=name, device=device, search_id=search_id)
    put(directory / "run.json", run)
    return directory


def test_a_run_goes_on_while_its_lock_is_held_and_it_has_no_result(tmp_path):
    home = Home(tmp_path)
    started(home, "left")
    first, second, ended = (started(home, name) for name in ("first", "second", "ended"))
    (ended / "result.json").write_text("{}")
    with shared_lock(first), shared_lock(second), shared_lock(ended):
        assert list(home.live_directories()) == [second, first]
        assert [run.preset for run in present_state.live_runs(home)] == ["second", "first"]
    assert present_state.live_runs(home) == []


def test_a_busy_device_is_refused_with_a_way_out_for_the_command_line_alone(tmp_path):
    home = Home(tmp_path)
    with shared_lock(started(home, "first")), pytest.raises(planning.DevicesBusy) as raised:
        planning.refuse_busy(PLAN, home)
    assert ", or --wait" in raised.value.line()
    screen = raised.value.line_without_option()
    assert "in use by" in screen
    assert "try" not in screen
    assert UserError(**raised.value.parts()).line() == raised.value.line(), "an error crosses to another process whole"


def test_a_wait_looks_at_one_run_and_ends_when_no_other_took_the_device(tmp_path, monkeypatch):
    home, listings = Home(tmp_path), []
    real = Home.run_ids
    monkeypatch.setattr(Home, "run_ids", lambda home: listings.append(home) or real(home))
    first, second, gpu = started(home, "first"), started(home, "second"), started(home, "gpu", "cuda")
    waited = []
    with ExitStack() as locks, shared_lock(gpu):
        held = {directory.name: locks.enter_context(ExitStack()) for directory in (first, second)}
        for directory in (first, second):
            held[directory.name].enter_context(shared_lock(directory))
        listings.clear()

        def on_wait(run, seconds):
            waited.append(run.preset)
            if waited.count(run.preset) == 5:
                held[run.run_id].close()

        planning.wait_for_devices(PLAN, home, on_wait)
    assert waited == ["second"] * 5 + ["first"] * 5
    assert len(listings) == 3, "at the start and whenever a run had ended"


@pytest.mark.parametrize("end", ["answered", "paused"])
def test_a_wait_for_a_search_goes_on_between_its_processes_until_it_ends_or_pauses(tmp_path, end):
    home, search = Home(tmp_path), put_search(tmp_path)
    probe = started(home, "probe", search_id=search.name)
    looks = 0
    with ExitStack() as process, ExitStack() as conductor:
        process.enter_context(shared_lock(probe))
        assert conductor.enter_context(conductor_lock(search))

        def on_wait(run, seconds):
            nonlocal looks
            looks += 1
            assert conducted_search_of(home, run) == search
            if looks == 3:
                process.close()
            elif looks == 6:
                conductor.close() if end == "answered" else (search / PAUSE_FILE).touch()

        planning.wait_for_devices(PLAN, home, on_wait)
    assert looks == 6


def test_a_wait_that_begins_between_two_processes_of_a_search_waits_for_the_search(tmp_path):
    home, search = Home(tmp_path), put_search(tmp_path)
    ended = started(home, "probe", search_id=search.name)
    (ended / "result.json").write_text("{}")
    waited = []
    with ExitStack() as conductor:
        assert conductor.enter_context(conductor_lock(search))

        def on_wait(run, seconds):
            waited.append(run.run_id)
            if len(waited) == 3:
                conductor.close()

        planning.wait_for_devices(replace(PLAN, search_id="another"), home, on_wait)
        assert not waited, "searches that have begun do not wait for each other's gaps"
        planning.wait_for_devices(PLAN, home, on_wait)
    assert waited == [ended.name] * 3

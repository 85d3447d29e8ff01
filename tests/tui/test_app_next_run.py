"""The main screen: what the next run starts from."""

import pytest
from recorded import a_gpu, a_run
from still import FULL, a_snapshot, running, shown

from trainfast_runner.machine.devices import Machine
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_tui.control.messages import MachineSeen
from trainfast_tui.next_run.sources import next_run_from_preset, next_run_from_script, repeat_preset_run


@pytest.mark.parametrize("role", ["proof", "cold"])
async def test_a_run_of_a_search_is_repeated_but_for_the_steps_that_the_search_set(home, role):
    knobs = {"batch_size": 37, "precision": "bf16", "steps": 10, "timing_warmup": 2}
    run = read_run_file(a_run(home, role=role, knobs=knobs))
    assert run is not None
    preset = next_run_from_preset("tiny-llama").spec.knobs
    again = repeat_preset_run(run)
    assert (again.spec.knobs["batch_size"], again.spec.knobs["precision"]) == (37, "bf16")
    assert (again.spec.knobs["steps"], again.spec.knobs["timing_warmup"]) == (preset["steps"], preset["timing_warmup"])
    assert again.is_changed("steps"), "from the run on the screen"


async def test_a_knob_turned_away_and_back_is_no_override(home):
    written = next_run_from_preset("tiny-llama")
    for name in ("batch_size", "precision", "workers", "memory_limit", "devices", "lr", "steps"):
        turned = written.turn(name, 1)
        assert (turned.spec.overrides, turned.with_value(name, written.text_of(name)).spec) == ((name,), written.spec)
    run = read_run_file(a_run(home, knobs={"batch_size": 32, "seq_len": 256}))
    assert run is not None
    repeated = repeat_preset_run(run).with_value("batch_size", written.text_of("batch_size"))
    assert repeated.spec.overrides == ("seq_len",)
    assert repeated.is_changed("batch_size"), "from the run on the screen"
    async with running(home, size=FULL, preset="tiny-llama") as (app, pilot):
        started = []
        app.session.run_control.start = lambda spec, run_to_stop=None: started.append(spec)
        await pilot.show(a_snapshot(None))
        await pilot.press("right", "left", "r")
        assert [spec.overrides for spec in started] == [()]
        assert "•" not in app.text


async def test_a_knob_of_a_script_turned_back_is_no_override(home):
    flags = {"batch_size": "--bs", "grad_accum": "--accum"}
    script = ScriptPreset(
        command=("python", "train.py"), name="mine", framework="torch", flag_words=flags, knobs={"batch_size": 8}
    )
    written = next_run_from_script(script)
    turned = written.turn("batch_size", 1).with_value("timing_warmup", "5").with_value("grad_accum", "4")
    assert turned.spec.overrides == ("batch_size", "timing_warmup", "grad_accum")
    back = turned.turn("batch_size", -1).with_value("timing_warmup", "3")
    assert (back.spec.overrides, back.spec.knobs) == (("grad_accum",), {"batch_size": 8, "grad_accum": 4})
    assert back.reset("grad_accum").spec == written.spec


async def test_a_value_typed_while_a_script_takes_the_place_of_the_next_run_is_refused(home):
    script = ScriptPreset(command=("python", "train.py"), name="mine", framework="torch")
    async with running(home) as (app, pilot):
        await pilot.press("enter")
        app.session.set_next_run(next_run_from_script(script))
        await pilot.pause()
        await pilot.press(*"16", "enter")
        assert "batch_size cannot reach mine" in " ".join(app.text.split())
        assert "batch_size" not in app.knobs


async def test_the_default_preset_follows_the_machine(home):
    gpu = a_gpu(0)
    async with running(home, a_snapshot(None)) as (app, pilot):
        await pilot.post(MachineSeen(Machine(device="cuda", gpus=(gpu,), nvml_gpus=(gpu,), cores=8)))
        assert app.session.next_run.spec.preset == "gpt2-medium"
    text, _ = await shown(home, a_snapshot(None), preset="no-such-preset")
    assert "there is no preset 'no-such-preset'" in text


async def test_the_next_run_starts_from_the_run_on_the_screen(home):
    _, app = await shown(home, a_snapshot(a_run(home, knobs={"batch_size": 32, "memory_limit": "2GiB"})))
    assert app.knobs["batch_size"] == 32
    assert app.knobs["devices"] is None, "the launcher's own choice is no setting"
    assert not any(app.session.next_run.is_changed(name) for name in app.knobs)

"""The main screen: what the next run starts from, and what the keys do to it."""

import queue
from dataclasses import replace

import pytest
from recorded import a_gpu, a_run
from still import CPU, FULL, MIDDLE, SMALL, a_snapshot, has, running, shown
from textual.events import Key
from traced import Tracer

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import Machine
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.search import advice
from trainfast_runner.search.advice import Situation
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.presets import user_directory
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_tui.control.background_work import BackgroundWork
from trainfast_tui.control.messages import Changes, MachineSeen
from trainfast_tui.next_run.sources import next_run_from_preset, next_run_from_script, preset_choices, repeat_preset_run
from trainfast_tui.panels.knob_panel import KnobPanel


async def test_strategy_ddp_counts_every_rank(home):
    async with running(home, a_snapshot(None)) as (app, pilot):
        app.main.query_one(KnobPanel).move_to("strategy")
        app.session.set_next_run(app.session.next_run.with_value("strategy", "ddp"))
        await pilot.pause()
        assert "global batch 16 = 8 x 1 x 2 ranks" in app.text
        values = KNOBS_BY_NAME["strategy"].values
        app.session.set_next_run(app.session.next_run.with_value("strategy", values.options[-1]))
        await pilot.press("space")
        assert app.knobs["strategy"] == "single", "space goes on at the first value"


async def test_knobs_that_do_nothing_on_this_machine_stand_in_one_line(home):
    async with running(home, a_snapshot(None), size=FULL, preset="tiny-llama") as (app, pilot):
        panel = app.main.query_one(KnobPanel)
        await pilot.until("do nothing here (/): kernels, allocator, pin_")
        assert not {"pin_memory", "p2p", "watch"} & set(panel.listed)
        await pilot.press("slash", *"watch", "enter")
        assert "watch" in panel.listed, "the filter looks through all knobs"
        await pilot.press("escape")
        assert "watch" not in panel.listed
        app.session.set_next_run(app.session.next_run.with_value("pin_memory", "on"))
        assert "•pin_memory" in await pilot.until("do nothing here (/): kernels, allocator, p2p")
        panel.show_refusal(UserError("not here", key="p2p"))
        await pilot.pause()
        assert "▸ p2p" in app.text
        assert "do nothing here" not in app.text


async def test_arrows_skip_a_value_that_cannot_work_on_the_device(home):
    async with running(home, a_snapshot(None), size=FULL, preset="tiny-llama") as (app, pilot):
        for name, refused in (
            ("precision", {"tf32", "fp8"}),
            ("optimizer", {"paged-adamw-8bit", "adamw-offload"}),
            ("attention", {"sdpa-cudnn", "sdpa-efficient", "flash", "flash-3"}),
            ("compile", {"reduce-overhead"}),
            ("strategy", {"dp", "naive-mp"}),
            ("p2p", {"off"}),
        ):
            values = KNOBS_BY_NAME[name].values
            app.main.query_one(KnobPanel).move_to(name)
            seen = set()
            for _ in values.options:
                await pilot.press("space")
                seen.add(app.knobs[name])
            assert seen == set(values.options) - refused, name
            await pilot.press("backspace")
        app.main.query_one(KnobPanel).move_to("precision")
        text = await pilot.press("right")
        assert "fp16" in next(line for line in text.splitlines() if "▸•precision" in line)
        assert "not here precision=tf32" in await pilot.press("i")
        await pilot.press("escape")
        # A preset may have asked for it: the arrows lead away from it.
        app.session.set_next_run(app.session.next_run.with_value("precision", "tf32"), "precision")
        await pilot.press("left")
        assert app.knobs["precision"] == "fp32"


async def test_only_knobs_that_matter_to_the_strategy_are_listed(home):
    async with running(home, a_snapshot(None)) as (app, pilot):
        assert "pp_schedule" not in app.text
        app.session.set_next_run(
            app.session.next_run.with_value("strategy", "pp").with_value("pp_schedule", "1f1b"), "pp_schedule"
        )
        await pilot.pause()
        assert "▸•pp_schedule" in app.text
        app.session.set_next_run(app.session.next_run.with_value("strategy", "single"))
        await pilot.pause()
        text = app.text
        assert "pp_schedule" not in text
        assert "▸•strategy" in text or "▸ strategy" in text, "the cursor goes to the nearest knob above"
        assert "pp_schedule" not in app.session.next_run.spec.overrides, "an unseen knob is refused at no start"
        next_run = app.session.next_run.with_value("strategy", "tp").with_value("tp_degree", "4")
        assert "tp_degree" in next_run.spec.overrides
        assert "tp_degree" not in next_run.reset("strategy").spec.overrides


def test_facts_that_come_late_do_not_advise_another_preset(home, monkeypatch):
    monkeypatch.setattr(advice, "gather", lambda *_: Situation())
    posted = queue.Queue()
    work = BackgroundWork(home, posted.put, None)
    work.gather_situation(next_run_from_preset("tiny-llama").spec, CPU)
    late = posted.get(timeout=60)
    work.gather_situation(next_run_from_preset("gpt2").spec, CPU)
    work.note_situation(late)
    assert work.situation is None
    work.note_situation(posted.get(timeout=60))
    assert work.situation is not None


async def test_advice_stands_beside_its_knob(home):
    async with running(home, a_snapshot(a_run(home))) as (app, pilot):
        assert "advice" not in app.text, "nothing to say about a batch of 8 on a CPU"
        await pilot.press("right")
        panel = app.main.query_one(KnobPanel)
        panel.move_to("lr")
        await pilot.pause()
        assert "advice lr=0.002: the global batch is 16, 2 x" in app.text
        panel.move_to("grad_accum")
        assert "Try 1 first" in await pilot.press("right", "right")


async def test_a_typed_value_is_checked_before_it_is_taken(home):
    async with running(home, a_snapshot(a_run(home)), size=SMALL) as (app, pilot):
        app.main.query_one(KnobPanel).move_to("attention")
        await pilot.press("enter", *"dense", "enter")
        assert "'dense' is not one of its values (allowed: auto, eager," in " ".join(app.text.replace("│", " ").split())
        await pilot.press("ctrl+u", *"eager", "enter")
        assert app.knobs["attention"] == "eager"
        await pilot.press("backspace")
        assert app.knobs["attention"] == "auto"


async def burst(pilot, knob, value, *keys):
    """Keys that arrive in one read, as they do over a slow link, until they have set the knob."""
    app = pilot.app
    for key in keys:
        app.post_message(Key(key, key if len(key) == 1 else {"enter": "\r"}.get(key)))
    for _ in range(200):
        await pilot.pause()
        if app.knobs[knob] == value and app.screen is app.main:
            return
    pytest.fail(f"{keys} left {knob} at {app.session.next_run.text_of(knob)} and this screen:\n{app.text}")


async def test_what_is_typed_ahead_of_a_dialog_lands_in_it(home):
    async with running(home, a_snapshot(a_run(home)), size=SMALL) as (app, pilot):
        # What comes after Enter is for the screen below; a refused text is mended by what follows it.
        await burst(pilot, "grad_accum", 4, "enter", "3", "2", "enter", "down", "enter", "4", "enter")
        assert app.knobs["batch_size"] == 32
        await burst(pilot, "grad_accum", 6, "enter", "x", "enter", "backspace", "6", "enter")
        first = next_run_from_preset(preset_choices()[0][0])
        await burst(pilot, "batch_size", first.spec.knobs["batch_size"], "p", "home", "enter")
        assert app.session.next_run.spec.preset == preset_choices()[0][0]


async def test_presets_say_what_fits_and_fold_their_variants(home, monkeypatch):
    Tracer(lambda spec: spec.preset, "tiny-llama").stand_in(monkeypatch)
    async with running(home, a_snapshot(None), size=MIDDLE) as (app, pilot):
        app.session.machine = CPU
        text = await pilot.press("p")
        has(text, "3M, fits up to 457: Llama, 4 layers", "6 variants: Notebook: BERT large")
        assert "guide-single-gpu/" not in text
        text = await pilot.press(*"single", "enter")
        has(text, "the preset itself", "guide-single-gpu/accum+ckpt ")
        await pilot.press("down", "down", "enter")
        assert app.session.next_run.spec.name == "guide-single-gpu/accum"


async def test_a_broken_preset_says_why_and_leaves_the_knobs(home):
    user_directory().mkdir(parents=True, exist_ok=True)
    (user_directory() / "a-broken.toml").write_text("schema = 1\n[knobs\n")
    async with running(home, a_snapshot(a_run(home)), size=MIDDLE) as (app, pilot):
        has(await pilot.press("p", *"a-broken"), "cannot be used")
        before = app.session.next_run
        assert "a-broken.toml" in await pilot.press("enter")
        assert app.session.next_run == before


async def test_saving_writes_a_preset_refuses_a_bad_name_and_replaces_after_a_yes(home, tmp_path):
    async with running(home, a_snapshot(None), size=SMALL) as (app, pilot):
        await pilot.press("right", "w")
        presets = tmp_path / "config" / "trainfast-tui" / "presets"
        shown = "".join(app.text.replace("│", " ").split())
        assert f"itbecomesafilein{presets}," in shown
        assert "cannot name a preset" in await pilot.press(*"a/b", "enter")
        await pilot.press("ctrl+u", *"mine", "enter")
        saved = presets / "mine.toml"
        assert "batch_size = 16" in saved.read_text()
        assert 'family = "llama"' in saved.read_text(), "the preset is whole"
        saved.write_text("")
        for answer, is_replaced in (("n", False), ("y", True)):
            text = await pilot.press("w", *"mine", "enter")
            assert "You have a preset mine already. Replace it?" in text
            assert "--overwrite" not in text
            await pilot.press(answer)
            assert bool(saved.read_text()) == is_replaced
        assert "cannot name a preset" in await pilot.press("w", *"a" * 300, "enter")


async def test_i_shows_the_whole_text_about_a_knob_and_the_refusal_of_it(home):
    async with running(home, a_snapshot(None), size=SMALL) as (app, pilot):
        refusal = UserError("because " * 33 + "it is so", key="strategy", advice="strategy=ddp")
        # The smallest screen cuts a refusal, but not its cure.
        app.show_changes(Changes(refusal=refusal))
        await pilot.pause()
        has(app.text, "i: all of it", "because …", "strategy=ddp")
        await pilot.press("i")
        text = " ".join(app.text.split())
        entry = KNOBS_BY_NAME["strategy"]
        assert f"Refused: {'because ' * 33}it is so; try strategy=ddp" in text
        assert entry.what in text
        await pilot.press("pagedown")
        assert f"memory {entry.memory}" in " ".join(app.text.split())
        await pilot.press("escape")
        assert app.screen is app.main


async def test_the_name_of_a_preset_is_shown_as_plain_text(home):
    async with running(home, a_snapshot(None)) as (app, _):
        spec = replace(app.session.next_run.spec, preset="\x1b]0;owned\x07mine\n\x1b[31m")
        app.session.next_run = replace(app.session.next_run, spec=spec)
        panel = app.main.query_one(KnobPanel)
        panel.show_knobs()
        texts = [text for line in panel.lines(46, 30) for text, _ in line]
        assert "mine" in [text.strip() for text in texts]
        assert "".join(texts).isprintable()


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

"""A batch search on the screen: how it is drawn, paused, cancelled and left, and its answer applied."""

import msgspec
import pytest
from msgspec.structs import replace
from recorded import (
    CONDUCTED,
    GIB,
    MIB,
    START_NS,
    S,
    a_probe,
    a_search,
    answered,
    asked,
    going_on,
    nothing_fits,
    seen,
    write_lines,
)
from still import MIDDLE, NOW_S, SMALL, has, running

from trainfast_runner.machine.processes import boot_id
from trainfast_runner.records.home import PAUSE_FILE, Home
from trainfast_runner.records.run_file import BatchWidths
from trainfast_runner.search.batch_journal import BatchEnded, BatchStep, ConfirmationRun, Predicted, RankPeaks
from trainfast_runner.search.journal import Paused, Resumed, Waiting
from trainfast_runner.search.searches import newest_search
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_tui.next_run.sources import next_run_from_script
from trainfast_tui.screens.batch import batch_page, offers
from trainfast_tui.text.format import line_text
from trainfast_tui.text.search_words import state_words


@pytest.mark.parametrize(("keys", "batch_size"), [((), 40), (("down", "down"), 42)])
async def test_enter_applies_the_answer_under_the_cursor(home, keys, batch_size):
    async with running(home, size=SMALL) as (app, pilot):
        await pilot.opened(a_search(home, answered()))
        await pilot.press(*keys)
        assert f"batch_size = {batch_size}; r runs it" in await pilot.press("enter")
        assert app.screen is app.main
        assert app.knobs["batch_size"] == batch_size


async def test_a_size_that_its_confirmation_run_refuted_is_marked(home):
    *tried, confirmation, last, ended = answered()
    refuting = ConfirmationRun(batch_size=42, run_id="20261121-055000-cold", state="oom", seconds=1.0, refutes=[42])
    async with running(home, size=MIDDLE) as (_, pilot):
        text = await pilot.opened(a_search(home, [*tried, refuting, confirmation, last, ended]))
        assert text.count("fitted, refuted by the confirmation run") == 1
        assert "out of memory in the confirmation run" in text
        assert text.count("  fits") == 2


async def test_hidden_rows_are_counted_and_reached_by_the_keys_of_other_tables(home, live_search):
    sizes = range(101, 161)
    tried = [a_probe(size, at=6) for size in sizes]

    def seen_sizes(text):
        return {size for size in sizes if f"\n●   {size} " in text}

    async with running(home, size=SMALL) as (app, pilot):
        *before, step = going_on()
        write_lines(live_search / "journal.jsonl", [*before, *tried, step])
        text = await pilot.opened(live_search)
        newest = seen_sizes(text)
        assert 160 in newest
        assert 101 not in newest
        assert f"more rows: {62 - len(newest)} above  PgUp PgDn" in text, "the two of every search among them"
        await pilot.press("up")
        assert seen_sizes(app.text) == {*range(min(newest) - 1, 161)}, "the size under way is out of sight"
        assert "above, 1 below  PgUp PgDn" in app.text
        await pilot.press(*["pageup"] * 25)
        assert 101 in seen_sizes(app.text)
        assert " above" not in app.text
        await pilot.press("pagedown")
        assert not seen_sizes(app.text) & {101, 160}
        await pilot.press(*["pagedown"] * 25)
        assert seen_sizes(app.text) == newest


async def test_where_batch_1_does_not_fit_enter_applies_all_of_a_change(home):
    async with running(home, size=MIDDLE) as (app, pilot):
        text = await pilot.opened(a_search(home, nothing_fits()))
        has(text, "✗ batch_size 1 does not fit: 75.0 MiB too much")
        has(text, "▸ change 1    optimizer=adafactor  frees 120 MiB; speed: slower to converge")
        await pilot.press("down", "enter")
        assert (app.knobs["checkpointing"], app.knobs["precision"]) == ("full", "bf16")


async def test_s_stops_what_goes_on_and_escape_leaves_what_has_ended(home, live_search, cancelled):
    async with running(home, size=MIDDLE) as (app, pilot):
        await pilot.opened(live_search)
        await pilot.press("s")
        await pilot.until("Stopping: the running process is ended, the journal is kept")
        await pilot.until_true(lambda: cancelled, "the cancel")
        assert cancelled == [live_search]
        write_lines(
            live_search / "journal.jsonl",
            [*going_on(), BatchEnded(t_ns=START_NS + NOW_S * S, state="cancelled", seconds=16.0)],
        )
        text = await pilot.show_search(live_search)
        has(text, "■ stopped; its journal is kept, F5 continues", "took 16 s")
        assert text.splitlines()[-1].startswith("Esc back  F5 continue"), "nothing to apply, nothing to pause"
        assert "There is no live search." in await pilot.press("s")
        await pilot.press("escape")
        assert app.screen is app.main


async def test_space_pauses_after_the_probe_and_again_goes_on(home, live_search):
    async with running(home, size=MIDDLE) as (_, pilot):
        await pilot.opened(live_search)
        await pilot.press("space")
        await pilot.until_true((live_search / PAUSE_FILE).exists, "the pause")
        assert "● pausing after this step" in await pilot.show_search(live_search)
        text = await pilot.show_search(live_search, lines=[*going_on(), Paused(t_ns=START_NS + 15 * S)])
        has(text, "■ paused: no process is running", "space resume", "next: probe batch_size 42")
        assert "apply" not in text.splitlines()[-1], "there is nothing to apply yet"
        done = [*going_on(), a_probe(42), Paused(t_ns=START_NS + 15 * S)]
        assert "next: decided when the search goes on" in await pilot.show_search(live_search, lines=done)
        await pilot.press("p")
        await pilot.until_true(lambda: not (live_search / PAUSE_FILE).exists(), "the end of the pause")


@pytest.mark.parametrize("key", ["b", "escape"])
async def test_leaving_lets_it_go_on_and_its_end_is_notified_on_the_main_screen(home, live_search, key):
    async with running(home, size=MIDDLE) as (app, pilot):
        await pilot.opened(live_search)
        await pilot.press(key)
        assert app.screen is app.main
        assert "The search goes on; b shows it." in app.text
        assert not app.session.requests[-1].may_trace, "a search measures too"
        for key in ("r", "s"):
            app.main.notify("")
            assert "Batch search is using the device; b shows it, s there stops it." in await pilot.press(key)
        assert "The search has ended: batch_size 42 is the largest that fits" in await pilot.show_search(
            live_search, lines=answered()
        )


def test_the_reader_finds_a_search_that_goes_on_or_the_newest_of_this_boot(home, conduct):
    assert newest_search(home) is None
    live = a_search(home, going_on())
    assert newest_search(home) is None, "of another boot, where nobody knows what the machine was"
    here = msgspec.structs.replace(CONDUCTED, boot_id=boot_id())
    ended = a_search(home, [*answered(), here], "20991231-000000-tiny-llama-ffff")
    assert newest_search(home) == ended, "it ended while the app was closed"
    conduct(live)
    assert newest_search(home) == live


async def test_what_was_searched_with_other_knobs_is_applied_with_a_warning(home):
    async with running(home, size=MIDDLE) as (app, pilot):
        await pilot.opened(a_search(home, answered()))
        app.session.next_run = app.session.next_run.with_value("seq_len", "256")
        await pilot.press("enter")
        assert app.knobs["batch_size"] == 40
        assert "the search had other knobs" in app.text


async def test_enter_applies_an_answer_to_the_preset_of_its_search(home):
    script = ScriptPreset(command=("python", "train.py"), name="mine", framework="torch")
    async with running(home, size=MIDDLE) as (app, pilot):
        await pilot.opened(a_search(home, answered()))
        app.session.set_next_run(next_run_from_script(script))
        await pilot.press("enter")
        assert app.screen is app.main
        spec = app.session.next_run.spec
        assert (spec.name, spec.knobs["batch_size"], spec.knobs["memory_limit"]) == ("tiny-llama", 40, "1GiB")
        text = " ".join(app.text.split())
        assert "The next run is now tiny-llama" in text
        assert "the search had other knobs" not in text


async def test_the_tightest_of_two_ranks_is_named_and_a_void_probe_says_why(home, conducted):
    ranks = [RankPeaks(rank=rank, phase_peaks={"forward_backward": 290 * MIB}) for rank in range(2)]
    lines = [
        asked(limits_bytes=[2 * GIB, 1536 * MIB], world_size=2),
        CONDUCTED,
        a_probe(8, outcome="void", reason="python 4711 of another user took 2.00 GiB"),
        a_probe(8, rank=1, ranks=ranks),
        BatchStep(t_ns=START_NS + 6 * S, action="probe", batch_size=64, why="a point"),
    ]
    search = conducted(lines)
    async with running(home, size=MIDDLE) as (_, pilot):
        text = await pilot.opened(search)
    has(text, "limit 2.00 GiB + 1.50 GiB a rank, the tightest is rank 1 (memory_limit)", "void on rank 0")
    has(text, "python 4711 of another user took 2.00 GiB", "fits, rank 1 fullest")


async def test_what_is_not_predicted_is_shown_for_the_whole_search(home, conducted):
    reason = "no prediction (the tracer cannot follow this model: aten.nonzero); sizes are found by trying them"
    search = conducted([asked(), CONDUCTED, Predicted(t_ns=START_NS + S, reason=reason), a_probe(1), a_probe(2)])
    async with running(home, size=SMALL) as (_, pilot):
        text = await pilot.opened(search)
    assert reason in " ".join(text.split())
    assert text.count("  fits") == 2


async def test_search_that_waits_for_another_run_names_it_and_times_the_probe_after_it(home, conducted):
    waiting = Waiting(t_ns=START_NS + 14 * S, run_id="20261121-080200-gpt2-0a0a")
    search = conducted([*going_on(), waiting])
    async with running(home, size=MIDDLE) as (_, pilot):
        text = await pilot.opened(search)
        has(text, "● waiting for 20261121-080200-gpt2-0a0a to end", "  4 s; limit")
        assert "▸ 42 waiting…" in " ".join(text.split())
        assert "next: probe batch_size 42" in text
        text = await pilot.show_search(search, lines=[*going_on(), waiting, Resumed(t_ns=START_NS + 16 * S)])
        has(text, "● probing: batch_size 42", "  2 s; limit")


def test_kind_e_unsure_widths_stand_in_the_headline_and_under_the_chart(home):
    *lines, ended = answered()
    widths = BatchWidths(narrowest=31, widest=48)
    answer = replace(ended.answer, widths=widths, widths_note="a wider batch needs more memory")
    search = seen(a_search(home, [*lines, replace(ended, answer=answer)]))
    assert "confirmed in a fresh process with batches up to 48 wide" in state_words(search)
    text = "\n".join(map(line_text, batch_page(search, START_NS, 120, 0).foot))
    assert "a wider batch needs more memory" in text


def test_the_smallest_size_as_fast_as_the_largest_is_offered_where_speeds_rank(home):
    *tried, ended = answered()
    ranked = replace(ended.answer, samples_per_s=14.8)
    found = []
    for number, answer in enumerate((ended.answer, ranked, replace(ranked, fastest_batch=None))):
        lines = [*tried, replace(ended, answer=answer)]
        offered = offers(seen(a_search(Home(home.path / str(number)).create(), lines)))
        found.append([(offer.knob_texts, offer.reason) for offer in offered if offer.label == "flat from"])
    assert found == [[], [((("batch_size", "8"),), "as fast as 42, with 734 MiB to spare")], []], "none on a CPU"

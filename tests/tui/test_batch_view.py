"""The view of a batch search, by the text a person would see: probes, the fit, the next step, and the answer."""

from msgspec.structs import replace
from recorded import CONDUCTED, GIB, MIB, START_NS, S, a_probe, a_search, answered, asked, going_on, seen
from still import MIDDLE, SMALL, has, running

from trainfast_runner.records.home import Home
from trainfast_runner.records.run_file import BatchWidths
from trainfast_runner.search.batch_journal import BatchStep, Predicted, RankPeaks
from trainfast_runner.search.journal import Resumed, Waiting
from trainfast_tui.screens.batch import batch_page, offers
from trainfast_tui.text.format import line_text
from trainfast_tui.text.search_words import state_words


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

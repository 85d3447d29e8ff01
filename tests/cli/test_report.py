"""`report`: runs or a search in one file that loads nothing and in which a run's text stays text."""

import fcntl
import re
import shutil
from base64 import b64decode
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace
from recorded import BEST_ID, COLD_IDS, CONFIRMATION_ID, MIB, SEARCH_ID, SPACE, answered, best_answered

from cli.command import Cli
from on_disk import RECORDED, A, ended, search
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Diagnosis, MemoryFigures
from trainfast_runner.search.best_journal import BestEnded
from trainfast_tui.report import blocks, pictures
from trainfast_tui.report.document import report_document

VOID = {"meta", "img"}
NAMESPACE = "{http://www.w3.org/2000/svg}"
SVG = "data:image/svg+xml;base64,"
LOADING = {"href", "srcset", "data", "action", "poster", "background", "style", "xlink:href"}
"""Attributes that can make a browser fetch something."""
EVIL = '<script>alert(1)</script> <img src="http://a.example/x"> | `code` ![i](http://a.example/y) \x1b[31m</td>'


class Page(HTMLParser):
    """A page, read as a browser does: its elements, their attributes and their text."""

    def __init__(self, path):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.tables: list[list[list[str]]] = []
        self._open: list[str] = []
        self.pictures: list[ElementTree.Element] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag, attrs):
        attributes = {name: value or "" for name, value in attrs}
        self.elements.append((tag, attributes))
        if tag == "img":
            assert attributes["src"].startswith(SVG), "a picture is inside the page"
            picture = ElementTree.fromstring(b64decode(attributes["src"].removeprefix(SVG)))
            self.pictures.append(picture)
            self.texts += [attributes["alt"], *("".join(one.itertext()) for one in picture.iter(f"{NAMESPACE}text"))]
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, f"{tag} is closed in its place"

    def handle_data(self, data):
        self.texts.append(data)
        if self._open and self._open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data

    @property
    def text(self):
        """All text of the page."""
        return " ".join(self.texts)

    def with_tag(self, tag):
        """The attributes of every element of a tag."""
        return [attributes for name, attributes in self.elements if name == tag]


def assert_loads_nothing(page):
    for tag, attributes in page.elements:
        if attributes.get("style") != "text-align:right":
            assert not LOADING & attributes.keys(), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "link", "iframe", "object", "embed", "base"})
    assert "url(" not in page.source
    assert "@import" not in page.source


def assert_tables_are_even(markdown):
    """Every row of a table has as many cells as its header."""
    tables = re.findall(r"(?:^\|.*\|\n)+", markdown, re.MULTILINE)
    assert tables
    for table in tables:
        cells = {len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(cells) == 1, table


def page_of(cli, folder, *references):
    done = cli("report", *references, "-o", str(folder / "report.html"))
    assert done.code == 0, done.err
    return Page(folder / "report.html")


def markdown_of(cli, folder, *references):
    done = cli("report", *references, "-o", str(folder / "report.md"))
    assert done.code == 0, done.err
    return (folder / "report.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def recorded(cache, tmp_path_factory):
    """A history with the recorded run, and its report as a page and as Markdown."""
    folder = tmp_path_factory.mktemp("reported")
    cli = Cli(folder / "home", folder / "config", cache)
    shutil.copytree(RECORDED, cli.home / "runs" / RECORDED.name)
    (folder / "report.md").write_text("a file is replaced")
    return cli, page_of(cli, folder, "last"), markdown_of(cli, folder, "last")


def test_a_page_holds_the_whole_run_and_loads_nothing(recorded):
    _, page, markdown = recorded
    assert_loads_nothing(page)
    for words in (
        "2.13.0+cpu",  # the machine
        "580.82.07",
        "batch_size=2",  # what was asked
        "18.6 samples/s",
        "MAD 8.64",
        "27.0 % by heat",
        "19.4 J",
        "other processes take 71 % of the CPU that trains",
        f"trainfast-tui export {RECORDED.name} --to FORM",
        "time since the run started",  # axes of pictures
        "1980 MHz",
        "optimizer states 25.5 MiB",
    ):
        assert words in page.text, words
    assert len({len(row) for row in page.tables[1]}) == 1
    assert len(page.pictures) >= 5
    assert all(one["alt"] for one in page.with_tag("img"))
    assert page.text.count("Throttled by heat from") >= 2, "heat held the GPU back twice"
    assert_tables_are_even(markdown)
    assert len(re.findall(r"^\| -+", markdown, re.MULTILINE)) == len(page.tables)


def test_settings_that_ran_otherwise_stand_beside_those_asked(recorded, cli, tmp_path):
    assert "is the one that was asked for" in recorded[2]
    lines = shutil.copytree(RECORDED, cli.home / "runs" / RECORDED.name) / "worker.jsonl"
    lines.write_text(lines.read_text().replace('"optimizer":"AdamW"', '"optimizer":"SGD"'))
    assert "| A | optimizer | AdamW | SGD (rank 0) |" in markdown_of(cli, tmp_path, "last")


def test_text_of_a_run_stays_text(cli, tmp_path):
    diagnosis = [Diagnosis(rule="thermal", line=EVIL, advice=EVIL)]
    changed = {"data.paths": [EVIL], "batch_size": 4}
    ended(cli.home, A, preset=EVIL, state="failed", reason=EVIL, diagnosis=diagnosis, overrides=changed)
    page = page_of(cli, tmp_path, "last")
    assert_loads_nothing(page)
    assert "<script>alert(1)</script>" in page.text
    assert "\x1b" not in page.source
    markdown = markdown_of(cli, tmp_path, "last")
    assert_tables_are_even(markdown)
    assert "<script" not in markdown
    assert "![i]" not in markdown, "no image that a viewer would fetch"
    assert "&lt;script&gt;" in markdown


def test_a_figure_that_was_not_measured_is_absent_and_never_zero(cli, tmp_path):
    ended(cli.home, A, memory=MemoryFigures())
    page = page_of(cli, tmp_path, "last")
    row = next(table for table in page.tables if "peak memory" in table[0])
    cells = dict(zip(row[0], row[1], strict=True))
    assert (cells["peak memory"], cells["predicted"], cells["J/sample"], cells["throttled"]) == ("–", "–", "–", "–")
    assert "– stands for a figure that was not measured." in page.text
    assert "No step was completed." in page.text, "there are no records to chart"


def test_a_run_that_is_running_has_no_report(cli, tmp_path):
    directory = cli.home / "runs" / A
    shutil.copytree(RECORDED, directory)
    (directory / "result.json").unlink()
    with (directory / "alive.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert "is still running" in cli("report", "last", "-o", str(tmp_path / "report.md")).refused()


def test_without_matplotlib_a_report_has_its_tables_and_says_how_to_get_pictures(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "can_draw", lambda: False)
    made, _ = report_document(Home(recorded[0].home), ["last"])
    (tmp_path / "report.html").write_text(blocks.as_html(made))
    page = Page(tmp_path / "report.html")
    assert page.pictures == []
    assert "pip install 'trainfast-tui[report]'" in page.text
    assert "Throttled by heat from" in page.text, "charts over time are sentences"


@pytest.fixture
def searched(cli):
    """A history with both searches, whose runs are copies of the recorded one and whose texts are no page's."""
    for run_id in (CONFIRMATION_ID, *COLD_IDS):
        result = shutil.copytree(RECORDED, cli.home / "runs" / run_id) / "result.json"
        result.write_text(result.read_text().replace(RECORDED.name, run_id))
    *tried, oom, confirmation, last, ended = answered()
    search(cli.home, *tried, replace(oom, reason=EVIL), replace(confirmation, step_ms=1661.0), last, ended)
    asked, *lines = best_answered()
    search(cli.home, replace(asked, title=EVIL), *lines, search_id=BEST_ID)
    return cli


def test_a_batch_search_has_its_sizes_and_its_confirmation_run(searched, tmp_path):
    page = page_of(searched, tmp_path, SEARCH_ID)
    assert_loads_nothing(page)
    tried = next(table for table in page.tables if table[0][0] == "batch size")
    assert [row[0] for row in tried[1:]] == ["8", "32", "42", "44", "42"]
    assert tried[-1][tried[0].index("step")] == "1,661 ms", "the median of the confirmation run's result"
    for words in (f"42, confirmed by {CONFIRMATION_ID}; 44 ran out of memory",):
        assert words in page.text
    markdown = markdown_of(searched, tmp_path, SEARCH_ID[:16])
    assert_tables_are_even(markdown)
    assert re.search(r"^\| 8 \| probe \| fits \| 290 MiB \|", markdown, re.MULTILINE)


def test_a_search_that_goes_on_is_reported_as_live(searched, tmp_path):
    with (searched.home / "searches" / SEARCH_ID / "search.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "The search is still running" in markdown_of(searched, tmp_path, SEARCH_ID)
    assert "still running" not in markdown_of(searched, tmp_path, SEARCH_ID)


def test_a_search_stands_alone_and_the_nearest_is_named(searched, tmp_path):
    file = str(tmp_path / "report.md")
    assert "exactly one search" in searched("report", SEARCH_ID, "last", "-o", file).refused()
    assert f"did you mean {SEARCH_ID}?" in searched("report", SEARCH_ID.replace("llama", "lama"), "-o", file).refused()
    assert "runs and searches" in searched("report", "20261121-", "-o", file).refused()


def test_a_best_fit_search_has_its_front_effects_verdicts(searched, tmp_path):
    page = page_of(searched, tmp_path, BEST_ID)
    assert_loads_nothing(page)
    verdicts = next(table for table in page.tables if "verdict" in table[0])
    assert {row[2] for row in verdicts[1:]} == {"measured", "beaten", "too large"}
    assert {row[3] for row in verdicts[1:] if row[2] == "beaten"} == {"–"}, "what was not measured has no figure"
    for words in (
        "batch_size=4 grad_accum=4 precision=bf16",
        "+44.4 % (+42.1 % to +46.8 %)",
        "60.5 samples/s (59.9 to 61.1)",
        "12: 5 measured, 6 beaten, 1 too large; another global batch: 3 combinations",
        "fastest in its memory",
        "two of 6 trials were disturbed by other processes",
    ):
        assert words in page.text, words
    assert "<script>alert(1)</script>" in page.text
    markdown = markdown_of(searched, tmp_path, BEST_ID)
    assert_tables_are_even(markdown)
    assert markdown.count("\n| ---") == len(page.tables)
    assert "<script" not in markdown


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tried_in_budget": 3}, r"3 of 12 tried when the budget ended(.|\n)*^\| best so far \|.*precision=bf16"),
        ({"within_percent": 8}, r"within 8.0 %, the noise of this machine: no setting is faster(.|\n)+\n\| chosen \|"),
    ],
)
def test_an_answer_without_a_winner_is_reported_as_such(cli, tmp_path, changes, words):
    search(cli.home, *best_answered(**changes), search_id=BEST_ID)
    assert re.search(words, markdown_of(cli, tmp_path, BEST_ID), re.MULTILINE)


def test_a_search_in_which_nothing_fits_says_by_how_much(cli, tmp_path):
    asked, conducted, space, *_ = best_answered()
    ended = BestEnded(state="nothing_fits", reason="every candidate is too large", missing_bytes=300 * MIB)
    search(cli.home, asked, conducted, space, ended, search_id=BEST_ID)
    page = page_of(cli, tmp_path, BEST_ID)
    assert "At least 300 MiB are missing." in page.text
    verdicts = next(table for table in page.tables if "verdict" in table[0])
    assert len(verdicts) == 1 + len(SPACE.candidates), "every candidate has a verdict all the same"
    assert "no machine or chart here" in page.text

"""`report`: runs or a search in one file that loads nothing and in which a run's text stays text."""

from __future__ import annotations

import fcntl
import re
import shutil
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from cli.command import Cli
from cli.history import result, write, write_lost
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Diagnosis, MemoryFigures, OomChange, OomExplanation
from trainfast_runner.records.run_file import PredictedSpeed
from trainfast_tui.report import as_html
from trainfast_tui.report.report_document import report_document

RECORDED = Path(__file__).parents[1] / "recorded_runs" / "20261121-133323-tiny-llama-d703"
"""24 steps on a CPU beside a GPU that is held back by heat twice."""
VOID = {"meta", "img"}
NAMESPACE = "{http://www.w3.org/2000/svg}"
SVG = "data:image/svg+xml;base64,"
LOADING = {"href", "srcset", "data", "action", "poster", "background", "style", "xlink:href"}
"""Attributes that can make a browser fetch something."""
MIB = 1 << 20
EVIL = '<script>alert(1)</script> <img src="http://a.example/x"> | `code` ![i](http://a.example/y) \x1b[31m</td>'


class Page(HTMLParser):
    """A page, read as a browser does: its elements, their attributes and their text."""

    def __init__(self, path: Path) -> None:
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

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
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

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"{tag} is closed in its place"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._open and self._open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data

    @property
    def text(self) -> str:
        """All text of the page."""
        return " ".join(self.texts)

    def with_tag(self, tag: str) -> list[dict[str, str]]:
        """The attributes of every element of a tag."""
        return [attributes for name, attributes in self.elements if name == tag]


def assert_loads_nothing(page: Page) -> None:
    for tag, attributes in page.elements:
        assert not LOADING & attributes.keys(), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "link", "iframe", "object", "embed", "base"})
    assert "url(" not in page.source
    assert "@import" not in page.source


def assert_tables_are_even(markdown: str) -> None:
    """Every row of a table has as many cells as its header."""
    tables = re.findall(r"(?:^\|.*\|\n)+", markdown, re.MULTILINE)
    assert tables
    for table in tables:
        cells = {len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(cells) == 1, table


@pytest.fixture
def recorded(cli: Cli) -> Cli:
    """A history with the recorded run."""
    shutil.copytree(RECORDED, cli.home / "runs" / RECORDED.name)
    return cli


def page_of(cli: Cli, folder: Path, *references: str) -> Page:
    done = cli("report", *references, "-o", str(folder / "report.html"))
    assert done.code == 0, done.err
    return Page(folder / "report.html")


def markdown_of(cli: Cli, folder: Path, *references: str) -> str:
    done = cli("report", *references, "-o", str(folder / "report.md"))
    assert done.code == 0, done.err
    return (folder / "report.md").read_text(encoding="utf-8")


def test_a_page_holds_the_whole_run_and_loads_nothing(recorded: Cli, tmp_path: Path) -> None:
    page = page_of(recorded, tmp_path, "last")
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
        "TrainingArguments(",  # the exports
        "trainfast-tui run tiny-llama --set batch_size=2",
        "Not as deepspeed",
    ):
        assert words in page.text, words
    assert len({len(row) for table in page.tables for row in table if table is page.tables[1]}) == 1


def test_every_picture_is_named_described_and_has_axes_with_units(recorded: Cli, tmp_path: Path) -> None:
    page = page_of(recorded, tmp_path, "last")
    assert len(page.pictures) >= 8
    assert all(one["alt"] for one in page.with_tag("img"))
    for words in ("time since the run started", "samples/s", "milliseconds, medians of the measured steps", "1980 MHz"):
        assert words in page.text


def test_throttled_time_is_shaded_and_named(recorded: Cli, tmp_path: Path) -> None:
    page = page_of(recorded, tmp_path, "last")
    assert page.text.count("Throttled by heat from") >= 2, "heat held the GPU back twice"
    throttled = next(
        line for line in markdown_of(recorded, tmp_path, "last").splitlines() if line.startswith("throttled  ")
    )
    assert re.fullmatch(r"throttled +T+ +T+ +T throttled by heat", throttled)


def test_settings_that_ran_otherwise_stand_beside_those_asked(recorded: Cli, tmp_path: Path) -> None:
    assert "is the one that was asked for" in markdown_of(recorded, tmp_path, "last")
    lines = recorded.home / "runs" / RECORDED.name / "worker.jsonl"
    lines.write_text(lines.read_text().replace('"optimizer":"AdamW"', '"optimizer":"SGD"'))
    assert "| A | optimizer | AdamW | SGD (rank 0) |" in markdown_of(recorded, tmp_path, "last")


def test_a_run_out_of_memory_says_what_would_fit(cli: Cli, tmp_path: Path) -> None:
    change = OomChange(settings={"batch_size": "2"}, saves="100 MiB", costs="little")
    explained = OomExplanation(needed_bytes=300 * MIB, limit_bytes=200 * MIB, changes=[change])
    write(cli.home, result("20261101-100000-t-aaaa", state="oom", reason="no memory", oom=explained))
    markdown = markdown_of(cli, tmp_path, "last")
    assert "100 MiB too much" in markdown
    assert "| --set batch_size=2 | 100 MiB | little |" in markdown
    assert "out of memory: no memory |" in markdown


def test_a_run_that_was_not_throttled_has_no_shade(cli: Cli, tmp_path: Path) -> None:
    write(cli.home, result("20261101-100000-tiny-llama-aaaa"))
    page = page_of(cli, tmp_path, "last")
    assert "Throttled" not in page.text


def test_memory_is_predicted_by_category_beside_the_measured_peak(recorded: Cli, tmp_path: Path) -> None:
    words = " ".join(markdown_of(recorded, tmp_path, "last").split())
    assert "| A | forward and backward | 12.8 MiB | 0 B | 25.5 MiB | 10.2 MiB |" in words
    page = page_of(recorded, tmp_path, "last")
    assert "optimizer states 25.5 MiB" in page.text, "a bar's parts are named"
    assert "75.4 MiB measured" in page.text


def test_markdown_has_the_same_tables_and_says_which_pictures_are_left_out(recorded: Cli, tmp_path: Path) -> None:
    page, markdown = page_of(recorded, tmp_path, "last"), markdown_of(recorded, tmp_path, "last")
    assert_tables_are_even(markdown)
    assert len(re.findall(r"^\| -+", markdown, re.MULTILINE)) == len(page.tables)
    assert "Picture left out: phases of a step" in markdown
    assert "▁" in markdown, "charts over time are lines of text"


def test_text_of_a_run_stays_text(cli: Cli, tmp_path: Path) -> None:
    diagnosis = [Diagnosis(rule="thermal", line=EVIL, advice=EVIL)]
    changed = {"data.paths": [EVIL], "batch_size": 4}
    write(
        cli.home,
        result(
            "20261101-100000-t-aaaa", preset=EVIL, state="failed", reason=EVIL, diagnosis=diagnosis, overrides=changed
        ),
    )
    page = page_of(cli, tmp_path, "last")
    assert_loads_nothing(page)
    assert "<script>alert(1)</script>" in page.text
    assert "\x1b" not in page.source
    markdown = markdown_of(cli, tmp_path, "last")
    assert_tables_are_even(markdown)
    assert "<script" not in markdown
    assert "![i]" not in markdown, "no image that a viewer would fetch"
    assert "&lt;script&gt;" in markdown


def test_speed_is_predicted_beside_the_measured_one(cli: Cli, tmp_path: Path) -> None:
    predicted = PredictedSpeed(median=80.0, low=70.0, high=95.0, basis="2 runs of this model")
    for run_id, speed in (("20261101-100000-tiny-llama-aaaa", predicted), ("20261101-100001-tiny-llama-bbbb", None)):
        one = result(run_id)
        throughput = msgspec.structs.replace(one.throughput, predicted=speed)
        write(cli.home, msgspec.structs.replace(one, throughput=throughput))
    page = page_of(cli, tmp_path, "20261101-100000-tiny-llama-aaaa")
    assert_loads_nothing(page)
    table = next(table for table in page.tables if "predicted samples/s" in table[0])
    assert table[1:] == [["A", "80.0", "70.0 to 95.0", "100", "+25.0 %", "no", "2 runs of this model"]]
    assert "80.0 predicted" in page.text
    assert "100 measured" in page.text
    assert "Speed predicted" not in page_of(cli, tmp_path, "last").text


def test_a_figure_that_was_not_measured_is_absent_and_never_zero(cli: Cli, tmp_path: Path) -> None:
    write(cli.home, result("20261101-100000-tiny-llama-aaaa", memory=MemoryFigures()))
    page = page_of(cli, tmp_path, "last")
    row = next(table for table in page.tables if "peak memory" in table[0])
    cells = dict(zip(row[0], row[1], strict=True))
    assert (cells["peak memory"], cells["predicted"], cells["J/sample"], cells["throttled"]) == ("–", "–", "–", "–")
    assert "– stands for a figure that was not measured." in page.text
    assert "No peak was predicted, and none was measured." in page.text
    assert "No step was completed." in page.text, "there are no records to chart"


def test_a_lost_run_is_reported_as_far_as_it_came(cli: Cli, tmp_path: Path) -> None:
    write_lost(cli.home, "20261101-100000-tiny-llama-aaaa", steps=7)
    page = page_of(cli, tmp_path, "last")
    assert_loads_nothing(page)
    assert "lost: " in page.text
    assert "Not as command: 20261101-100000-tiny-llama-aaaa has no model in its run.json." in page.text


def test_runs_are_compared_with_the_first(cli: Cli, tmp_path: Path) -> None:
    write(cli.home, result("20261101-100000-tiny-llama-aaaa", samples_per_s=100.0))
    write(cli.home, result("20261102-100000-tiny-llama-bbbb", samples_per_s=130.0, overrides={"batch_size": 16}))
    done = cli("report", "20261101", "last", "20261101", "-o", str(tmp_path / "two.md"), "--json")
    assert done.json == {
        "file": str(tmp_path / "two.md"),
        "runs": ["20261101-100000-tiny-llama-aaaa", "20261102-100000-tiny-llama-bbbb"],
        "bytes": (tmp_path / "two.md").stat().st_size,
    }
    markdown = (tmp_path / "two.md").read_text()
    assert "| against A |" in markdown
    assert "+30.0 % (95 % CI: " in markdown
    assert "): better |" in markdown
    assert "batch_size=16" in markdown
    assert "Memory against throughput" in markdown
    assert_tables_are_even(markdown)


def test_a_file_is_replaced(recorded: Cli, tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text("old")
    assert markdown_of(recorded, tmp_path, "last").startswith("# tiny-llama")


def test_bad_input_is_one_line_and_writes_nothing(recorded: Cli, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    unknown = recorded("report", "20261121-133323-tiny-lama-d703", "-o", str(file)).refused()
    assert "did you mean 20261121-133323-tiny-llama-d703?" in unknown
    ending = recorded("report", "last", "-o", str(tmp_path / "report.pdf")).refused()
    assert "(allowed: .html, .md)" in ending
    assert "there is no folder" in recorded("report", "last", "-o", str(tmp_path / "no" / "report.md")).refused()
    (tmp_path / "folder.md").mkdir()
    assert "is a folder" in recorded("report", "last", "-o", str(tmp_path / "folder.md")).refused()
    # Root learns only at the end that it cannot write here.
    assert "/proc/report.md" in recorded("report", "last", "-o", "/proc/report.md").err
    assert "-o" in recorded("report", "last").refused()
    assert list(tmp_path.glob("*.html")) == []


def test_a_report_that_the_disk_has_no_space_for_is_a_failure(recorded: Cli, tmp_path: Path) -> None:
    (tmp_path / "report.md").symlink_to("/dev/full")
    done = recorded("report", "last", "-o", str(tmp_path / "report.md"))
    assert done.code == 4
    assert done.err == f"trainfast-tui: cannot write {tmp_path / 'report.md'}: No space left on device\n"


def test_a_run_that_is_running_has_no_report(cli: Cli, tmp_path: Path) -> None:
    directory = cli.home / "runs" / "20261101-100000-tiny-llama-aaaa"
    shutil.copytree(RECORDED, directory)
    (directory / "result.json").unlink()
    with (directory / "alive.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert "is still running" in cli("report", "last", "-o", str(tmp_path / "report.md")).refused()


def test_runs_of_other_work_are_not_in_the_picture_of_memory_and_throughput(cli: Cli, tmp_path: Path) -> None:
    write(cli.home, result("20261101-100000-tiny-llama-aaaa", samples_per_s=100.0))
    write(cli.home, result("20261102-100000-tiny-llama-bbbb", samples_per_s=130.0, knobs={"seq_len": 64}))
    cli("report", "20261101", "20261102", "-o", str(tmp_path / "two.md"))
    assert "Memory against throughput" not in (tmp_path / "two.md").read_text()


def test_without_matplotlib_a_report_has_its_tables_and_says_how_to_get_pictures(
    recorded: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(as_html, "can_draw", lambda: False)
    made, _ = report_document(Home(recorded.home), ["last"])
    (tmp_path / "report.html").write_text(as_html.as_html(made))
    page = Page(tmp_path / "report.html")
    assert page.pictures == []
    assert "pip install 'trainfast-tui[report]'" in page.text
    assert "▁" in page.text, "charts over time are lines of text"
    assert "Picture left out: phases of a step" in page.text

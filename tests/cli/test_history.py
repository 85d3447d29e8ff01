"""`runs`: what was trained before, shown, compared, step by step, and pruned; transcripts have the rest."""

import fcntl
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack

import msgspec
import pytest

from cli.command import SMALL
from on_disk import A, B, ended, lost, put, result, run_file, search, started
from on_disk import A as RUN
from trainfast_runner.records.home import STAMP_FORMAT, Home
from trainfast_runner.records.result import STRICT_SPEED, RunConditions, Spread, Throttle, Throughput
from trainfast_runner.records.run_directory import read_records, shared_lock
from trainfast_runner.records.run_file import ForeignProcess
from trainfast_runner.records.run_lines import Actual
from trainfast_runner.results.summary import summarise
from trainfast_runner.results.verdict import Verdict
from trainfast_runner.running.history import iter_rows
from trainfast_runner.worker.shared.words import PROBE
from trainfast_tui.cli import printing
from trainfast_tui.screens.runs import RunsTable
from trainfast_tui.text.format import FigureHeading


def test_a_narrow_terminal_goes_without_columns_and_cuts_no_number(monkeypatch, capsys):
    rows = [["run-one", "finished", "batch_size=64", "1,234 samples/s"]]
    header = ["RUN", "STATE", "OVERRIDES", FigureHeading("SAMPLES")]
    for width in range(16, 60):
        monkeypatch.setattr(printing, "terminal_width", lambda width=width: width)
        printing.print_table(header, rows, drop=("STATE", "OVERRIDES", "SAMPLES"))
        lines = capsys.readouterr().out.splitlines()
        assert all(len(line) <= width for line in lines)
        words = set(" ".join(rows[0]).split())
        assert set(lines[1].split()) <= words


def test_of_a_run_that_has_ended_the_list_opens_one_file(cli, monkeypatch):
    """That makes ten thousand of them a second; `python -m benchmarks` measures it."""
    encoded = msgspec.json.encode(result("20261101-100000-tiny-llama-0000")).decode()
    for number in range(300):
        run_id = f"20261101-{number:06d}-tiny-llama-{number:04x}"
        directory = cli.home / "runs" / run_id
        directory.mkdir(parents=True)
        (directory / "result.json").write_text(encoded.replace("20261101-100000-tiny-llama-0000", run_id))
    assert len(cli("runs", "list", "--json").json["runs"]) == 300
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *more: opened.append(str(path)) or real(path, *more))
    rows = iter_rows(Home(cli.home))
    assert next(rows).run_id == "20261101-000299-tiny-llama-012b"
    assert len(opened) == 1, "who wants one row reads one"
    assert len(list(rows)) == 299
    assert len(opened) == 300


QUIET, BUSY = A, B
SHARED = RunConditions(foreign_processes=[ForeignProcess(pid=1)])
ON_GPU = {"actual": Actual(device="cuda")}
UNDER_STRICT = Throughput(samples_per_s=Spread(median=13.7, mad=0.1), measured_under=STRICT_SPEED)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("other_processes", {"conditions": RunConditions(others_cpu_percent=76)}),
        ("heat", {**ON_GPU, "throttle": Throttle(thermal_fraction=0.3)}),
        ("power_brake", {**ON_GPU, "throttle": Throttle(brake_fraction=0.3)}),
        ("shared_gpu", {**ON_GPU, "conditions": RunConditions(foreign_processes=[ForeignProcess()])}),
        ("warming_up", {"conditions": RunConditions(still_warming=True)}),
        ("uneven_speed", {"throughput": Throughput(samples_per_s=Spread(median=13.7, mad=0.1, mean=8.0))}),
        ("few_steps", {"steps": 4}),
        ("strict_malloc", {"throughput": UNDER_STRICT}),
    ],
)
def test_a_doubt_is_one_verdict_in_compare_history_and_json(cli, kind, fields):
    ended(cli.home, QUIET, samples_per_s=30.8, mad=0.1, actual=fields.get("actual", Actual(device="cpu")))
    ended(cli.home, BUSY, **{"samples_per_s": 13.7, "mad": 0.1, **fields})
    for pair in ((QUIET, BUSY), (BUSY, QUIET), (BUSY, BUSY)):
        found = cli("runs", "compare", *pair, "--json").json
        assert kind in [doubt["kind"] for doubt in found["doubts"]]
        verdicts = {row["label"]: row["verdict"] for row in found["rows"]}
        expected = "not comparable: strict malloc thresholds" if kind == "strict_malloc" else "doubtful"
        assert (verdicts["throughput"], verdicts["step"]) == (expected, expected)
        assert verdicts["peak allocated"] == "no significant difference", "memory is as measured"
    [shown] = cli("runs", "show", BUSY, "--json").json["doubts"]
    listed = {row["run_id"]: row["doubts"] for row in cli("runs", "list", "--json").json["runs"]}
    assert (shown["kind"], listed) == (kind, {QUIET: [], BUSY: [shown]})
    assert shown["text"] in cli("runs", "show", BUSY).out
    assert f"? {shown['text']}" in cli("runs", "compare", QUIET, BUSY).out.replace("? B ", "? ")
    busy, quiet = iter_rows(Home(cli.home))
    assert ("? 13.7", "warning") in [(text.strip(), tone) for text, tone in RunsTable().row_line(busy, 120)]
    assert "?" not in "".join(text for text, _ in RunsTable().row_line(quiet, 120))


@pytest.mark.ci
@pytest.mark.long
def test_a_short_run_beside_a_busy_loop_is_doubtful(cli):
    """The steps take less than a second: none of the host's samples falls into them."""
    with ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        ran = cli("run", "tiny-llama", *SMALL, "--set", "steps=12", "--json").json
    assert "other_processes" in [doubt["kind"] for doubt in ran["doubts"]]
    assert ran["doubts"] == cli("runs", "list", "--json").json["runs"][0]["doubts"]


S = 1_000_000_000


def write_hot_run(home):
    """Ten steps of a second on a CPU that watch GPU 2, throttled by heat from second 5 on, at half its clock."""
    run = run_file(RUN, knobs={"workers": 0}, watch_uuids=["GPU-b"])
    directory = put(home / "runs" / RUN / "run.json", run)
    steps = [
        {"t_ns": n * S, "step": n, "warmup": n < 3, "samples": 8, "tokens": 80, "step_ms": 1000, "data_ms": 5}
        for n in range(1, 11)
    ]
    ticks = [
        {
            "t_ns": n * S,
            "devices": [
                {
                    "index": 2, "uuid": "GPU-b", "temperature_c": 90 + n // 4, "slowdown_temperature_c": 91,
                    "thermal_violation_ns": max(0, n - 5) * S, "energy_mj": n * 200_000,
                    "sm_clock_mhz": 990 if n >= 5 else 1980, "sm_clock_max_mhz": 1980,
                }
            ],
        }
        for n in range(12)
    ]  # fmt: skip
    put(directory / "steps.jsonl", *steps)
    put(directory / "telemetry.jsonl", *ticks)
    summary = summarise(directory, read_records(directory), Verdict("finished", ""), 12 * S)
    put(directory / "result.json", summary)


def test_each_step_has_its_throttled_milliseconds(cli):
    write_hot_run(cli.home)
    steps = cli("runs", "show", "last", "--steps", "--json").json["steps"]
    assert [step["step"] for step in steps] == list(range(1, 11))
    assert [round(step["throttled_ms"]["thermal"]) for step in steps] == [0] * 5 + [1000] * 5
    assert steps[7]["throttled_ms"]["power"] is None
    assert (steps[7]["energy_joules"], steps[7]["joules_per_sample"]) == (pytest.approx(200), pytest.approx(25))
    assert (steps[7]["clock_loss_fraction"], steps[7]["temperature_c"]) == (pytest.approx(0.5), 91)
    assert steps[7]["data_ms"] == 5
    header, *rows = cli("runs", "show", "last", "--steps").out.splitlines()
    assert re.split("  +", header.strip()) == [
        *("STEP", "TOOK", "DATA", "HEAT", "CLOCK LOSS", "ENERGY", "A SAMPLE", "TEMP AT START")
    ]
    assert rows[7].split()[:8] == ["8", "1,000", "ms", "5.00", "ms", "1,000", "ms", "50.0"]
    assert rows[7].endswith("91 °C")


def test_a_verdict_opens_to_its_numbers(cli):
    write_hot_run(cli.home)
    (finding,) = cli("runs", "show", "last", "--json").json["diagnosis"]
    assert (finding["rule"], finding["device"]) == ("thermal", 2)
    assert finding["evidence"]["thermal_ms_per_step"] == pytest.approx(625)
    assert (finding["cost_ms_per_step"], finding["cost_fraction"]) == (None, None), "the run does not use that GPU"
    shown = cli("runs", "show", "last").out
    assert (
        "bottleneck: watched GPU 2 is throttled by heat for 625 of each 1,000 ms step, at 92 °C, 1 °C over the" in shown
    )
    assert "  try: cooling" in shown
    assert "the run was throttled by heat on GPU 2 for 62.5 % of the measured time" in shown
    assert "; ? heat" in shown
    opened = cli("runs", "show", "last", "--why").out
    assert re.search(r"throttled by heat +62\.5 % +counts from 2\.0 %", opened)
    assert "92 °C" in opened
    assert "source    chosen: two runs" in opened


OLD, MIDDLE, NEW = (f"2025110{n}-100000-tiny-llama-aaaa" for n in (1, 2, 3))


def old_search(home, minute=0):
    return search(home, {"kind": "paused", "t_ns": 1}, search_id=f"20251101-09{minute:02}00-tiny-llama-5555")


def runs(cli):
    return sorted(path.name for path in (cli.home / "runs").iterdir())


def test_a_live_run_or_search_and_what_belongs_to_it_stay(cli):
    lost(cli.home, OLD)
    live, idle = (old_search(cli.home, minute) for minute in (1, 2))
    for run_id, of_search in ((MIDDLE, live), (NEW, idle)):
        for write in (ended, started):
            write(cli.home, run_id, role=PROBE, search_id=of_search.name)
    being_made = f"{time.strftime(STAMP_FORMAT, time.gmtime(time.time() - 1))}-tiny-llama-bbbb"
    (cli.home / "runs" / being_made).mkdir()
    with shared_lock(cli.home / "runs" / OLD), (live / "search.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = cli("runs", "prune", "--keep", "0", "--yes", "--json").json
    assert found["live"] == [OLD, MIDDLE, being_made, live.name]
    assert runs(cli) == [OLD, MIDDLE, being_made]
    assert [path.name for path in (cli.home / "searches").iterdir()] == [live.name]
    assert found["left"] == []


def test_foreign_folders_below_runs_and_searches_stay(cli):
    """`runs` is TensorBoard's default folder, and TRAINFAST_HOME may be a project's own directory."""
    ended(cli.home, OLD)
    old_search(cli.home)
    foreign = [
        *(cli.home / "runs" / name for name in ("CartPole_Nov22", "20240101-notes", "20240101-100000-cartpole-beef")),
        cli.home / "searches" / "20240101-notes",
        cli.home / "searches" / "hyperparameters",
    ]
    for folder in foreign:
        folder.mkdir()
        (folder / "events.out.tfevents").touch()
    (foreign[-1] / "journal.jsonl").write_text("{}")
    (cli.home / "runs" / "zzz-empty").mkdir()
    left_by_a_launch = cli.home / "runs" / "20240101-100000-tiny-llama-cccc"
    left_by_a_launch.mkdir()
    found = cli("runs", "prune", "--keep", "0", "--yes", "--json").json
    assert [one["run_id"] for one in found["runs"]] == [left_by_a_launch.name, OLD]
    assert runs(cli) == sorted([*(folder.name for folder in foreign[:3]), "zzz-empty"])
    assert sorted((cli.home / "searches").iterdir()) == sorted(foreign[3:])
    assert all((folder / "events.out.tfevents").exists() for folder in foreign)

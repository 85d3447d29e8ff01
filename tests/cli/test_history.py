"""`runs`: what was trained before, listed, shown and deleted."""

from __future__ import annotations

import os

import msgspec
import pytest

from cli.command import Cli
from cli.history import result, write, write_lost
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Cpu, Losses, MemoryFigures, OomExplanation, RunError, Thinning
from trainfast_runner.records.run_lines import Actual, Step
from trainfast_runner.running.history import iter_rows
from trainfast_tui.cli.printing import output
from trainfast_tui.text.tables import FigureHeading
from trainfast_tui.widgets.tables.runs_table import RunsTable


def test_an_empty_history_says_what_to_do(cli: Cli) -> None:
    assert cli("runs", "list").out == "no run yet: trainfast-tui run tiny-llama\n"
    assert cli("runs", "list", "--json").json == {"schema": 1, "runs": []}
    assert "there is no run yet" in cli("runs", "show", "last").refused()


def test_list_is_newest_first_and_filtered(cli: Cli) -> None:
    write(cli.home, result("20261101-100000-tiny-llama-aaaa"))
    write(cli.home, result("20261102-100000-guide-vanilla-bbbb", preset="guide", variant="vanilla", state="oom"))
    write(cli.home, result("20261103-100000-tiny-llama-cccc", synthetic_data=True))
    rows = cli("runs", "list", "--json").json["runs"]
    assert [row["run_id"][-4:] for row in rows] == ["cccc", "bbbb", "aaaa"]
    assert rows[0]["samples_per_s"] == 100.0
    assert rows[0]["knobs"]["batch_size"] == 8
    assert rows[1]["step_ms_p50"] == 80.0
    assert [row["run_id"][-4:] for row in cli("runs", "list", "--state", "oom", "--json").json["runs"]] == ["bbbb"]
    for preset in ("guide", "guide/vanilla"):
        assert len(cli("runs", "list", "--preset", preset, "--json").json["runs"]) == 1
    assert len(cli("runs", "list", "-n", "2", "--json").json["runs"]) == 2
    table = cli("runs", "list").out.splitlines()
    assert table[0].split() == [
        *("RUN", "STATE", "OVERRIDES", "SAMPLES", "STEP", "PEAK", "MEMORY", "TOOK", "STARTED", "NOTE")
    ]
    assert "synthetic data" in table[1]
    assert "100 samples/s" in table[3]
    assert "200 MiB" in table[3]


def test_an_unknown_run_has_the_nearest_one_and_the_way_to_list_them(cli: Cli) -> None:
    for run_id in ("20261101-100000-tiny-llama-aaaa", "20261102-100000-tiny-llama-bbbb"):
        write(cli.home, result(run_id))
    assert cli("runs", "rm", "nope").refused().endswith("there is no run 'nope'; try trainfast-tui runs list")
    assert "did you mean 20261101-100000-tiny-llama-aaaa?" in cli("runs", "rm", "20261101-100000-tiny-lama").refused()
    for part, run_id in (
        ("tiny-llama", "20261102-100000-tiny-llama-bbbb"),
        ("aaaa", "20261101-100000-tiny-llama-aaaa"),
    ):
        assert cli("runs", "rm", part, "--json").json["error"]["nearest"] == run_id
    assert len(cli("runs", "list", "--json").json["runs"]) == 2


def test_what_a_search_sets_in_its_runs_is_not_shown_as_changed(cli: Cli) -> None:
    searched = {"data.kind": "random", "batch_size": 4, "memory_limit": None, "steps": 11, "timing_warmup": 3}
    write(cli.home, result("20261101-100000-tiny-llama-aaaa", role="cold", overrides=searched))
    write(cli.home, result("20261102-100000-tiny-llama-bbbb", overrides={"steps": 11, "memory_limit": None}))
    by_itself, of_a_search = cli("runs", "list").out.splitlines()[1:]
    assert "steps=11 memory_limit=none" in by_itself
    assert "data.kind=random batch_size=4  " in of_a_search
    by_itself, of_a_search = (
        "".join(text for text, _ in RunsTable().row_line(row, 160)) for row in iter_rows(Home(cli.home))
    )
    assert "steps=11 memory_limit=none" in by_itself
    assert of_a_search.endswith("data.kind=random batch_size=4  a search's run")
    shown = cli("runs", "show", "20261101").out.splitlines()[-1]
    assert shown == "settings: data.kind=random batch_size=4"
    assert cli("runs", "list", "--json").json["runs"][1]["changed"] == searched


def test_a_script_without_a_step_says_why(cli: Cli) -> None:
    why = "no optimizer step seen: torch was imported, but none of its optimizers took a step"
    write(cli.home, result("20261101-100000-early-py-aaaa", reason=why, steps=0))
    assert f"finished: {why}" in cli("runs", "show", "last").out
    assert why in cli("runs", "list").out
    [row] = iter_rows(Home(cli.home))
    assert why in "".join(text for text, _ in RunsTable().row_line(row, 200))


def test_a_raw_count_of_bytes_has_its_size_behind_it_and_is_recorded_alone(cli: Cli) -> None:
    why = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 6442450944 bytes."
    write(cli.home, result("20261101-100000-tiny-llama-aaaa", state="oom", reason=why))
    for words in (("runs", "show", "last"), ("runs", "list")):
        assert "you tried to allocate 6442450944 bytes (6.00 GiB)." in cli(*words).out
    assert cli("runs", "show", "last", "--json").json["reason"] == why
    [row] = iter_rows(Home(cli.home))
    assert "6442450944 bytes (6.00 GiB)" in "".join(text for text, _ in RunsTable().row_line(row, 200))


def test_a_finished_run_keeps_its_reason_to_itself(cli: Cli) -> None:
    write(cli.home, result("20261101-100000-tiny-llama-aaaa", reason="took all 43 steps"))
    assert "took all" not in cli("runs", "show", "last").out + cli("runs", "list").out


@pytest.mark.parametrize(
    ("recorded", "words"),
    [
        (1, "6.83 (one value)"),
        (3, "6.83 (mean of 3 values)"),
        (6, "6.83 to 6.50 (means of the first and last five)"),
        (None, "6.83 to 6.50 (means of the first and last five)"),
    ],
)
def test_a_loss_names_the_values_behind_it(cli: Cli, recorded: int | None, words: str) -> None:
    last = 6.5 if recorded is None or recorded > 5 else 6.83
    write(cli.home, result("20261101-100000-a-aaaa", loss=Losses(first=6.83, last=last, recorded=recorded)))
    assert words in cli("runs", "show", "last").out


def test_what_was_changed_tells_runs_of_one_preset_apart(cli: Cli) -> None:
    changed = {"batch_size": 64, "memory_limit": "1GiB", "model.hidden_size": 32, "data.paths": ["/a/b.txt", "/c.txt"]}
    write(cli.home, result("20261101-100000-tiny-llama-aaaa"))
    write(cli.home, result("20261102-100000-tiny-llama-bbbb", overrides=changed))
    assert cli("runs", "list", "--json").json["runs"][0]["changed"] == changed
    table = cli("runs", "list").out
    assert "batch_size=64 memory_limit=1GiB +2 " in table
    shown = cli("runs", "show", "last").out
    assert "settings: batch_size=64 memory_limit=1GiB model.hidden_size=32 data.paths=/a/b.txt+/c.txt" in shown
    assert "settings: as the preset sets them" in cli("runs", "show", "20261101").out


def test_the_steps_of_a_long_run_are_printed_as_a_share(cli: Cli) -> None:
    run_id = "20261101-100000-tiny-llama-aaaa"
    thinning = Thinning(steps_looked_at=2, steps_dropped=90_000)
    write(cli.home, result(run_id, steps=100_000, thinning=thinning))
    lines = [Step(t_ns=n * 10**9, step=n, samples=8, tokens=80, step_ms=80.0) for n in (1, 100_003)]
    (cli.home / "runs" / run_id / "steps.jsonl").write_bytes(
        b"".join(msgspec.json.encode(one) + b"\n" for one in lines)
    )
    shown = cli("runs", "show", "last", "--steps").out
    assert shown.splitlines()[-1] == "note: a long run: these are 2 of its 100,003 steps"
    assert cli("runs", "show", "last", "--steps", "--json").json["thinning"]["steps_dropped"] == 90_000
    assert "steps were dropped: steps.jsonl had reached its cap" in cli("runs", "show", "last").out


def test_a_narrow_terminal_goes_without_columns_and_cuts_no_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [["run-one", "finished", "batch_size=64", "1,234 samples/s"]]
    header = ["RUN", "STATE", "OVERRIDES", FigureHeading("SAMPLES")]
    for width in range(16, 60):
        monkeypatch.setattr(output, "terminal_width", lambda width=width: width)
        output.print_table(header, rows, drop=("STATE", "OVERRIDES", "SAMPLES"))
        lines = capsys.readouterr().out.splitlines()
        assert all(len(line) <= width for line in lines)
        words = set(" ".join(rows[0]).split())
        assert set(lines[1].split()) <= words


def test_few_steps_have_no_percentiles(cli: Cli) -> None:
    write(cli.home, result("20261101-100000-tiny-llama-aaaa", steps=3))
    text = cli("runs", "show", "last").out
    assert "few steps" in text
    assert "p90" not in text
    assert "MAD" not in text


def test_the_speed_of_one_timed_step_says_so(cli: Cli) -> None:
    write(cli.home, result("20261101-100000-tiny-llama-aaaa", steps=1))
    text = cli("runs", "show", "last").out
    assert "100 samples/s (1 timed step; ? few steps)" in text
    assert "80.0 ms (1 timed step)" in text
    assert "? few steps" in cli("runs", "list").out
    [row] = iter_rows(Home(cli.home))
    assert "? few steps" in "".join(text for text, _ in RunsTable().row_line(row, 110))
    assert "measured 1 step: too few" in cli("runs", "compare", "last", "last").out


def test_which_adamw_ran_is_printed(cli: Cli) -> None:
    ran = Actual(device="cpu", world_size=1, optimizer="AdamW", optimizer_implementation="fused")
    write(cli.home, result("20261101-100000-tiny-llama-aaaa", actual=ran))
    assert "AdamW (fused)" in cli("runs", "show", "last").out


def test_why_another_optimizer_ran_is_printed(cli: Cli) -> None:
    ran = Actual(device="cpu", world_size=2, optimizer="AdamW", optimizer_reason="torch's AdamW instead of another")
    write(cli.home, result("20261101-100000-tiny-llama-aaaa", actual=ran))
    assert "torch's AdamW instead of another" in cli("runs", "show", "last").out


def test_a_preset_that_was_never_there_is_refused(cli: Cli) -> None:
    write(cli.home, result("20261101-100000-gone-aaaa", preset="gone"))
    assert "did you mean tiny-llama?" in cli("runs", "list", "--preset", "tiny-lama").refused()
    assert cli("runs", "list", "--preset", "tiny-llama").out == "no matching runs\n"
    assert cli("runs", "list", "--preset", "gone", "--state", "oom").out == "no matching runs\n"
    cli.presets.mkdir(exist_ok=True)
    (cli.presets / "mine.toml").write_text('schema = 1\n[script]\ncommand = ["python", "train.py"]\n')
    assert cli("runs", "list", "--preset", "mine").out == "no matching runs\n"


def test_a_lost_run_gets_its_result_and_keeps_its_steps(cli: Cli) -> None:
    write_lost(cli.home, "20261101-100000-tiny-llama-aaaa", steps=7)
    (row,) = cli("runs", "list", "--json").json["runs"]
    assert row["state"] == "lost"
    assert "7 steps recorded" in row["reason"]
    shown = cli("runs", "show", "last", "--json")
    assert shown.code == 0
    assert shown.json["state"] == "lost"
    assert shown.json["steps"]["measured"] == 4
    assert cli("attach", "last").code == 5


@pytest.mark.parametrize("content", [b'{"schema": 1, "run', b'{"schema": 1, "run_id": "\xff"}'])
def test_a_damaged_result_is_no_crash(cli: Cli, content: bytes) -> None:
    write(cli.home, result("20261101-100000-tiny-llama-aaaa"))
    write_lost(cli.home, "20261102-100000-tiny-llama-bbbb", steps=2)
    (cli.home / "runs" / "20261102-100000-tiny-llama-bbbb" / "result.json").write_bytes(content)
    (cli.home / "runs" / "stray-file").write_text("")
    (cli.home / "runs" / "stray-directory").mkdir()
    done = cli("runs", "list", "--json")
    assert done.code == 0, done.err
    by_id = {row["run_id"][-4:]: row["state"] for row in done.json["runs"]}
    assert by_id["aaaa"] == "finished"
    assert by_id["bbbb"] == "lost"


def test_folders_of_other_programs_are_no_runs(cli: Cli) -> None:
    """`runs` is TensorBoard's default folder too."""
    run_id = "20261101-100000-tiny-llama-aaaa"
    write(cli.home, result(run_id))
    for name in ("CartPole_Nov22", "zzz"):
        (cli.home / "runs" / name).mkdir()
    assert [row["run_id"] for row in cli("runs", "list", "--json").json["runs"]] == [run_id]
    assert cli("runs", "show", "last", "--json").json["run_id"] == run_id
    assert "there is no run 'zzz'" in cli("runs", "show", "zzz").refused()
    assert " free, 1 run" in cli("doctor").out


def test_a_newer_result_is_read_as_far_as_it_is_known(cli: Cli) -> None:
    one = msgspec.to_builtins(result("20261101-100000-tiny-llama-aaaa"))
    directory = cli.home / "runs" / one["run_id"]
    directory.mkdir(parents=True)
    (directory / "result.json").write_bytes(msgspec.json.encode({**one, "schema": 9, "horoscope": {"sign": "leo"}}))
    assert cli("runs", "list", "--json").json["runs"][0]["state"] == "finished"
    assert cli("runs", "show", "last").code == 0


def test_text_of_a_training_process_cannot_reach_the_terminal(cli: Cli) -> None:
    nasty = "boom \x1b]0;owned\x07\x1b[31m\r\nsecond"
    write(cli.home, result("20261101-100000-t-aaaa", state="failed", reason=nasty, error=RunError(message=nasty)))
    for command in (["runs", "list"], ["runs", "show", "last"]):
        out = cli(*command).out
        assert "boom" in out
        assert "\x1b" not in out
        assert "owned" not in out


def test_references(cli: Cli) -> None:
    write(cli.home, result("20261101-100000-tiny-llama-aaaa"))
    write(cli.home, result("20261102-100000-tiny-llama-bbbb"))
    assert cli("runs", "show", "20261101", "--json").json["run_id"].endswith("aaaa")
    assert cli("runs", "show", "last", "--json").json["run_id"].endswith("bbbb")
    assert "matches 2 runs" in cli("runs", "show", "2026").refused()
    assert "did you mean 20261102-100000-tiny-llama-bbbb?" in cli("logs", "20261102-100000-tiny-lama-bbbb").refused()


def test_rm_deletes_all_or_nothing(cli: Cli) -> None:
    write(cli.home, result("20261101-100000-tiny-llama-aaaa"))
    write(cli.home, result("20261102-100000-tiny-llama-bbbb"))
    cli("runs", "rm", "last", "nothing-like-it").refused()
    assert len(cli("runs", "list", "--json").json["runs"]) == 2
    done = cli("runs", "rm", "20261101", "20261101-100000-tiny-llama-aaaa", "--json")
    assert done.json == {"removed": ["20261101-100000-tiny-llama-aaaa"]}
    assert len(cli("runs", "list", "--json").json["runs"]) == 1


def test_stop_of_an_ended_run_says_its_state(cli: Cli) -> None:
    write(cli.home, result("20261101-100000-tiny-llama-aaaa", state="oom"))
    assert "is not running: it is out of memory" in cli("stop", "last").refused()


@pytest.mark.parametrize(
    ("state", "code"), [("finished", 0), ("oom", 3), ("failed", 4), ("killed", 4), ("stopped", 130)]
)
def test_attach_to_an_ended_run_has_its_exit_code(cli: Cli, state: str, code: int) -> None:
    write(cli.home, result("20261101-100000-tiny-llama-aaaa", state=state))
    done = cli("attach", "last", "--json")
    assert done.code == code
    assert done.json["state"] == state


def test_of_a_run_that_has_ended_the_list_opens_one_file(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """That makes ten thousand of them a second; `python -m benchmarks` measures it."""
    encoded = msgspec.json.encode(result("20261101-100000-tiny-llama-0000")).decode()
    for number in range(300):
        run_id = f"20261101-{number:06d}-tiny-llama-{number:04x}"
        directory = cli.home / "runs" / run_id
        directory.mkdir(parents=True)
        (directory / "result.json").write_text(encoded.replace("20261101-100000-tiny-llama-0000", run_id))
    assert len(cli("runs", "list", "--json").json["runs"]) == 300
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *more: opened.append(str(path)) or real(path, *more))
    rows = iter_rows(Home(cli.home))
    assert next(rows).run_id == "20261101-000299-tiny-llama-012b"
    assert len(opened) == 1, "who wants one row reads one"
    assert len(list(rows)) == 299
    assert len(opened) == 300


def test_prediction_and_measurement_stand_together(cli: Cli) -> None:
    mib = 1 << 20
    first = MemoryFigures(peak_allocated_bytes=200 * mib, peak_reserved_bytes=200 * mib, predicted_bytes=204 * mib)
    second = MemoryFigures(peak_allocated_bytes=260 * mib, peak_reserved_bytes=260 * mib, predicted_bytes=255 * mib)
    write(cli.home, result("20261101-100000-tiny-llama-aaaa", memory=first))
    write(cli.home, result("20261102-100000-tiny-llama-bbbb", memory=second))
    shown = [" ".join(line.split()) for line in cli("runs", "show", "20261101").out.splitlines()]
    at = shown.index("peak memory 200 MiB allocated")
    assert shown[at + 1] == "predicted 204 MiB, -2.0 %"
    table = [line.split() for line in cli("runs", "compare", "20261101", "last").out.splitlines()]
    rows = {" ".join(line[:2]): line[2:6] for line in table if line[:1] == ["peak"]}
    assert rows["peak allocated"] == ["200", "MiB", "260", "MiB"]
    assert rows["peak predicted"] == ["204", "MiB", "255", "MiB"]


def test_a_probe_of_a_search_is_shown_as_one_everywhere(cli: Cli) -> None:
    write(cli.home, result("20261101-100000-tiny-llama-aaaa"))
    probe = result(
        "20261102-100000-tiny-llama-bbbb",
        role="probe",
        search_id="20261102-095900-tiny-llama-cccc",
        tried=[7, 30, 62],
        state="oom",
        reason="DefaultCPUAllocator: can't allocate memory",
        oom=OomExplanation(batch_size=62, needed_bytes=920 << 20, limit_bytes=900 << 20),
    )
    write(cli.home, probe)
    assert "bbbb" not in cli("runs", "list").out
    assert "a search's probe" in cli("runs", "list", "--probes").out
    shown = cli("runs", "show", "20261102").out
    assert "a search's probe at batch_size 62, after 7 and 30: out of memory" in shown
    assert "its search: 20261102-095900-tiny-llama-cccc" in shown
    assert "--set" not in shown, "nothing is to be turned"
    compared = cli("runs", "compare", "20261101", "20261102").out
    assert "62" in next(line for line in compared.splitlines() if line.startswith("batch_size")).split()
    assert "is a search's probe, which tried one batch_size after another: 7, 30, 62" in compared


def test_fp16_that_a_cpu_emulates_is_printed(cli: Cli) -> None:
    fp16 = {"precision": "fp16"}
    write(cli.home, result("20261101-100000-tiny-llama-aaaa", knobs=fp16, cpu=Cpu(has_fp16=False)))
    write(cli.home, result("20261102-100000-tiny-llama-bbbb", knobs=fp16, cpu=Cpu(has_fp16=True)))
    write(cli.home, result("20261103-100000-tiny-llama-cccc", cpu=Cpu(has_fp16=False)))
    text = "fp16 on a CPU without fp16 instructions is emulated"
    assert text in cli("runs", "show", "20261101").out, "whatever the CPU that prints it"
    assert text not in cli("runs", "show", "20261102").out
    assert text not in cli("runs", "show", "20261103").out

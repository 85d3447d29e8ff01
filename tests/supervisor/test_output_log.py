"""output.log and steps.jsonl: everything that is printed or recorded, until it is too much."""

import os

from hypothesis import given
from hypothesis import strategies as st

from trainfast_runner.records import capped_file
from trainfast_runner.records.capped_file import CappedFile, GrowingLog, read_log
from trainfast_runner.records.json_lines import read_all
from trainfast_runner.records.run_directory import rank_file, read_records, read_run_file
from trainfast_runner.records.run_file import ScriptAsked
from trainfast_runner.records.run_lines import Step
from trainfast_runner.running.ranks import ScriptWatch
from trainfast_runner.running.supervisor import SupervisorBounds

MIB = 1 << 20


def test_a_flood_of_output_keeps_its_head_and_tail(run):
    result = run.result_of(
        """
        print("the first line")
        line = b"x" * 1023 + b"\\n"
        begin(); train(3)
        for _ in range(24):
            os.write(1, line * 1024)
            time.sleep(0.02)
        print("the last line"); say("finished")
        """,
        SupervisorBounds(output_bytes=4 * MIB),
    )
    assert result.state == "finished"
    assert [event.detail for event in run.events("output_trimmed")] == [f"over {4 * MIB} bytes: the middle is dropped"]
    path = run.directory / "output.log"
    lines = path.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("the first line", "the last line")
    marks = [line for line in lines if line.startswith("[trainfast-tui: ")]
    assert len(marks) == 1
    dropped = int(marks[0].split()[1])
    kept = path.stat().st_size - len(marks[0]) - 1
    written = 24 * MIB + len("the first line\nthe last line\n")
    # Two lines cut in half at the seams are left out.
    assert 0 <= written - dropped - kept <= 2 * 1024
    assert kept <= 8 * MIB
    assert "\0" not in path.read_text()


def test_a_live_log_with_a_hole_is_readable(tmp_path):
    log = CappedFile(tmp_path / "output.log", cap_bytes=4 * MIB)
    fd = log.open()
    for number in range(12):
        os.write(fd, b"x\n" * (MIB // 2) + f"block {number}\n".encode())
        log.trim()
    os.close(fd)
    assert log.dropped_bytes
    assert not log.truncated
    assert log.path.stat().st_size > 12 * MIB
    assert log.path.stat().st_blocks * 512 <= 5 * MIB
    lines = read_log(log.path)
    assert (lines[0], lines[-1]) == ("x", "block 11")
    assert sum("were dropped here" in line for line in lines) == 1
    assert not any("\0" in line for line in lines)
    assert read_log(log.path, 2) == lines[-2:]
    log.compact()
    compacted = read_log(log.path)
    assert (compacted[0], compacted[-1]) == ("x", "block 11")
    assert set(compacted[:-1]) - {f"block {number}" for number in range(11)} == {
        "x",
        f"[trainfast-tui: {log.dropped_bytes} bytes of output were dropped here]",
    }


def test_without_holes_in_files_the_log_is_truncated(tmp_path, monkeypatch):
    monkeypatch.setattr("trainfast_runner.records.capped_file._punch", lambda *_: False)
    log = CappedFile(tmp_path / "output.log", cap_bytes=4 * MIB)
    fd = log.open()
    os.write(fd, b"first\n" + b"y\n" * (3 * MIB))
    assert log.trim() > 0
    assert log.truncated
    os.write(fd, b"last\n")
    os.close(fd)
    log.compact()
    lines = read_log(log.path)
    assert (lines[0], lines[-1]) == ("first", "last")
    assert any(f"{log.dropped_bytes} bytes of output were dropped here" in line for line in lines)


def test_steps_printed_into_a_log_that_is_cut_behind_its_head_count_once(run, monkeypatch):
    monkeypatch.setattr("trainfast_runner.records.capped_file._punch", lambda *_: False)
    command = ["python", "train.py"]
    run.prepare("", script=ScriptAsked(command=command, argv=command, steps_from_log="^step"))
    asked = read_run_file(run.directory)
    log = CappedFile(run.directory / "output.log", cap_bytes=64 << 10)
    steps = ScriptWatch(asked, run.directory, log, notify=print)
    fd = log.open()
    os.write(fd, b"step\n" * 5000 + b"x" * log.cap_bytes)
    steps.count_steps(has_ended=False)
    assert log.trim() > 0
    os.write(fd, b"step\n" * 3)
    os.close(fd)
    steps.count_steps(has_ended=True)
    recorded, unreadable = read_all(rank_file(run.directory, "steps", 0), Step)
    assert ([step.step for step in recorded], unreadable) == (list(range(1, 5004)), 0)


def test_no_log_is_no_lines(tmp_path):
    assert read_log(tmp_path / "output.log", 5) == []


@given(
    st.lists(st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=("Cs",))), max_size=30), st.data()
)
def test_last_lines_are_the_last_lines(tmp_path_factory, lines, data):
    path = tmp_path_factory.mktemp("log") / "output.log"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    count = data.draw(st.integers(0, 40))
    assert (read_log(path, count), read_log(path)) == (lines[-count:] if count else [], lines)


def test_a_growing_log_returns_each_line_once_when_it_is_complete(tmp_path):
    path = tmp_path / "output.log"
    log = GrowingLog(path, last_lines=2)
    assert log.read() is None, "no file yet"
    path.write_bytes(b"one\ntwo\nthree\nfo")
    assert (log.read(), log.read(), log.unfinished()) == (["two", "three"], [], "fo")
    with path.open("ab") as file:
        file.write(b"ur\nfive")
    assert log.read() == ["four"]
    assert log.read() is None
    assert log.unfinished() == "five"


def test_a_growing_log_keeps_only_the_newest_part_of_a_line_that_does_not_end(tmp_path):
    path = tmp_path / "output.log"
    path.write_bytes(b"50 %\r" * (3 << 20 >> 2) + b"100 %")
    log = GrowingLog(path)
    while log.read() is not None:
        pass
    assert log.unfinished().endswith("\r100 %")
    assert len(log.unfinished()) == 1 << 16
    log.close()


def test_a_line_appended_during_the_first_look_is_returned_by_the_next(tmp_path, monkeypatch):
    path = tmp_path / "output.log"
    path.write_bytes(b"one\n")

    def read_after_an_append(*arguments, **options):
        with path.open("ab") as file:
            file.write(b"two\n")
        return read_log(*arguments, **options)

    monkeypatch.setattr(capped_file, "read_log", read_after_an_append)
    log = GrowingLog(path)
    assert (log.read(), log.read(), log.read()) == (["one"], ["two"], None)


def test_a_growing_log_returns_the_lines_before_the_log_was_compacted(tmp_path):
    capped = CappedFile(tmp_path / "output.log", cap_bytes=64 << 10)
    fd, log = capped.open(), GrowingLog(capped.path)
    os.write(fd, b"x" * 1023 + b"\n")
    assert log.read() == ["x" * 1023]
    os.write(fd, (b"y" * 1023 + b"\n") * 127)
    assert capped.trim() > 0
    lines = log.read()
    assert lines[-1] == "y" * 1023
    os.write(fd, b"the error\n")
    os.close(fd)
    capped.compact()
    assert (log.read(), log.read()) == (["the error"], None)
    log.close()


def test_a_growing_log_returns_the_lines_printed_after_the_log_was_cut_behind_its_head(tmp_path, monkeypatch):
    monkeypatch.setattr("trainfast_runner.records.capped_file._punch", lambda *_: False)
    capped = CappedFile(tmp_path / "output.log")
    fd, log = capped.open(), GrowingLog(capped.path, last_lines=1)
    os.ftruncate(fd, capped.cap_bytes + 4096)
    os.write(fd, b"\nbefore\n")
    assert log.read() == ["before"]
    os.write(fd, b"half a li")
    assert (log.read(), log.unfinished()) == ([], "half a li")
    assert capped.trim() > 0
    os.write(fd, b"after\n")
    os.close(fd)
    assert (log.read(), log.unfinished(), log.read()) == (["after"], "", None)
    log.close()


CAP_BYTES = 256 << 10


def test_a_flood_of_steps_keeps_its_head_and_tail(run):
    result = run.result_of(
        """
        def is_cut(rank_file):
            found = os.stat(os.path.join(RUN_DIR, rank_file))
            return found.st_blocks * 512 < found.st_size - (64 << 10)

        begin(); train(3)
        number = 3
        while not is_cut("steps.jsonl"):
            number += 1
            step(number)
        train(50, first=number + 1)
        say("finished", step=number + 50)
        """,
        SupervisorBounds(records_bytes=CAP_BYTES),
    )
    assert result.state == "finished"
    details = [event.detail for event in run.events("steps_trimmed")]
    assert details == [f"over {CAP_BYTES} bytes: the middle is dropped"]
    lines = (run.directory / "steps.jsonl").read_bytes().splitlines()
    assert sum(line.startswith(b'{"dropped_bytes":') for line in lines) == 1
    records = read_records(run.directory)
    assert records.unreadable_lines == 0
    first, *_, last = records.steps[0]
    assert first.step == 1
    assert result.steps.measured + result.steps.warmup == last.step
    assert result.thinning.steps_dropped == last.step - len(records.steps[0])


def test_a_log_of_a_terabyte_that_nobody_here_wrote_is_not_read_whole(tmp_path):
    (tmp_path / "output.log").touch()
    os.truncate(tmp_path / "output.log", 1 << 40)
    assert read_log(tmp_path / "output.log", 3) == []

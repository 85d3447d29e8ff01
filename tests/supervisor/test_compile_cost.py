"""The cost of compiling in a run's result."""

import msgspec

from supervisor.summarised import record, result_of, step, steps
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_file import ScriptAsked


def run_id(second):
    return f"20260101-00000{second}-tiny-llama-0000"


def test_an_earlier_run_that_cannot_be_read_costs_no_figures(tmp_path):
    home = Home(tmp_path)
    (home.directory(run_id(1)) / "run.json").mkdir(parents=True)
    directory = home.directory(run_id(2))
    directory.mkdir()
    record(directory, steps=[step(1, 90, warmup=True, compiling=True), step(2, 40)])
    compiled = result_of(directory, run_id=run_id(2), knobs={"compile": "default"}).compile
    assert "no finished run with compile=off" in (compiled.reason or "")


def test_compiling_pays_for_itself_against_the_latest_equal_run_that_was_not_compiled(tmp_path):
    home = Home(tmp_path).create()

    def run(second, ms, **knobs):
        directory = home.directory(run_id(second))
        directory.mkdir()
        cold = {"warmup": True, "compiling": knobs.get("compile", "off") != "off"}
        record(directory, steps=[step(1, 9000 + ms, **cold), *(step(n, ms) for n in range(2, 6))])
        result = result_of(directory, run_id=directory.name, knobs=knobs)
        (directory / "result.json").write_bytes(msgspec.json.encode(result))
        return result

    alone = run(1, 40, compile="default", batch_size=8).compile
    assert (alone.cold_seconds, alone.break_even_steps, alone.compared_with) == (9, None, None)
    assert "no finished run with compile=off" in (alone.reason or "")
    for second, ms, batch_size in ((2, 90, 8), (3, 100, 8), (4, 500, 16)):
        assert run(second, ms, compile="off", batch_size=batch_size).compile is None
    paid = run(5, 40, compile="default", batch_size=8, steps=5).compile
    assert (paid.cold_seconds, paid.break_even_steps, paid.compared_with) == (9, 150, run_id(3))
    never = run(6, 400, compile="default", batch_size=8).compile
    assert never.break_even_steps is None
    assert (never.reason or "").startswith("never: a compiled step takes 400.0 ms")


def test_compiling_in_a_script_has_no_cost_for_no_other_script_compares(tmp_path):
    def run(name, ms, compiled):
        directory = tmp_path / name
        directory.mkdir()
        command = ["python", f"{name}.py"]
        record(directory, steps=steps(5, ms))
        asked = ScriptAsked(command=command, argv=command)
        result = result_of(directory, run_id=name, knobs={"compile": compiled}, script=asked)
        (directory / "result.json").write_bytes(msgspec.json.encode(result))
        return result

    run("slow", 100, "off")
    assert run("fast", 40, "default").compile is None

"""Commands and what they print, as a person types and reads them: the files in `transcripts`.

# the name of a case, which begins with an empty home
+ a line of Python that leaves something there, or looks at it
$ a command, which variables of its environment may precede
what it prints, line by line, where ... stands for any text, and alone for any lines
! what a refusal says in its one line, with exit code 2
~ what it says somewhere
- what it does not say
[3] is its exit code, 0 if none is given
.path.in.its.json = a value
{name} is a variable: tmp, home, presets, python, path, nvml, or one of the lines above
"""

import functools
import itertools
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

import on_disk
from trainfast_runner.records import result, run_file, run_lines
from trainfast_runner.settings.spec import resolve

CASES = [
    pytest.param(case.splitlines(), id=f"{file.stem}: {case.partition(chr(10))[0]}")
    for file in sorted(Path(__file__).with_name("transcripts").glob("*.txt"))
    for case in re.split(r"^# ", file.read_text(), flags=re.MULTILINE)[1:]
]
NAMES = {name: value for module in (result, run_file, run_lines, on_disk) for name, value in vars(module).items()} | {
    "os": os,
    "resolve": resolve,
}

PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
VARIABLE = re.compile("[A-Z_]+=")
EXIT_CODE = re.compile(r"\[(\d+)\]")


def pattern(line):
    return ".*".join(map(re.escape, line.split("...")))


def check_text(done, expected):
    """Fail where what a command printed is not what stands in its transcript."""
    said, told = (done.out + done.err).rstrip("\n"), []
    for line in expected:
        if line.startswith("! "):
            assert re.fullmatch(pattern(f"trainfast-tui: {line[2:]}"), done.refused()), done.err
        elif line.startswith("~ "):
            assert re.search(pattern(line[2:]), said), said
        elif line.startswith("- "):
            assert line[2:] not in said
        elif found := re.fullmatch(r"\.([a-z]\S*) = (.*)", line):
            steps = (int(step) if step.lstrip("-").isdigit() else step for step in found[1].split("."))
            assert functools.reduce(lambda value, step: value[step], steps, done.json) == json.loads(found[2]), line
        elif not EXIT_CODE.fullmatch(line):
            told.append("(?:.*\n)*" if line == "..." else f"{pattern(line)}\n")
    assert not told or re.fullmatch("".join(told), f"{said}\n"), said


@pytest.mark.parametrize("case", CASES)
def test_a_transcript(cli, tmp_path, case, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    names = NAMES | {"home": cli.home, "presets": cli.presets, "tmp": tmp_path, "python": sys.executable, "path": PATH}
    if any("{nvml}" in line for line in case):
        names["nvml"] = request.getfixturevalue("nvml_library")

    def filled(line):
        return re.sub(r"\{(\w+)\}", lambda found: str(names.get(found[1], found[0])), line)

    steps = [line.rstrip() for line in case[1:] if line.strip()]
    for place, line in enumerate(steps):
        if line.startswith("+ "):
            exec(line[2:], names)
        elif line.startswith("$"):
            rest = steps[place + 1 :]
            expected = rest[: next((n for n, one in enumerate(rest) if one.startswith(("$", "+ "))), len(rest))]
            words = shlex.split(filled(line)[2:])
            variables = dict(word.split("=", 1) for word in itertools.takewhile(VARIABLE.match, words))
            done = cli(*words[len(variables) :], **variables)
            refusal = any(one.startswith("! ") for one in expected)
            codes = [int(found[1]) for one in expected if (found := EXIT_CODE.fullmatch(one))]
            assert done.code == (codes[0] if codes else 2 if refusal else 0), done.err
            check_text(done, [filled(one) for one in expected])

"""`presets new NAME -- COMMAND` that is refused: the mapping, the Python, the script and the command."""

import venv

import pytest

from own_scripts.conftest import ARGPARSE, PYTHON, written


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--map", "batch_size=--bss"], "the script has no flag --bss; did you mean --bs?"),
        (["--map", "batchsize=--bs"], "did you mean batch_size?"),
        (["--map", "precision=--dtype float16"], "has no {} for the value; try --map 'precision=--dtype {}'"),
        (["--map", "batch_size"], "--map takes KNOB=FLAG"),
        (["--map", "batch_size=--bs '{}"], 'a quote is open in "--bs \'{}"'),
        (["--map", "batch_size=--grad-checkpointing"], "--grad-checkpointing takes no value, which batch_size needs"),
        (["--from", "tiny-llama"], "--from is for a preset without a command"),
        (["--set", "batch_size=0"], "batch_size: "),
    ],
)
def test_mapping_that_the_script_does_not_have_is_refused(cli, tmp_path, options, expected):
    assert expected in cli("presets", "new", "mine", *options, *written(tmp_path, ARGPARSE)).refused()
    assert not list(cli.presets.iterdir())


def test_a_python_without_torch_is_named_with_the_way_to_name_another(cli, tmp_path):
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = str(tmp_path / "env" / "bin" / "python")
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    remedy = f"{python} has no torch: give the script's own Python by --python, or in the command"
    refused = cli("presets", "new", "mine", "--", python, str(script)).refused()
    assert refused.endswith(f"train.py needs torch, and {remedy}")
    done = cli("run", "--", python, str(script))
    assert done.code == 4
    assert f"its steps are not seen: {remedy}" in done.err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "raise RuntimeError('no \\x1b[31mdata here')",
            "train.py ended before its arguments were read: RuntimeError: no data here",
        ),
        (
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('--data', required=True)\np.parse_args()\n",
            "the following arguments are required: --data",
        ),
        ("raise RuntimeError('no ' + 'data ' * 100_000)", "RuntimeError: no data data"),
    ],
)
def test_script_that_fails_before_its_parser_names_its_error(cli, tmp_path, text, expected):
    refused = cli("presets", "new", "mine", *written(tmp_path, text)).refused()
    assert expected in refused
    assert len(refused) < 500


def test_word_by_value_without_a_colon_is_refused(cli, tmp_path):
    mapping = "precision=fp32: --dtype float32, bf16"
    refused = cli("presets", "new", "mine", "--map", mapping, *written(tmp_path, ARGPARSE)).refused()
    assert "'bf16' in 'fp32: --dtype float32, bf16' is not VALUE: FLAG; try 'bf16: nothing'" in refused


def test_script_whose_name_is_no_text_is_refused(cli, tmp_path):
    path = tmp_path / "tr\udcffain.py"
    path.write_text(ARGPARSE)
    assert "is not UTF-8 and cannot be saved" in cli("presets", "new", "mine", "--", PYTHON, str(path)).refused()


def test_command_without_a_script_is_refused(cli):
    refusal = cli("presets", "new", "mine", "--", "true").refused()
    assert "no Python script found in true: discovery needs one" in refusal

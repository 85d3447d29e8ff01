"""The headless half runs without the screen, and the screen without the training stack."""

import subprocess
import sys

import pytest

STACK = {"torch", "transformers", "accelerate", "deepspeed", "bitsandbytes", "numpy"}


def loaded(statement: str) -> set[str]:
    """The top-level modules a fresh interpreter has after `statement`."""
    program = f"{statement}; import sys; print(' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "running.launch",
        "running.supervision.supervisor",
        "settings.presets",
        "running.follower",
        "running.history",
        "machine.telemetry.sampler",
    ],
)
def test_the_headless_half_needs_no_screen(module: str) -> None:
    assert not loaded(f"import trainfast_runner.{module}") & {"textual", "rich", "trainfast_tui", *STACK}


def test_the_screen_needs_no_training_stack() -> None:
    assert not loaded("import trainfast_tui.app") & STACK


def test_the_session_needs_no_textual() -> None:
    assert "textual" not in loaded("import trainfast_tui.session")


def test_help_needs_nothing_heavy() -> None:
    assert not loaded("import trainfast_tui.cli") & {"textual", "rich", "msgspec", "psutil", *STACK}

"""ruff and mypy find nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.parametrize("tool", ["ruff check", "ruff format --check", "mypy"])
def test_clean(tool: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *tool.split()], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

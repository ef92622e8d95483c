"""The demo, and the commands of data."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepwishart import load
from deepwishart.cli import app
from deepwishart.data.uci import UCI

runner = CliRunner()


def test_the_demo_writes_a_report_and_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["demo", "--steps", "3"])
    assert result.exit_code == 0, result.output
    for name in ("DWPRegressor", "DGPRegressor", "plain GP", "linear model"):
        assert name in result.output
    assert "data:image/png" in Path("report.html").read_text()
    assert load("diabetes.safetensors").n_iter_ == 3
    assert runner.invoke(app, ["demo"]).exit_code == 2


def test_data_is_listed(tmp_path: Path) -> None:
    assert "yacht" in runner.invoke(app, ["data", "list"]).output
    said = json.loads(runner.invoke(app, ["data", "list", "--json", "--data-dir", str(tmp_path)]).output)
    assert set(said) == set(UCI)
    assert not said["yacht"]["here"]
    assert str(tmp_path) in runner.invoke(app, ["data", "path", "--data-dir", str(tmp_path)]).output
    assert runner.invoke(app, ["data", "fetch", "mars"]).exit_code == 2


def test_data_is_checked(uci_folder: Path) -> None:
    result = runner.invoke(app, ["data", "fetch", "yacht", "--data-dir", str(uci_folder)])
    assert result.exit_code == 0
    assert "yacht" in result.output

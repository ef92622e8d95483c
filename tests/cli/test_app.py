"""The command line, as a shell sees it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepwishart import __version__
from deepwishart.cli import app

runner = CliRunner()


def test_figure_writes_the_picture_and_says_where(tmp_path: Path) -> None:
    out = tmp_path / "plot.png"
    result = runner.invoke(app, ["reproduce", "figure", "--out", str(out), "--samples", "500"])
    assert result.exit_code == 0, result.output
    assert out.read_bytes().startswith(b"\x89PNG")
    assert str(out) in result.output
    assert list(tmp_path.iterdir()) == [out]  # nothing else is left behind


def test_figure_does_not_overwrite_without_force(tmp_path: Path) -> None:
    out = tmp_path / "plot.svg"
    out.write_text("precious")
    result = runner.invoke(app, ["reproduce", "figure", "--out", str(out), "--samples", "500"])
    assert result.exit_code == 2
    assert "--force" in result.stderr
    assert out.read_text() == "precious"
    assert runner.invoke(app, ["reproduce", "figure", "--out", str(out), "--samples", "500", "--force"]).exit_code == 0
    assert out.read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "plot.gif"], ".png or .pdf or .svg"),
        (["--out", "no/such/folder/plot.png"], "does not exist"),
        (["--samples", "3"], "100"),
    ],
)
def test_figure_refuses_what_it_cannot_do(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["reproduce", "figure", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_failure_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("deepwishart.experiments.probability_plot.draw_probability_plot", fail)
    result = runner.invoke(app, ["reproduce", "figure", "--out", str(tmp_path / "plot.png")])
    assert result.exit_code == 2
    assert "disk full" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_version_and_help() -> None:
    assert __version__ in runner.invoke(app, ["--version"]).output
    assert "demo" in runner.invoke(app, ["--help"]).output

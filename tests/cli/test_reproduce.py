"""deepwishart reproduce, as a shell sees it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from deepwishart.cli import app
from deepwishart.experiments import runs
from deepwishart.experiments.store import METRICS, read_results
from tests.experiments.test_runs import make_data

QUICK = ["--steps", "60", "--inducing", "8", "--set", "num_samples=2", "--set", "num_test_samples=10"]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["reproduce", *arguments])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_data(tmp_path / "uci")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEEPWISHART_DATA", str(tmp_path / "uci"))
    return tmp_path


def test_a_cell_lands_in_the_store_and_in_every_table(place: Path) -> None:
    """The command of the README, on a small table in the place of yacht."""
    cell = ["--dataset", "yacht", "--depth", "2", "--method", "a-gw", "--splits", "0-1", "--device", "cpu"]
    result = invoke("uci", *cell, *QUICK)
    assert result.exit_code == 0, result.output
    assert "yacht, depth 2, a-gw, 2 splits" in result.output
    assert len(read_results(place / "results.sqlite")) == 2
    again = invoke("uci", *cell, *QUICK)
    assert "Nothing to do" in again.output

    result = invoke("table", "--dataset", "yacht", *QUICK, "--out", "table.md")
    assert result.exit_code == 0, result.output
    assert "Preset “paper” with num_steps=60, num_samples=2, num_test_samples=10, num_inducing=8: 60" in result.output
    assert "A-GW" in result.output
    assert "…" not in result.output  # no table is cut, however narrow the terminal
    assert "not run" in (place / "table.md").read_text(encoding="utf-8")
    assert invoke("table", "--dataset", "yacht", *QUICK, "--out", "table.md").exit_code == 2  # would overwrite
    assert invoke("table", "--dataset", "yacht", "--depth", "2,5", *QUICK, "--out", "some.md").exit_code == 0
    lines = (place / "some.md").read_text("utf-8").splitlines()
    assert [line[:9] for line in lines if "| DGP |" in line] == ["| 2 | DGP", "| 5 | DGP"]
    for name in ("table.html", "table.tex"):
        assert invoke("table", "--dataset", "yacht", *QUICK, "--out", name).exit_code == 0
        assert (place / name).stat().st_size > 1000

    assert invoke("export", "--out", "results.parquet").exit_code == 0
    result = invoke("import", "results.parquet", "--store", "other.sqlite")
    assert "Added 2 of 2 rows" in result.output
    assert "Added 0 of 2 rows" in invoke("import", "results.sqlite", "--store", "other.sqlite").output
    mine, theirs = (read_results(place / name)[list(METRICS)] for name in ("results.sqlite", "other.sqlite"))
    assert mine.equals(theirs)

    result = invoke("figure", "depth", *QUICK, "--store", "results.parquet")
    assert result.exit_code == 0, result.output
    assert (place / "depth.png").read_bytes().startswith(b"\x89PNG")


def test_machines_read_json(place: Path) -> None:
    cell = ["--dataset", "yacht", "--depth", "2", "--method", "dgp", "--splits", "3", "--device", "cpu"]
    result = invoke("uci", *cell, *QUICK, "--json")
    record = json.loads(result.output)
    assert record["complete"]
    assert [row["split"] for row in record["rows"]] == [3]


def test_time_runs_out_and_the_same_command_goes_on(place: Path) -> None:
    cell = ["--dataset", "yacht", "--depth", "2", "--method", "gw", "--splits", "0", "--device", "cpu"]
    assert "Time is up" in invoke("uci", *cell, *QUICK, "--minutes", "0").output
    assert "1 splits" in invoke("uci", *cell, *QUICK).output


def test_steps_can_be_compiled_and_the_store_says_so(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    cell = ["--dataset", "yacht", "--depth", "2", "--method", "a-gw", "--splits", "0", "--device", "cpu"]
    for option in ([], ["--compile"]):
        store = f"store{len(option)}.sqlite"
        assert invoke("uci", *cell, *QUICK, "--store", store, *option).exit_code == 0
    plain, compiled = (read_results(place / f"store{i}.sqlite").iloc[0] for i in range(2))
    assert compiled["torch"] == f"{plain['torch']}, compiled"
    assert compiled["elbo"] == pytest.approx(plain["elbo"], rel=1e-6)


def test_too_little_memory_is_explained_and_the_cell_is_free_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    cell = ["--dataset", "yacht", "--depth", "2", "--method", "gw", "--splits", "0", "--device", "cpu"]
    with monkeypatch.context() as small:
        small.setattr(runs, "train", train)
        result = invoke("uci", *cell, *QUICK)
    assert result.exit_code == 1
    assert "--splits 0-4" in result.stderr
    assert "1 splits" in invoke("uci", *cell, *QUICK).output


def test_what_cannot_be_compiled_is_said(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *drawn: 2 * function(*drawn))
    cell = ["--dataset", "yacht", "--depth", "2", "--method", "a-gw", "--splits", "0", "--device", "cpu"]
    result = invoke("uci", *cell, *QUICK, "--compile")
    assert result.exit_code == 1
    assert "the bound differs by 100.0%" in result.stderr
    assert "leave out --compile" in " ".join(result.stderr.split())
    assert invoke("uci", *cell, *QUICK).exit_code == 0


def test_run_times_are_measured_here(place: Path) -> None:
    arguments = ["--dataset", "yacht", "--depth", "2", "--inducing", "8", "--device", "cpu", "--out", "runtime.md"]
    result = invoke("runtime", *arguments)
    assert result.exit_code == 0, result.output
    assert "Seconds an epoch" in result.output
    assert "yacht" in (place / "runtime.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["uci", "--dataset", "iris"], "There is no iris. Choose from boston"),
        (["uci", "--method", "gw,nn"], "There is no nn"),
        (["uci", "--depth", "two"], "--depth takes numbers"),
        (["uci", "--splits", "3-"], "--splits takes numbers"),
        (["uci", "--splits", "18-20"], "There are splits 0 to 19"),
        (["uci", "--splits", "5", "--dataset", "protein"], "There are splits 0 to 4"),
        (["uci", "--preset", "mine"], "--preset must be one of paper"),
        (["uci", "--set", "speed=2"], "name=value"),
        (["table"], "does not exist"),
        (["table", "--out", "table.doc"], ".md or .html or .tex"),
        (["export", "--out", "r.txt"], ".csv or .parquet"),
        (["import", "none.csv"], "does not exist"),
        (["figure", "depth"], "does not exist"),
    ],
)
def test_what_cannot_be_done_is_said(place: Path, arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not list(place.glob("results.*"))


def test_a_figure_of_nothing_is_refused(place: Path) -> None:
    cell = ["--dataset", "yacht", "--depth", "2", "--method", "gw", "--splits", "0", "--device", "cpu"]
    invoke("uci", *cell, *QUICK)
    result = invoke("figure", "depth")
    assert result.exit_code == 2
    assert "no results to draw" in result.stderr
    assert not list(place.glob("*.png"))

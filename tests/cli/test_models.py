"""fit, predict, evaluate, report: what a user types and reads."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from deepwishart import load
from deepwishart.cli import app
from tests.proofs import Proofs

runner = CliRunner()
QUICK = ["--steps", "5", "--inducing", "10"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Houses: two tables with numbers, words and a target."""
    rng = np.random.RandomState(0)
    frame = pd.DataFrame({"size": rng.rand(70) * 100, "town": rng.choice(["Ulm", "Bonn"], 70), "age": rng.rand(70)})
    frame["price"] = 3 * frame["size"] + 50 * (frame["town"] == "Bonn") + rng.randn(70)
    frame["dear"] = np.where(frame["price"] > 150, "yes", "no")
    frame.iloc[:50].to_csv(tmp_path / "train.csv", index=False)
    frame.iloc[50:].to_csv(tmp_path / "test.csv", index=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, code: int = 0) -> Any:
    result = runner.invoke(app, [*arguments])
    assert result.exit_code == code, result.output + result.stderr
    return result


def fit(*more: str, code: int = 0) -> Any:
    return run("fit", "train.csv", "--target", "price", "--exclude", "dear", *QUICK, *more, code=code)


def test_from_a_csv_to_predictions(folder: Path) -> None:
    assert "Wrote model.safetensors" in fit().output
    assert set(os.listdir()) == {"train.csv", "test.csv", "model.safetensors"}
    pd.read_csv("test.csv").drop(columns="dear").to_csv("new.csv", index=False)
    assert "20 predictions" in run("predict", "model.safetensors", "new.csv").output
    predictions = pd.read_csv("predictions.csv")
    assert list(predictions.columns) == ["price_mean", "price_std", "price_q0.05", "price_q0.95"]
    model, raw = load("model.safetensors"), pd.read_csv("new.csv").drop(columns="price")
    np.testing.assert_allclose(predictions["price_mean"], model.predict(raw), rtol=1e-10)
    metrics = json.loads(run("evaluate", "model.safetensors", "new.csv", "--json").output)["metrics"]
    assert metrics["RMSE"] < 20
    assert "RMSE" in run("evaluate", "model.safetensors", "new.csv").output


def test_parquet_and_quantiles(folder: Path) -> None:
    pd.read_csv("train.csv").to_parquet("train.parquet")
    run("fit", "train.parquet", "--target", "price", "--exclude", "dear,town", *QUICK, "--method", "dgp")
    pd.read_csv("test.csv")[["size", "age"]].to_parquet("new.parquet")
    run("predict", "model.safetensors", "new.parquet", "--out", "p.parquet", "--quantiles", "0.1,0.5")
    assert list(pd.read_parquet("p.parquet").columns)[2:] == ["price_q0.1", "price_q0.5"]


def test_words_are_classes(folder: Path) -> None:
    run("fit", "train.csv", "--target", "dear", "--exclude", "price", *QUICK)
    said = json.loads(run("predict", "model.safetensors", *_without("price"), "--json").output)
    assert said["columns"] == ["dear", "p_no", "p_yes"]
    assert set(pd.read_csv("predictions.csv")["dear"]) <= {"yes", "no"}
    assert (
        "accuracy" in json.loads(run("evaluate", "model.safetensors", *_without("price"), "--json").output)["metrics"]
    )
    run("report", "model.safetensors", *_without("price"))
    assert "Reliability" in Path("report.html").read_text()


def _without(column: str) -> list[str]:
    pd.read_csv("test.csv").drop(columns=column).to_csv("part.csv", index=False)
    return ["part.csv"]


@pytest.mark.parametrize("method", ["gw", "a-gw", "diwp"])
def test_methods(folder: Path, method: str) -> None:
    said = json.loads(fit("--method", method, "--json").output)
    assert said["rows"] == 50
    assert said["steps"] == 5
    assert said["estimator"] == ("DIWPRegressor" if method == "diwp" else "DWPRegressor")


def test_several_targets(folder: Path) -> None:
    run("fit", "train.csv", "--target", "price,age", "--exclude", "dear", *QUICK)
    run("predict", "model.safetensors", *_without("dear"))
    assert "age_mean" in pd.read_csv("predictions.csv")


def test_files_are_not_overwritten(folder: Path) -> None:
    Path("model.safetensors").write_text("precious")
    assert "--force" in fit(code=2).stderr
    assert Path("model.safetensors").read_text() == "precious"
    fit("--force")
    Path("predictions.csv").write_text("precious")
    assert "--force" in run("predict", "model.safetensors", *_without("dear"), code=2).stderr
    assert Path("predictions.csv").read_text() == "precious"


TROUBLES: list[tuple[bytes, list[str], str]] = [
    (b"", [], "is empty"),
    (b"size,price\n", [], "header but no rows"),
    (b"size,price\n1,2\n3\n", [], "line 3"),
    (b"size;price\n1;2\n", [], "--separator ';'"),
    (b"size,price\n1,2\n,3\n4,5\n", [], "Column 'size' has no value in row 2. Remove or fill them, or ask for"),
    (b"size,price\n1,2\n2,\n4,5\n", [], "Column 'price' has no value in row 2, but it is the target"),
    (b"size,price\n1,2\ninf,3\n", [], "Column 'size' is infinite in row 2"),
    (b"size,price\n1,2\n2,cheap\n", ["--task", "regression"], "holds words, not numbers"),
    (b"size,price\n1,1e400\n2,3\n", [], "infinite"),
    ("größe,price\n1,2\n".encode("latin1"), [], "not UTF-8"),
    (b"size,cost\n1,2\n", [], "There is no column 'price'. The columns are size, cost"),
    (b"price\n1\n", [], "No column is left"),
    (b"size,price\n1,2\n3,4\n", ["--kernel", "rbf"], "rbf"),
    (b"size,price\n1,2\n3,4\n", ["--likelihood", "gauss"], "likelihood must be one of"),
    (b"size,price\n1,2\n3,4\n", ["--out", "model.bin"], ".safetensors"),
    (b"size,price\n1,2\n3,4\n", ["--out", "no/such/model.safetensors"], "does not exist"),
]


@pytest.mark.parametrize(("content", "more", "message"), TROUBLES)
def test_trouble_in_a_table_is_explained(folder: Path, content: bytes, more: list[str], message: str) -> None:
    Path("bad.csv").write_bytes(content)
    result = run("fit", "bad.csv", "--target", "price", *QUICK, *more, code=2)
    assert message in result.stderr
    assert "Traceback" not in result.output + result.stderr
    assert not Path("model.safetensors").exists()


def test_a_word_among_numbers_is_a_mistake(folder: Path) -> None:
    rows = "\n".join(f"{i}.5,{i}" for i in range(50))
    Path("bad.csv").write_text(f"size,price\n{rows}\nunknown,3\n")
    said = run("fit", "bad.csv", "--target", "price", *QUICK, code=2).stderr
    assert "Column 'size' holds numbers, but 'unknown' in row 51. Correct it" in said
    Path("bad.csv").write_text("size;price\n" + "\n".join(f"{i};{i},5" for i in range(50)))
    said = run("fit", "bad.csv", "--target", "price", "--separator", ";", *QUICK, code=2).stderr
    assert "50 different words such as '0,5', too many for classes. Numbers need a decimal point" in said


def test_codes_with_zeros_in_front_are_words_in_every_file(folder: Path) -> None:
    frame = pd.DataFrame({"code": ["01", "02", "A3", "B4"] * 10, "y": range(40)})
    frame.to_csv("codes.csv", index=False)
    run("fit", "codes.csv", "--target", "y", *QUICK)
    frame.iloc[:2].to_csv("new.csv", index=False)
    run("predict", "model.safetensors", "new.csv")


def test_classes_are_words_in_every_file(folder: Path) -> None:
    frame = pd.DataFrame({"x": range(40), "kind": ["01", "A"] * 20})
    frame.to_csv("kinds.csv", index=False)
    run("fit", "kinds.csv", "--target", "kind", *QUICK)
    frame[frame["kind"] == "01"].to_csv("new.csv", index=False)
    run("evaluate", "model.safetensors", "new.csv")


def test_yes_and_no_are_classes(folder: Path) -> None:
    pd.read_csv("train.csv").assign(dear=lambda t: t["price"] > 150).to_csv("train.csv", index=False)
    said = json.loads(run("fit", "train.csv", "--target", "dear", "--exclude", "price", *QUICK, "--json").output)
    assert said["estimator"] == "DWPClassifier"


def test_columns_can_be_left_out_everywhere(folder: Path) -> None:
    fit()
    more = ["--exclude", "dear"]
    run("predict", "model.safetensors", "test.csv", *more)
    run("evaluate", "model.safetensors", "test.csv", *more)
    run("report", "model.safetensors", "test.csv", "--train", "train.csv", *more)


def test_a_device_that_is_not_here(folder: Path) -> None:
    assert "device 'nonsense' cannot be used here" in fit("--device", "nonsense", code=2).stderr


def test_there_may_be_nothing_to_resume(folder: Path) -> None:
    assert "nothing to resume" in fit("--resume", code=2).stderr


def test_a_constant_column_is_harmless(folder: Path) -> None:
    pd.read_csv("train.csv").assign(flat=7).to_csv("train.csv", index=False)
    fit()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"town": "Rome"}, "'Rome' in 20 rows"),
        ({"size": "big"}, "should hold numbers"),
        ({"garden": 1}, "unseen at fit time:\n- garden"),
        ({"size": None}, "Column 'size' has no value"),
    ],
)
def test_trouble_at_prediction_is_explained(folder: Path, change: dict[str, Any], message: str) -> None:
    fit()
    pd.read_csv("test.csv").drop(columns="dear").assign(**change).to_csv("new.csv", index=False)
    assert message in run("predict", "model.safetensors", "new.csv", code=2).stderr
    assert not Path("predictions.csv").exists()


def test_a_missing_column_is_named(folder: Path) -> None:
    fit()
    pd.read_csv("test.csv").drop(columns=["dear", "age"]).to_csv("new.csv", index=False)
    assert "age" in run("predict", "model.safetensors", "new.csv", code=2).stderr
    pd.read_csv("test.csv").drop(columns=["dear", "price"]).to_csv("new.csv", index=False)
    assert "no column 'price'" in run("evaluate", "model.safetensors", "new.csv", code=2).stderr


def test_imputation(folder: Path) -> None:
    frame = pd.read_csv("train.csv")
    frame.loc[3, "size"], frame.loc[4, "town"] = None, None
    frame.to_csv("train.csv", index=False)
    assert "--impute" in fit(code=2).stderr
    fit("--impute")
    run("predict", "model.safetensors", *_without("dear"))


def test_a_model_file_that_is_none(folder: Path) -> None:
    Path("model.safetensors").write_text("nonsense")
    assert "damaged or no model file" in run("predict", "model.safetensors", "test.csv", code=2).stderr


def test_ctrl_c_saves_and_resume_goes_on(folder: Path) -> None:
    command = [sys.executable, "-m", "deepwishart", "fit", "train.csv", "--target", "price", "--exclude", "dear"]
    slow = ["--steps", "100000", "--inducing", "50", "--replicas", "4"]  # seconds before it settles
    command += [*slow, "--quiet"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not Path("model.safetensors.checkpoint").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "--resume" in said
    assert not Path("model.safetensors").exists()
    arguments = ["fit", "train.csv", "--target", "price", "--exclude", "dear", *slow]
    assert "--resume" in run(*arguments, code=2).stderr
    fit("--resume", code=2)  # other steps: another run
    run(*arguments, "--resume")
    assert not Path("model.safetensors.checkpoint").exists()


def test_a_large_table(folder: Path, proofs: Proofs) -> None:
    rows = proofs.size(50_000, 1_000_000)
    rng = np.random.RandomState(0)
    frame = pd.DataFrame({"size": rng.randn(rows).round(6), "price": rng.randn(rows).round(3)})
    frame.to_csv("large.csv", index=False)
    run("fit", "large.csv", "--target", "price", "--steps", "2", "--inducing", "5")
    said = run("predict", "model.safetensors", "large.csv").output
    assert f"Wrote {rows} predictions" in said
    assert len(pd.read_csv("predictions.csv")) == rows

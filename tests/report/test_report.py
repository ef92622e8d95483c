"""The page and its plots; in a real browser where there is one."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import LinearRegression

from deepwishart import report
from deepwishart.estimators import DWPClassifier, DWPRegressor
from deepwishart.metrics import gaussian_log_likelihood

QUICK: dict[str, Any] = {"num_steps": 5, "num_inducing": 15, "num_predict_samples": 20, "random_state": 0}
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


def frame(rows: int = 60) -> tuple[pd.DataFrame, "pd.Series[float]"]:
    rng = np.random.RandomState(0)
    X = pd.DataFrame(
        {
            "width": rng.randn(rows),
            "a rather long name of a column": rng.randn(rows),
            "<b>": rng.choice(["u", "v"], rows),
        }
    )
    return X, (X["width"] + 0.1 * pd.Series(rng.randn(rows))).rename("y")


@pytest.fixture(scope="module")
def regressor() -> Any:
    return DWPRegressor(**QUICK, n_replicas=2).fit(*frame())


@pytest.fixture(scope="module")
def classifier() -> Any:
    X, y = frame()
    return DWPClassifier(**QUICK).fit(X, pd.cut(y, 3, labels=["a", "b", "c"]).astype(str))


def test_every_plot_is_a_figure_of_its_own(regressor: Any, classifier: Any) -> None:
    X, y = frame()
    labels = pd.cut(y, 3, labels=["a", "b", "c"]).astype(str)
    figures = [
        report.plot_predictions(regressor, X, y),
        report.plot_residuals(regressor, X, y),
        report.plot_calibration(regressor, X, y),
        report.plot_elbo(regressor),
        report.plot_relevance(regressor),
        report.plot_grams(regressor),
        report.plot_effect(regressor, X, "width"),
        report.plot_effect(regressor, X, "<b>"),
        report.plot_reliability(classifier, X, labels),
        report.plot_confusion(classifier, X, labels),
        report.plot_effect(classifier, X, "width"),
    ]
    assert all(figure.axes for figure in figures)
    assert not plt.get_fignums()  # none is left in pyplot's hands
    assert len(report.plot_grams(regressor).axes) == 2 + 1  # inputs, one hidden layer, the scale


def test_arrays_without_names_have_effects_too() -> None:
    X, y = np.random.RandomState(0).randn(2, 40, 2)
    model = DWPRegressor(**QUICK).fit(X, y[:, 0])
    report.plot_effect(model, X, "x1")
    with pytest.raises(ValueError, match=r"no column 'x2'. The columns are x0, x1"):
        report.plot_effect(model, X, "x2")


def test_the_baselines_are_scikit_learns(regressor: Any) -> None:
    X, y = frame(90)
    train, test = (X[:60], y[:60]), (X[60:], y[60:])
    A, B = (regressor.x_scaler_.forward(regressor.encode(part)) for part in (X[:60], X[60:]))
    linear = LinearRegression().fit(A, train[1])
    found = report.linear_model(regressor, *train, *test).metrics
    assert found["RMSE"] == pytest.approx(np.sqrt(((linear.predict(B) - test[1]) ** 2).mean()), rel=1e-8)
    freedom = 60 - np.linalg.matrix_rank(np.c_[A, np.ones(60)])
    std = np.sqrt(((linear.predict(A) - train[1]) ** 2).sum() / freedom)
    assert found["log-likelihood"] == pytest.approx(gaussian_log_likelihood(test[1], linear.predict(B), std), rel=1e-6)
    scaler = regressor.y_scaler_
    kernel = ConstantKernel() * RBF(np.full(4, 2.0)) + WhiteKernel()
    gp = GaussianProcessRegressor(kernel, random_state=0).fit(A, (train[1] - scaler.mean) / scaler.scale)
    mean, std = gp.predict(B, return_std=True)
    mean, std = mean * scaler.scale + scaler.mean, std * scaler.scale
    found = report.gaussian_process(regressor, *train, *test).metrics
    assert found["log-likelihood"] == pytest.approx(gaussian_log_likelihood(test[1], mean, std), abs=0.02)


def test_shapes_of_targets_do_not_matter(regressor: Any) -> None:
    X, y = frame()
    expected = report.evaluate(regressor, X, y).metrics
    assert report.evaluate(regressor, X, y.to_frame()).metrics == pytest.approx(expected)


def test_the_plain_gp_is_no_straw_man_for_counts() -> None:
    X, y = frame()
    counts = np.round(np.exp(y) * 50)
    model = DWPRegressor(**QUICK, likelihood="poisson").fit(X, counts)
    assert report.gaussian_process(model, X, counts, X, counts).metrics["RMSE"] < counts.std() / 2


def test_the_page_stands_alone(regressor: Any, tmp_path: Path) -> None:
    X, y = frame()
    shown = report.write_report(regressor, X, y, tmp_path / "report.html", (X, y), title="A <title>")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert [evaluation.name for evaluation in shown] == ["DWPRegressor", "plain GP", "linear model"]
    assert "A &lt;title&gt;" in page
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page)
    assert page.count("<img") == 9
    assert "<script" not in page


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("width", [390, 1_280])
def test_the_page_fits_phones_and_desks(regressor: Any, classifier: Any, tmp_path: Path, width: int) -> None:
    """Nothing is wider than the window, and every picture is drawn: asked of the browser itself."""
    X, y = frame()
    labels = pd.cut(y, 3, labels=["a", "b", "c"]).astype(str)
    probe = """<script>addEventListener("load", () => document.title = JSON.stringify({
        wide: document.documentElement.scrollWidth, window: innerWidth,
        drawn: [...document.images].every(i => i.complete && i.naturalWidth > 0 && i.clientWidth > 100)}))</script>"""
    for model, truth in ((regressor, y), (classifier, labels)):
        path = tmp_path / "report.html"
        report.write_report(model, X, truth, path, (X, truth))
        path.write_text(path.read_text().replace("</head>", f"{probe}</head>"))
        # Chromium has windows of 500 pixels at least; a frame may be as narrow as a phone.
        frame_path = tmp_path / "frame.html"
        frame_path.write_text(
            f'<iframe src="report.html" width="{width}" height="900" onload="document.title='
            f'this.contentDocument.title"></iframe>'
        )
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
        command += [
            f"--window-size={width + 100},1000",
            "--virtual-time-budget=4000",
            "--dump-dom",
            frame_path.as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
        assert title, done.stdout[-500:] + done.stderr[-500:]
        found = eval(title[1].replace("true", "True").replace("false", "False"))
        assert found["drawn"]
        assert found["wide"] <= found["window"] == width

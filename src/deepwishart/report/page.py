"""One self-contained HTML page: no script, no font, no picture comes from elsewhere."""

import base64
import io
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment
from matplotlib.figure import Figure

from deepwishart import __version__
from deepwishart.data.tables import write_atomically
from deepwishart.report import plots
from deepwishart.report.evaluation import Evaluation, evaluate, gaussian_process, linear_model

__all__ = ["write_report"]


class Picture(NamedTuple):
    """A plot on the page."""

    title: str
    caption: str
    source: str
    wide: bool = False


def write_report(
    estimator: Any,
    X: Any,
    y: Any,
    path: str | os.PathLike[str],
    train: tuple[Any, Any] | None = None,
    others: Sequence[Evaluation] = (),
    title: str = "Deep Wishart process report",
) -> list[Evaluation]:
    """Write a report on held-out rows, and return the metrics in it.

    Args:
        estimator: Fitted.
        X: Rows that the estimator has not seen.
        y: Their targets.
        path: Where to write the page; replaced at once or not at all.
        train: The rows of the fit; with them, a linear model and a plain GP are fitted for comparison.
        others: Metrics of more models to show.
        title: Of the page.
    """
    evaluations = [evaluate(estimator, X, y), *others]
    if train is not None and not hasattr(estimator, "classes_"):
        evaluations += [fit(estimator, *train, X, y) for fit in (gaussian_process, linear_model)]
    template = Environment(autoescape=True).from_string(_template())
    page = template.render(
        title=title,
        version=__version__,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        facts=_facts(estimator, X),
        names=list(evaluations[0].metrics),
        evaluations=evaluations,
        pictures=_pictures(estimator, X, y),
        events=estimator.history_.events,
    )
    with write_atomically(Path(path)) as unfinished:
        unfinished.write_text(page, encoding="utf-8")
    return evaluations


def _facts(estimator: Any, X: Any) -> list[tuple[str, str]]:
    model = estimator.model_
    method = getattr(estimator, "posterior", None)
    return [
        ("model", type(estimator).__name__ + (f" ({method})" if method else "")),
        ("depth", str(model.depth)),
        ("inducing points", str(model.inducing_inputs.shape[-2])),
        ("kernel", estimator.kernel),
        ("likelihood", type(model.likelihood).__name__),
        ("replicas", str(len(estimator.replicas_))),
        ("steps", f"{estimator.n_iter_} ({estimator.history_.stopped})"),
        ("ELBO per row", f"{estimator.elbo_:.3f}"),
        ("held-out rows", str(len(np.asarray(X)))),
        ("columns", str(estimator.n_features_in_)),
    ]


def _pictures(estimator: Any, X: Any, y: Any) -> list[Picture]:
    if hasattr(estimator, "classes_"):
        first = [
            _picture("Reliability", "A calibrated model lies on the line.", plots.plot_reliability(estimator, X, y)),
            _picture("Confusion", "True classes in rows.", plots.plot_confusion(estimator, X, y)),
        ]
    else:
        first = [
            _picture("Predicted against true", "With 90 % intervals.", plots.plot_predictions(estimator, X, y)),
            _picture(
                "Calibration", "Intervals cover what they promise on the line.", plots.plot_calibration(estimator, X, y)
            ),
            _picture(
                "Residuals",
                "Standardised; a pattern is something not yet learned.",
                plots.plot_residuals(estimator, X, y),
            ),
        ]
    effects = [
        _picture(f"Effect of {name}", "The others at their medians; 90 % band.", plots.plot_effect(estimator, X, name))
        for name in plots.most_relevant_columns(estimator)
    ]
    grams = "Centred correlations of the inducing points, ordered by their outputs, layer by layer."
    return [
        *first,
        _picture("Training", "The ELBO per row, smoothed.", plots.plot_elbo(estimator)),
        _picture("Relevance", "Inverse lengthscales of the inputs.", plots.plot_relevance(estimator)),
        *effects,
        _picture("Gram matrices", grams, plots.plot_grams(estimator), True),
    ]


def _picture(title: str, caption: str, figure: Figure, wide: bool = False) -> Picture:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=140)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return Picture(title, caption, f"data:image/png;base64,{encoded}", wide)


def _template() -> str:
    return resources.files("deepwishart.report").joinpath("page.html").read_text(encoding="utf-8")

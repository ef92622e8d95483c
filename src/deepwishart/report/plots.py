"""Plots of a fitted estimator. Each returns a matplotlib figure, and touches no global state."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from deepwishart.metrics import calibration
from deepwishart.objectives import sample_grams

__all__ = [
    "most_relevant_columns",
    "plot_calibration",
    "plot_confusion",
    "plot_effect",
    "plot_elbo",
    "plot_grams",
    "plot_predictions",
    "plot_relevance",
    "plot_reliability",
    "plot_residuals",
]

_BLUE, _ORANGE, _GREY = "#2b6cb0", "#dd6b20", "#718096"
_MAX_POINTS = 2_000
_GRID = 60


def plot_predictions(estimator: Any, X: Any, y: Any, output: int = 0) -> Figure:
    """Predicted against true values, with 90 % intervals."""
    X, y = _some(X, y)
    truth, mean, lower, upper = _intervals(estimator, X, y, output)
    figure, axes = _figure()
    axes.errorbar(
        truth, mean, [mean - lower, upper - mean], fmt="o", ms=3, lw=0.6, color=_BLUE, ecolor="#90cdf4", alpha=0.8
    )
    ends = [min(truth.min(), lower.min()), max(truth.max(), upper.max())]
    axes.plot(ends, ends, color=_GREY, lw=1)
    axes.set(xlabel="true value", ylabel="prediction and 90 % interval")
    return figure


def plot_residuals(estimator: Any, X: Any, y: Any, output: int = 0) -> Figure:
    """Residuals in units of their predicted standard deviation, against the prediction."""
    X, y = _some(X, y)
    mean, std = (_column(values, output) for values in estimator.predict(X, return_std=True))
    z = (_column(y, output) - mean) / std
    figure, axes = _figure()
    axes.axhspan(-1.645, 1.645, color="#ebf8ff", zorder=0)
    axes.axhline(0, color=_GREY, lw=1)
    axes.plot(mean, z, "o", ms=3, color=_BLUE, alpha=0.7)
    axes.set(xlabel="prediction", ylabel="residual / predicted std", title="90 % should lie in the band")
    return figure


def plot_calibration(estimator: Any, X: Any, y: Any) -> Figure:
    """Observed coverage of central intervals against the promised one."""
    found = calibration(estimator.pit(X, y))
    figure, axes = _figure()
    axes.plot([0, 1], [0, 1], color=_GREY, lw=1)
    axes.plot(found.level, found.observed, "o-", ms=3, color=_BLUE)
    axes.set(xlabel="promised coverage", ylabel="observed coverage", title=f"mean error {found.error:.3f}")
    return figure


def plot_reliability(estimator: Any, X: Any, y: Any, bins: int = 10) -> Figure:
    """Frequency of the predicted class against its probability."""
    probabilities = estimator.predict_proba(X)
    confidence = probabilities.max(1)
    right = estimator.classes_[probabilities.argmax(1)] == np.asarray(y).ravel()
    which = np.minimum((confidence * bins).astype(int), bins - 1)
    filled = [b for b in range(bins) if (which == b).any()]
    figure, axes = _figure()
    axes.plot([0, 1], [0, 1], color=_GREY, lw=1)
    axes.plot(
        [confidence[which == b].mean() for b in filled], [right[which == b].mean() for b in filled], "o-", color=_BLUE
    )
    axes.set(xlabel="probability of the predicted class", ylabel="how often it was right", xlim=(0, 1), ylim=(0, 1.02))
    return figure


def plot_confusion(estimator: Any, X: Any, y: Any) -> Figure:
    """Counts of true and predicted classes."""
    classes = estimator.classes_
    truth, predicted = (np.searchsorted(classes, values) for values in (np.asarray(y).ravel(), estimator.predict(X)))
    counts = np.zeros((len(classes), len(classes)), dtype=int)
    np.add.at(counts, (truth, predicted), 1)
    figure, axes = _figure()
    axes.imshow(counts, cmap="Blues")
    if len(classes) <= 12:
        for (i, j), count in np.ndenumerate(counts):
            axes.text(
                j, i, str(count), ha="center", va="center", color="white" if count > counts.max() / 2 else "black"
            )
        axes.set_xticks(range(len(classes)), [str(c) for c in classes], rotation=45, ha="right")
        axes.set_yticks(range(len(classes)), [str(c) for c in classes])
    axes.set(xlabel="predicted class", ylabel="true class")
    return figure


def plot_elbo(estimator: Any) -> Figure:
    """The ELBO per row during the fit, one line a replica."""
    elbo = estimator.history_.elbo
    window = max(1, len(elbo) // 50)
    steps = np.arange(window, len(elbo) + 1)
    figure, axes = _figure()
    for replica in range(elbo.shape[1]):
        axes.plot(steps, _smooth(elbo[:, replica], window), lw=1.2, color=_BLUE, alpha=1 if elbo.shape[1] == 1 else 0.6)
    finite = elbo[np.isfinite(elbo)]
    if finite.size:
        low, high = np.quantile(finite, [0.05, 1])
        axes.set_ylim(low - 0.1 * (high - low) - 1e-6, high + 0.1 * (high - low) + 1e-6)
    axes.set(xlabel="step", ylabel="ELBO per row (standard units)")
    return figure


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Means over a window, of what is finite in it."""
    finite = np.isfinite(values)
    total = np.convolve(np.where(finite, values, 0), np.ones(window), "valid")
    count = np.convolve(finite, np.ones(window), "valid")
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def plot_relevance(estimator: Any, most: int = 20) -> Figure:
    """Relevance of the inputs: inverse ARD lengthscales, in units of the columns' standard deviations."""
    names, relevance = input_relevance(estimator)
    order = np.argsort(relevance)[::-1][:most][::-1]
    figure, axes = _figure(height=max(2.2, 0.28 * len(order) + 0.8))
    axes.barh([_short(names[i]) for i in order], relevance[order], color=_BLUE)
    axes.set(xlabel="relevance (1 / lengthscale)")
    return figure


def plot_grams(estimator: Any, num_samples: int = 50) -> Figure:
    """The Gram matrix of the inducing points below and above every hidden layer, centred, as correlations.

    Points are ordered by their outputs, so that a layer that has learned what matters shows it.
    """
    model = estimator.model_
    generator = torch.Generator(model.inducing_inputs.device).manual_seed(estimator.seed_)
    grams = [gram[estimator.replicas_[0]].numpy(force=True) for gram in sample_grams(model, num_samples, generator)]
    order = np.argsort(model.output.posterior.v[estimator.replicas_[0], :, 0].numpy(force=True))
    figure = Figure(figsize=(2.6 * len(grams) + 0.6, 2.9), layout="constrained")
    for index, (axes, gram) in enumerate(zip(np.atleast_1d(figure.subplots(1, len(grams))), grams, strict=True)):
        # What all points have in common does not change a distance, and would hide the rest.
        gram = gram - gram.mean(0) - gram.mean(1, keepdims=True) + gram.mean()
        scale = np.sqrt(np.maximum(gram.diagonal(), 1e-300))
        picture = axes.imshow((gram / scale / scale[:, None])[np.ix_(order, order)], cmap="RdBu_r", vmin=-1, vmax=1)
        axes.set(xticks=[], yticks=[], title="inputs" if index == 0 else f"layer {index}")
    figure.colorbar(picture, ax=figure.axes, shrink=0.8)
    return figure


def plot_effect(estimator: Any, X: Any, column: str, output: int = 0) -> Figure:
    """What the prediction does when one column moves and all others stay at their median, with a 90 % band.

    Args:
        estimator: Fitted.
        X: Rows that say where columns lie.
        column: Name of the one that moves; ``x0``, ``x1``, … where the fit had no names.
        output: Which target.
    """
    table = estimator.as_table(X)
    columns = {c.name: c for c in estimator.encoder_.columns}
    if column not in columns:
        raise ValueError(f"There is no column {column!r}. The columns are {', '.join(columns)}.")
    typical = {name: _typical(table[name], c.categories) for name, c in columns.items()}
    grid = _grid(table[column], columns[column].categories)
    frame = pd.DataFrame([typical] * len(grid)).assign(**{column: grid})
    inputs = frame if hasattr(estimator, "feature_names_in_") else frame.to_numpy()
    figure, axes = _figure(2.6)
    axes.set(xlabel=_short(column, 40))
    if hasattr(estimator, "classes_"):
        _draw_probabilities(axes, estimator, inputs, grid)
    else:
        _draw_band(axes, estimator, inputs, grid, output)
    return figure


def _draw_probabilities(axes: Any, estimator: Any, inputs: Any, grid: Sequence[Any]) -> None:
    probabilities = estimator.predict_proba(inputs)
    for k in range(len(estimator.classes_)) if len(estimator.classes_) > 2 else [1]:
        axes.plot(grid, probabilities[:, k], lw=1.5, label=str(estimator.classes_[k]))
    axes.set(ylim=(0, 1), ylabel="probability")
    axes.legend(fontsize=7)


def _draw_band(axes: Any, estimator: Any, inputs: Any, grid: Sequence[Any], output: int) -> None:
    mean = _column(estimator.predict(inputs), output)
    lower, upper = _quantiles(estimator, inputs, output)
    axes.set(ylabel=_short(estimator.target_names_[output]))
    if isinstance(grid[0], str):
        axes.errorbar(range(len(grid)), mean, [mean - lower, upper - mean], fmt="o", color=_BLUE)
        axes.set_xticks(range(len(grid)), [_short(str(g)) for g in grid], rotation=30, ha="right")
    else:
        axes.fill_between(grid, lower, upper, color="#bee3f8")
        axes.plot(grid, mean, color=_BLUE)


def most_relevant_columns(estimator: Any, most: int = 6) -> list[str]:
    """Columns of the table, by the relevance of what they became."""
    _, relevance = input_relevance(estimator)
    ends = np.cumsum([column.width for column in estimator.encoder_.columns])
    best = [part.max() for part in np.split(relevance, ends[:-1])]
    return [estimator.encoder_.columns[i].name for i in np.argsort(best)[::-1][:most]]


def input_relevance(estimator: Any) -> tuple[list[str], np.ndarray]:
    """Names of the encoded columns, and their inverse lengthscales, mean over replicas."""
    log_lengthscale = estimator.model_.log_input_lengthscale[estimator.replicas_].detach()
    return estimator.encoder_.feature_names, (-log_lengthscale).exp().mean(0).numpy(force=True)


def _typical(values: "pd.Series[Any]", categories: tuple[str, ...] | None) -> Any:
    if categories is None:
        return float(values.astype(float).median())
    return str(values.dropna().astype(str).mode().iloc[0])


def _grid(values: "pd.Series[Any]", categories: tuple[str, ...] | None) -> list[Any]:
    if categories is not None:
        return list(categories)
    low, high = np.nanquantile(values.astype(float), [0.02, 0.98])
    return np.linspace(low, high, _GRID).tolist()


def _intervals(estimator: Any, X: Any, y: Any, output: int) -> tuple[np.ndarray, ...]:
    truth, mean = _column(y, output), _column(estimator.predict(X), output)
    lower, upper = _quantiles(estimator, X, output)
    # The mean of a skewed mixture may lie outside of its interval by a hair.
    return truth, mean, np.minimum(lower, mean), np.maximum(upper, mean)


def _quantiles(estimator: Any, X: Any, output: int) -> tuple[np.ndarray, np.ndarray]:
    quantiles = estimator.predict_quantiles(X, (0.05, 0.95))
    quantiles = quantiles if quantiles.ndim == 2 else quantiles[:, output]
    return quantiles[:, 0], quantiles[:, 1]


def _column(values: Any, output: int) -> np.ndarray:
    values = np.asarray(values, dtype=float)
    return values if values.ndim == 1 else values[:, output]


def _some(X: Any, y: Any) -> tuple[Any, Any]:
    """At most so many rows that a plot stays readable, and quick."""
    count = len(y)
    if count <= _MAX_POINTS:
        return X, y
    rows = np.linspace(0, count - 1, _MAX_POINTS).astype(int)
    return tuple(table.iloc[rows] if hasattr(table, "iloc") else np.asarray(table)[rows] for table in (X, y))


def _short(name: str, length: int = 18) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def _figure(height: float = 3.4) -> tuple[Figure, Any]:
    figure = Figure(figsize=(4.6, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes

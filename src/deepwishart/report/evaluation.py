"""Metrics of an estimator on held-out rows, and of the simple models that it should beat."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from deepwishart.data.rows import Scaler
from deepwishart.metrics import calibration, coverage, crps_gaussian, gaussian_log_likelihood, rmse
from deepwishart.shallow import fit_shallow_gp

__all__ = ["Evaluation", "evaluate", "gaussian_process", "linear_model"]

_MAX_GP_ROWS = 2_000
_ROWS_AT_ONCE = 10_000


@dataclass(frozen=True)
class Evaluation:
    """How good a model is on some rows.

    Attributes:
        name: Of the model.
        metrics: By name, in the order in which they are shown.
    """

    name: str
    metrics: dict[str, float] = field(default_factory=dict)


def evaluate(estimator: Any, X: Any, y: Any, name: str | None = None) -> Evaluation:
    """Metrics of a fitted estimator: for numbers RMSE, log-likelihood, CRPS and coverage, for classes accuracy too."""
    name = name or type(estimator).__name__
    log_likelihood = estimator.log_likelihood(X, y)
    if hasattr(estimator, "classes_"):
        probabilities = estimator.predict_proba(X)
        truth = np.asarray(y).ravel()[:, None] == estimator.classes_
        brier = float(((probabilities - truth) ** 2).sum(1).mean())
        return Evaluation(
            name, {"accuracy": float(estimator.score(X, y)), "log-likelihood": log_likelihood, "Brier score": brier}
        )
    mean = estimator.predict(X)
    lower, upper = np.moveaxis(estimator.predict_quantiles(X, (0.05, 0.95)), -1, 0)
    y = np.asarray(y, dtype=float).reshape(mean.shape)
    return Evaluation(
        name,
        {
            "RMSE": rmse(y, mean),
            "log-likelihood": log_likelihood,
            "CRPS": estimator.crps(X, y),
            "90 % coverage": coverage(y, lower, upper),
            "calibration error": calibration(estimator.pit(X, y)).error,
        },
    )


def linear_model(estimator: Any, X_train: Any, y_train: Any, X: Any, y: Any) -> Evaluation:
    """Least squares on the encoded columns of the estimator, with normal errors."""
    A, B, Y_train, Y = _matrices(estimator, X_train, y_train, X, y)
    with_one = [np.concatenate([M, np.ones((len(M), 1))], 1) for M in (A, B)]
    weights, *_ = np.linalg.lstsq(with_one[0], Y_train, rcond=None)
    errors = Y_train - with_one[0] @ weights
    freedom = max(1, len(A) - np.linalg.matrix_rank(with_one[0]))
    std = np.sqrt((errors**2).sum(0) / freedom)
    return _of_normal("linear model", estimator, Y, with_one[1] @ weights, np.broadcast_to(std, Y.shape))


def gaussian_process(estimator: Any, X_train: Any, y_train: Any, X: Any, y: Any) -> Evaluation:
    """An exact GP with a squared exponential ARD kernel, on up to 2,000 rows."""
    A, B, Y_train, Y = (torch.from_numpy(values) for values in _matrices(estimator, X_train, y_train, X, y))
    rows = torch.randperm(len(A), generator=torch.Generator().manual_seed(0))[:_MAX_GP_ROWS]
    A, scaler = A[rows], Scaler.fit(Y_train[rows].numpy())
    standard = torch.from_numpy(scaler.forward(Y_train[rows].numpy()))
    gp = fit_shallow_gp(A, standard, generator=torch.Generator().manual_seed(0))

    def kernel(P: torch.Tensor, Q: torch.Tensor) -> torch.Tensor:
        return gp.variance * (-0.5 * torch.cdist(P / gp.lengthscale, Q / gp.lengthscale) ** 2).exp()

    L = torch.linalg.cholesky(kernel(A, A) + (gp.noise + 1e-8 * gp.variance) * torch.eye(len(A), dtype=A.dtype))
    seen = torch.linalg.solve_triangular(L, standard, upper=False)
    mean, variance = [], []
    for part in B.split(_ROWS_AT_ONCE):
        whitened = torch.linalg.solve_triangular(L, kernel(A, part), upper=False)
        mean.append(whitened.mT @ seen)
        variance.append((gp.variance - (whitened**2).sum(0)).clamp_min(0) + gp.noise)
    predicted = scaler.backward(torch.cat(mean).numpy())
    std = torch.cat(variance).sqrt()[:, None].numpy() * scaler.scale
    return _of_normal("plain GP", estimator, Y.numpy(), predicted, std)


def _matrices(estimator: Any, X_train: Any, y_train: Any, X: Any, y: Any) -> list[np.ndarray]:
    """Inputs and targets in the estimator's standard units."""
    inputs = [estimator.x_scaler_.forward(estimator.encode(table)) for table in (X_train, X)]
    targets = [
        estimator.y_scaler_.forward(np.asarray(values, dtype=float).reshape(len(values), -1)) for values in (y_train, y)
    ]
    return [*inputs, *targets]


def _of_normal(name: str, estimator: Any, Y: np.ndarray, mean: np.ndarray, std: np.ndarray) -> Evaluation:
    """Metrics of normal predictions, all in standard units, in the user's."""
    scaler = estimator.y_scaler_
    Y, mean, std = scaler.backward(Y), scaler.backward(mean), std * scaler.scale
    z = (Y - mean) / std
    from scipy.stats import norm

    return Evaluation(
        name,
        {
            "RMSE": rmse(Y, mean),
            "log-likelihood": gaussian_log_likelihood(Y, mean, std) * Y.shape[1],
            "CRPS": crps_gaussian(Y, mean, std),
            "90 % coverage": float((np.abs(z) <= norm.ppf(0.95)).mean()),
            "calibration error": calibration(norm.cdf(z)).error,
        },
    )

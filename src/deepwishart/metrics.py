"""How good predictions are: accuracy, proper scores, calibration. Plain arrays in, plain numbers out."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["Calibration", "calibration", "coverage", "crps_gaussian", "gaussian_log_likelihood", "rmse"]


def rmse(y: ArrayLike, mean: ArrayLike) -> float:
    """Root of the mean squared error of a prediction, over rows and outputs."""
    y, mean = _alike(y, mean)
    return float(np.sqrt(np.mean((y - mean) ** 2)))


def coverage(y: ArrayLike, lower: ArrayLike, upper: ArrayLike) -> float:
    """Share of observations within their intervals."""
    y, lower, upper = _alike(y, lower, upper)
    return float(np.mean((lower <= y) & (y <= upper)))


def _alike(*values: ArrayLike) -> list[np.ndarray]:
    """Arrays of one shape: others would broadcast to a table of all pairs, without a word."""
    arrays = [np.asarray(value) for value in values]
    if len({array.shape for array in arrays}) > 1:
        raise ValueError(f"Arrays must have one shape, got {', '.join(str(array.shape) for array in arrays)}.")
    return arrays


class Calibration(NamedTuple):
    """Promised and observed shares of observations in central intervals.

    Attributes:
        level: Probability of the interval, from 0 to 1.
        observed: Share of the observations that it covered.
        error: Mean absolute difference of the two.
    """

    level: np.ndarray
    observed: np.ndarray
    error: float


def calibration(pit: ArrayLike, levels: ArrayLike | None = None) -> Calibration:
    """Calibration of central intervals, from the predictive cdf at the observations (their PIT values)."""
    level = np.linspace(0.05, 0.95, 19) if levels is None else np.asarray(levels, dtype=float)
    # An interval of probability p covers y when the cdf there is within p/2 of ½.
    distance = 2 * np.abs(np.asarray(pit).ravel() - 0.5)
    observed = (distance[:, None] <= level).mean(0)
    return Calibration(level, observed, float(np.abs(observed - level).mean()))


def gaussian_log_likelihood(y: ArrayLike, mean: ArrayLike, std: ArrayLike) -> float:
    """Mean log-density of observations under normal predictions."""
    std = np.asarray(std)
    z = (np.asarray(y) - np.asarray(mean)) / std
    return float(np.mean(-0.5 * z**2 - np.log(std) - 0.5 * np.log(2 * np.pi)))


def crps_gaussian(y: ArrayLike, mean: ArrayLike, std: ArrayLike) -> float:
    """Mean continuous ranked probability score of normal predictions, in the units of y; lower is better."""
    from scipy.stats import norm

    std = np.asarray(std)
    z = (np.asarray(y) - np.asarray(mean)) / std
    return float(np.mean(std * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi))))

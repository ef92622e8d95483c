"""Matrices of rows: their scale, and which of them are the same."""

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Scaler", "merge_rows"]


@dataclass(frozen=True)
class Scaler:
    """Standardisation: x ↦ (x − mean)/scale, column by column.

    Attributes:
        mean: Shape ``(columns)``.
        scale: Standard deviations (with ddof 0); one for a constant column.
    """

    mean: np.ndarray
    scale: np.ndarray

    @classmethod
    def fit(cls, values: np.ndarray, weights: np.ndarray | None = None) -> "Scaler":
        """From the rows of a matrix, as often as they count."""
        mean = np.average(values, axis=0, weights=weights)
        scale = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weights))
        # A constant column has rounding errors for a standard deviation, and they are no scale.
        constant = scale <= 10 * np.finfo(float).eps * np.abs(mean)
        return cls(mean, np.where(constant, 1.0, scale))

    @classmethod
    def identity(cls, columns: int) -> "Scaler":
        """Leaves values as they are."""
        return cls(np.zeros(columns), np.ones(columns))

    def forward(self, values: np.ndarray) -> np.ndarray:
        """To standard units."""
        return (values - self.mean) / self.scale

    def backward(self, values: Any) -> Any:
        """To the user's units."""
        return values * self.scale + self.mean


def merge_rows(
    X: np.ndarray, Y: np.ndarray, weights: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The same data with every row once, in a fixed order, and how often each counts; ``None`` if all count once.

    Rows that do not count are left out. So data mean the same however they are sorted, and whether a row is repeated
    or has a weight.
    """
    count = np.ones(len(X)) if weights is None else weights
    kept = count > 0
    table = np.concatenate([X, Y], 1)[kept]
    rows, group = np.unique(table, axis=0, return_inverse=True)
    total = np.bincount(group.ravel(), weights=count[kept], minlength=len(rows))
    D = X.shape[1]
    return rows[:, :D], rows[:, D:], None if np.all(total == 1) else total

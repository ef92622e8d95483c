"""Inducing inputs from the data: rows that are far apart, and never the same row twice."""

import torch
from torch import Tensor

__all__ = ["choose_rows", "count_distinct_rows"]


def count_distinct_rows(X: Tensor) -> int:
    """The number of distinct rows of a table (N, D)."""
    return len(torch.unique(X, dim=0))


def choose_rows(X: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Indices of ``count`` distinct rows of a table (N, D), spread over the data by k-means++ seeding.

    Each next row is drawn with a probability proportional to the squared distance to the nearest one chosen: a row
    equal to a chosen one has probability zero.
    """
    chosen = torch.empty(count, dtype=torch.long, device=X.device)
    chosen[0] = torch.randint(len(X), (), generator=generator, device=X.device)
    nearest = torch.full((len(X),), torch.inf, dtype=X.dtype, device=X.device)
    for k in range(1, count):
        nearest = torch.minimum(nearest, ((X - X[chosen[k - 1]]) ** 2).sum(-1))
        chosen[k] = torch.multinomial(nearest / nearest.sum(), 1, generator=generator)
    return chosen

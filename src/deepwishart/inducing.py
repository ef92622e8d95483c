"""Inducing inputs from the data: rows that are far apart, and never the same row twice."""

import torch
from torch import Tensor

__all__ = ["choose_rows", "count_distinct_rows", "distinct_rows"]


def count_distinct_rows(X: Tensor) -> int:
    """The number of distinct rows of a table (N, D)."""
    return len(torch.unique(X, dim=0))


def choose_rows(X: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Indices of ``count`` distinct rows of a table (N, D), spread over the data by k-means++ seeding.

    Each next row is drawn with a probability proportional to the squared distance to the nearest one chosen: a row
    equal to a chosen one has probability zero.
    """
    rows = distinct_rows(X)
    table = X[rows]
    chosen = torch.empty(count, dtype=torch.long, device=X.device)
    chosen[0] = torch.randint(len(table), (), generator=generator, device=X.device)
    nearest = torch.full((len(table),), torch.inf, dtype=X.dtype, device=X.device)
    for k in range(1, count):
        nearest = torch.minimum(nearest, ((table - table[chosen[k - 1]]) ** 2).sum(-1))
        weights = nearest.clone()
        if weights.sum() == 0:  # what is left differs by less than the dtype can square
            weights.fill_(1.0)
        weights[chosen[:k]] = 0
        chosen[k] = torch.multinomial(weights / weights.sum(), 1, generator=generator)
    return rows[chosen]


def distinct_rows(X: Tensor) -> Tensor:
    """The first row number of every distinct row."""
    _, group = torch.unique(X, dim=0, return_inverse=True)
    first = torch.full((int(group.max()) + 1,), len(X), dtype=torch.long, device=X.device)
    first.scatter_reduce_(0, group, torch.arange(len(X), device=X.device), "amin")
    return first.sort().values

"""A plain GP, fitted in seconds: which inputs matter, how much noise there is, how many inducing points it takes.

The marginal likelihood of an exact GP is smooth and cheap, and a quasi-Newton method finds its optimum in a hundred
steps. Deep models start from there, see :mod:`deepwishart.starting`.
"""

import math
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Normal

from deepwishart.inducing import distinct_rows
from deepwishart.linalg import add_to_diagonal, default_jitter

__all__ = [
    "Criterion",
    "ShallowGP",
    "average_repeated",
    "count_inducing",
    "fit_shallow_gp",
]

_MAX_ROWS = 1_000
_MAX_ITERATIONS = 200
# The search for a good maximum of the marginal likelihood.
_STARTS, _FOLLOWED = 12, 2
_ROWS_TO_SEARCH = 700
_SEARCH_ITERATIONS = 30
_FOLDS = 5
_LIKENESS = 0.5
_LEAST_NOISE, _LARGEST_LOG = 1e-6, math.log(1e4)
# Inducing points are enough when the variance that they leave is at most this share of the noise.
_SHARE_OF_NOISE = 0.1
_ROWS_TO_COUNT = 2_000


Criterion = Literal["prediction", "likelihood"]


class ShallowGP(NamedTuple):
    """What a GP with the kernel h² exp(−½ Σ_d (x_d − x′_d)²/ℓ_d²) and noise σ² has learned.

    Attributes:
        lengthscale: ℓ, shape ``(*batch, D)``.
        variance: h², shape ``(*batch)``.
        noise: σ², shape ``(*batch)``.
    """

    lengthscale: Tensor
    variance: Tensor
    noise: Tensor


def fit_shallow_gp(
    X: Tensor,
    Y: Tensor,
    weights: Tensor | None = None,
    max_rows: int = _MAX_ROWS,
    num_starts: int = _STARTS,
    choose_by: Criterion = "prediction",
    generator: torch.Generator | None = None,
) -> ShallowGP:
    """Maximise the marginal likelihood of an exact GP, all outputs sharing its hyperparameters.

    It has many maxima, which differ in the inputs that matter and in the noise, and predict very differently. They are
    looked for from several starts, in few iterations; the best are followed to their end.

    Where inputs repeat, it is the likelihood of the means of their targets: rows that are equal in all would speak for
    no noise. The noise of a row is then that of the means, and what varies between rows of equal inputs.

    Args:
        X: Standardised inputs, shape ``(N, D)``.
        Y: Standardised targets, shape ``(N, outputs)``.
        weights: How often each row counts, shape ``(N)``; once by default.
        max_rows: Of more distinct rows, so many are taken at random.
        num_starts: Points from which to search.
        choose_by: What makes a maximum the best: ``"prediction"`` of held-out rows, or its ``"likelihood"``. A GP that
            predicts better by shorter lengthscales is more than few inducing points can hold.
        generator: Source of randomness.
    """
    if choose_by not in get_args(Criterion):
        raise ValueError(f"choose_by must be one of {', '.join(get_args(Criterion))}, got {choose_by!r}.")
    if not (X.isfinite().all() and Y.isfinite().all()):
        raise ValueError("X and Y must be finite.")
    weights = Y.new_ones(len(Y)) if weights is None else weights
    average = average_repeated(X, Y, weights)
    within = (weights[:, None] * (Y - average) ** 2).sum() / (weights.sum() * Y.shape[-1])
    rows = distinct_rows(X)
    rows = rows[torch.randperm(len(rows), generator=generator, device=X.device)][:max_rows]
    X, Y = X[rows].double(), average[rows].double()
    few = slice(_ROWS_TO_SEARCH)
    starts = _starting_points(X.shape[-1], num_starts, generator)
    maxima = [_maximise(X[few], Y[few], logs, _SEARCH_ITERATIONS) for logs in starts]
    found = [_maximise(X, Y, logs) for logs in _best(maxima, X, Y, choose_by)[:_FOLLOWED]]
    lengthscale, variance, noise = _best(found, X, Y, choose_by)[0].exp().to(within).split([X.shape[-1], 1, 1])
    return ShallowGP(lengthscale, variance[0], noise[0] + within)


def _best(maxima: list[Tensor], X: Tensor, Y: Tensor, choose_by: Criterion) -> list[Tensor]:
    """In order, and last those that are noise by another name, and predict well by chance."""

    def worth(logs: Tensor) -> float:
        return cross_validated(X, Y, logs) if choose_by == "prediction" else marginal_likelihood(X, Y, logs)[0].item()

    return sorted(maxima, key=lambda logs: (has_neighbours(X, logs), worth(logs)), reverse=True)


def has_neighbours(X: Tensor, logs: Tensor) -> bool:
    """Whether most rows (N, D) have another that is like them, under a kernel; it cannot tell about new ones else."""
    _, K, _ = _kernel(X, logs)
    nearest = K.fill_diagonal_(0).amax(-1) / logs[-2].exp()
    return bool(nearest.median() >= _LIKENESS)


def _starting_points(D: int, count: int, generator: torch.Generator | None) -> Tensor:
    """Logarithms of lengthscales, height and noise, shape ``(count, D + 2)``; all but the first are random.

    They are short of lengthscale and noise: an input that was once taken for irrelevant hardly comes back.
    """
    points = torch.rand(count, D + 2, dtype=torch.float64, generator=generator)
    points[:, :D] = 0.25 * math.log(D) - 1 + 2 * points[:, :D]
    points[:, D], points[:, D + 1] = 0.0, -2 - 5 * points[:, D + 1]
    points[0] = 0.0
    points[0, :D] = 0.5 * math.log(D)
    return points


def _maximise(X: Tensor, Y: Tensor, start: Tensor, max_iterations: int = _MAX_ITERATIONS) -> Tensor:
    """The logarithms of lengthscales, height and noise at which the marginal likelihood has a maximum."""
    from scipy.optimize import minimize
    from threadpoolctl import threadpool_limits

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = marginal_likelihood(X, Y, torch.from_numpy(flat).to(X))
        if not (value.isfinite() and gradient.isfinite().all()):
            return 1e10, np.zeros_like(flat)
        return -value.item() / Y.numel(), -gradient.numpy(force=True) / Y.numel()

    bounds = [(-_LARGEST_LOG, _LARGEST_LOG)] * (len(start) - 1) + [(math.log(_LEAST_NOISE), math.log(10.0))]
    # Two pools of threads that wait by spinning, torch's and that of SciPy's BLAS, would stop each other.
    with threadpool_limits(1, user_api="blas"):
        found: Any = minimize(
            objective,
            start.numpy(force=True),
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"maxiter": max_iterations},
        )
    return torch.from_numpy(found.x).to(X)


def cross_validated(X: Tensor, Y: Tensor, logs: Tensor, folds: int = _FOLDS) -> float:
    """The mean log density of Y, each fold of the rows predicted from the others.

    Args:
        X: Shape ``(N, D)``.
        Y: Shape ``(N, C)``.
        logs: log ℓ, log h², log σ², shape ``(D + 2)``.
        folds: Parts of the rows, in their order.
    """
    _, K, white = _kernel(X, logs)
    total = 0.0
    for fold in torch.arange(len(X), device=X.device).chunk(folds):
        rest = torch.ones(len(X), dtype=torch.bool, device=X.device).index_fill_(0, fold, False)
        L, failed = torch.linalg.cholesky_ex(add_to_diagonal(K[rest][:, rest], white))
        if failed:
            return -math.inf  # such a kernel is of no use
        half = torch.linalg.solve_triangular(L, K[rest][:, fold], upper=False)
        mean = half.mT @ torch.linalg.solve_triangular(L, Y[rest], upper=False)
        variance = (K.diagonal()[fold] - (half**2).sum(0)).clamp_min(0) + white
        total += Normal(mean, variance[:, None].sqrt()).log_prob(Y[fold]).sum().item()
    return total / Y.numel()


def _kernel(X: Tensor, logs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled inputs, the kernel without noise, and the noise with its jitter."""
    D = X.shape[-1]
    Z = X * (-logs[:D]).exp()
    squares = 0.5 * (Z * Z).sum(-1)
    K = torch.addmm(logs[D] - squares, Z, Z.mT).sub_(squares[:, None]).exp_()
    return Z, K, logs[D + 1].exp() + default_jitter(X.dtype) * logs[D].exp()


def average_repeated(X: Tensor, values: Tensor, weights: Tensor | None = None) -> Tensor:
    """For every row of X (N, D), the mean of the values (N, C) of all rows that equal it, as often as they count."""
    _, group = torch.unique(X, dim=0, return_inverse=True)
    weights = values.new_ones(len(values)) if weights is None else weights
    total = values.new_zeros(int(group.max()) + 1).index_add_(0, group, weights)
    sums = values.new_zeros(len(total), values.shape[-1]).index_add_(0, group, weights[:, None] * values)
    return (sums / total[:, None])[group]


def marginal_likelihood(X: Tensor, Y: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    r"""The log marginal likelihood of all columns of Y together, and its gradient.

    With :math:`W = \tfrac12(\alpha\alpha^\top - C\,\Sigma^{-1}) \circ K`, where :math:`\Sigma = K + \sigma^2 I` and
    :math:`\alpha = \Sigma^{-1} Y` has C columns, a lengthscale has the gradient
    :math:`\sum_{ij} W_{ij} (z_{id} - z_{jd})^2` in its logarithm: two products, for all of them.

    Args:
        X: Shape ``(N, D)``.
        Y: Shape ``(N, C)``.
        logs: log ℓ, log h², log σ², shape ``(D + 2)``.
    """
    (N, D), C = X.shape, Y.shape[-1]
    variance, noise = logs[D:].exp()
    Z, K, white = _kernel(X, logs)
    L, _ = torch.linalg.cholesky_ex(add_to_diagonal(K, white))
    inverse = torch.cholesky_inverse(L)
    alpha = inverse @ Y
    value = -0.5 * (Y * alpha).sum() - C * (L.diagonal().log().sum() + 0.5 * N * math.log(2 * math.pi))
    outer = 0.5 * torch.addmm(inverse, alpha, alpha.mT, beta=-C)
    trace = outer.diagonal().sum()
    W = outer * K
    to_lengthscale = 2 * ((W.sum(-1, keepdim=True) * Z * Z).sum(0) - (Z * (W @ Z)).sum(0))
    to_variance = W.sum() + trace * default_jitter(X.dtype) * variance
    return value, torch.cat([to_lengthscale, to_variance[None], (trace * noise)[None]])


def count_inducing(X: Tensor, gp: ShallowGP, least: int = 250, most: int = 350) -> int:
    """How many inducing points a table (N, D) asks for, by what the GP has learned of it.

    Points are chosen one by one where the GP is least certain given those before, until what is left of its variance
    is small beside the noise: from there on, a sparse GP is as good as an exact one [B2019].
    """
    # A pivoted Cholesky factorisation, of which only the diagonal that is left is needed.
    Z = X[torch.linspace(0, len(X) - 1, min(len(X), _ROWS_TO_COUNT)).long()] / gp.lengthscale
    left = gp.variance.expand(len(Z)).clone()
    rows = Z.new_zeros(0, len(Z))
    most = min(most, len(Z))
    while len(rows) < most and (len(rows) < least or left.mean() > _SHARE_OF_NOISE * gp.noise):
        pivot = left.argmax()
        kernel = gp.variance * (-0.5 * ((Z - Z[pivot]) ** 2).sum(-1)).exp()
        row = (kernel - rows[:, pivot] @ rows) / left[pivot].clamp_min(1e-12).sqrt()
        rows = torch.cat([rows, row[None]])
        left = (left - row**2).clamp_min(0)
    return len(rows)

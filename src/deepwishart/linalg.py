r"""Cholesky factors, their inverses and log-determinants: the only room where jitter exists.

Jitter is relative. A matrix :math:`K` is factorised as

.. math:: L L^\top = K + \varepsilon\,\bar k\, I, \qquad \bar k = \operatorname{tr}(K) / P,

so that the same :math:`\varepsilon` serves a kernel of height 1e-3 and one of height 1e3. The default is the
square root of the dtype's machine epsilon (1.5e-8 in float64, 3.5e-4 in float32). Rounding in a conditional
variance :math:`k_{tt} - \lVert L^{-1} k_{it} \rVert^2` is of the order of epsilon times the condition number,
that is of ``epsilon / jitter``: at the square root it has come down to the size of the jitter itself.

There are two forms. :func:`cholesky` never looks at its result, hence never synchronises a device, and marks
what it could not factorise with NaN. :func:`checked_cholesky` escalates the jitter of the elements that need
it and raises :class:`FactorizationError` when that does not help.

Factors come with their inverses, and gradients flow back through both at once in matrix products alone, which is
several times faster than the triangular solves of a Cholesky factor's usual backward pass. [docs/performance.md]
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepwishart.products import inverse_factor, inverse_tril, product

__all__ = [
    "Cholesky",
    "FactorizationError",
    "absolute_jitter",
    "add_to_diagonal",
    "checked_cholesky",
    "cholesky",
    "column_norms",
    "columns_to_samples",
    "default_jitter",
    "factorise",
    "half_logdet",
    "inverse_tril",
    "is_symmetric",
    "log_abs_det",
    "pull_back",
    "samples_to_columns",
    "shared_matmul",
    "thin_cholesky",
]

_ESCALATION = 10.0
_LARGEST_JITTER = 0.1


class FactorizationError(RuntimeError):
    """A matrix has no Cholesky factor, even with the largest jitter tried."""


class Cholesky(NamedTuple):
    """A lower Cholesky factor with its inverse, so that every later solve is a matrix product.

    Attributes:
        tril: The factor ``L``, shape ``(*batch, P, P)``.
        tril_inverse: Its inverse, lower triangular, same shape.
        half_logdet: Half the log-determinant of the factorised matrix, shape ``(*batch)``.
        matrix: What was factorised, jitter included, shape ``(*batch, P, P)``.
        jitter: What was added to the diagonal (absolute), shape ``(*batch)``. A kernel with jitter is a kernel
            plus white noise, so the caller adds the same amount to the variances of its other points.
    """

    tril: Tensor
    tril_inverse: Tensor
    half_logdet: Tensor
    matrix: Tensor
    jitter: Tensor

    def whiten(self, rhs: Tensor) -> Tensor:
        """``L⁻¹ rhs``."""
        return shared_matmul(self.tril_inverse, rhs)

    def solve(self, rhs: Tensor) -> Tensor:
        """``(L Lᵀ)⁻¹ rhs``."""
        return self.tril_inverse.mT @ (self.tril_inverse @ rhs)

    def divide(self, divisor: float) -> "Cholesky":
        """The factor of the matrix divided by a positive number."""
        root, P = divisor**0.5, self.tril.shape[-1]
        return Cholesky(
            self.tril / root,
            self.tril_inverse * root,
            self.half_logdet - 0.5 * P * math.log(divisor),
            self.matrix / divisor,
            self.jitter / divisor,
        )


def default_jitter(dtype: torch.dtype) -> float:
    """The relative jitter used where none is given: the square root of the dtype's epsilon."""
    return float(torch.finfo(dtype).eps) ** 0.5


def cholesky(matrix: Tensor, jitter: Tensor | float | None = None) -> Cholesky:
    """Factorise without looking at the result: no device synchronisation, no error.

    Args:
        matrix: Symmetric, shape ``(*batch, P, P)``.
        jitter: Relative to the mean diagonal; a number or a tensor that broadcasts to ``(*batch)``.
            ``None`` takes :func:`default_jitter`.

    Returns:
        The factor. Elements without one are NaN throughout, so that the failure reaches the loss and nothing
        that looks like a number can be mistaken for a result.
    """
    if jitter is None:
        jitter = default_jitter(matrix.dtype)
    absolute = absolute_jitter(matrix, jitter)
    shifted = add_to_diagonal(matrix, absolute)
    L, L_inverse, half_logdet_K = _Factorise.apply(shifted)
    return Cholesky(L, L_inverse, half_logdet_K, shifted, absolute)


def checked_cholesky(matrix: Tensor, jitter: float | None = None, *, name: str = "matrix") -> Cholesky:
    """Factorise, raising the jitter tenfold at a time for those batch elements that need it.

    Args:
        matrix: Symmetric, shape ``(*batch, P, P)``.
        jitter: Where to start, relative to the mean diagonal. ``None`` takes :func:`default_jitter`.
        name: What the matrix is, for the error message: ``"kernel of layer 3"``.

    Raises:
        FactorizationError: If an element is not finite, not symmetric, or has no factor at a relative jitter of 0.1.
        ValueError: If the matrix is not square, or the jitter not a number from 0 to 0.1.
    """
    if not isinstance(matrix, Tensor) or not matrix.is_floating_point() or matrix.shape[-2:-1] != matrix.shape[-1:]:
        given = f"{tuple(matrix.shape)}, {matrix.dtype}" if isinstance(matrix, Tensor) else type(matrix).__name__
        raise ValueError(f"The {name} must be a floating-point tensor of shape (*batch, P, P), got {given}.")
    start = default_jitter(matrix.dtype) if jitter is None else jitter
    if not 0 <= start <= _LARGEST_JITTER:
        raise ValueError(
            f"jitter must be a number from 0 to {_LARGEST_JITTER}, relative to the diagonal, got {jitter}."
        )
    relative = _escalate(matrix.detach(), start, name)
    return cholesky(matrix, relative)


def half_logdet(tril: Tensor) -> Tensor:
    """Half of ``log|L Lᵀ|``: the sum of the log-diagonal of a triangular factor."""
    return tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def is_symmetric(matrix: Tensor) -> Tensor:
    """Whether |K_ij − K_ji| ≤ √ε √(K_ii K_jj) for all entries, so in any units; shape ``(*batch)``."""
    gap, variances = matrix - matrix.mT, matrix.diagonal(dim1=-2, dim2=-1).abs()
    tolerance = torch.finfo(matrix.dtype).eps ** 0.5
    clear = torch.linalg.vector_norm(gap, ord=torch.inf, dim=(-2, -1)) <= tolerance * variances.amin(-1)
    if clear.all():
        return clear
    root = variances.sqrt()
    return (gap.abs() <= tolerance * root[..., :, None] * root[..., None, :]).all(-1).all(-1)


def log_abs_det(matrix: Tensor) -> Tensor:
    """``log|det|`` of a square matrix; −inf where it is singular. Unlike ``slogdet``, a CUDA graph can capture it."""
    lu, _, _ = torch.linalg.lu_factor_ex(matrix, check_errors=False)
    return lu.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)


def thin_cholesky(gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    r"""The lower-trapezoidal :math:`\Phi` (P × rank) with :math:`\Phi\Phi^\top = G`.

    Reads the lower triangle of the first ``rank`` columns only: they determine a matrix of that rank.

    Returns:
        The factor, shape ``(*batch, P, rank)``, and whether the leading block was positive definite, shape
        ``(*batch)``; where it was not, the factor means nothing.
    """
    leading, info = torch.linalg.cholesky_ex(gram[..., :rank, :rank], check_errors=False)
    if rank == gram.shape[-1]:
        return leading, info == 0
    below = torch.linalg.solve_triangular(leading.mT, gram[..., rank:, :rank], upper=True, left=False)
    return torch.cat([leading, below], dim=-2), info == 0


def shared_matmul(A: Tensor, X: Tensor, multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> Tensor:
    """``A @ X`` where X may have leading dimensions that A has not: they become columns, so that A is not copied."""
    return columns_to_samples(multiply(A, samples_to_columns(X, A.ndim)), X, A.ndim)


def samples_to_columns(X: Tensor, ndim: int) -> Tensor:
    """(*sample, *batch, M, c) → (*batch, M, samples · c), with as many dimensions left as asked for."""
    extra = X.ndim - ndim
    if extra <= 0:
        return X
    return X.movedim(tuple(range(extra)), tuple(range(-1 - extra, -1))).flatten(-1 - extra)


def columns_to_samples(Y: Tensor, X: Tensor, ndim: int) -> Tensor:
    """Undo :func:`samples_to_columns` for a matrix Y that has as many columns as it gave X."""
    extra = X.ndim - ndim
    if extra <= 0:
        return Y
    return Y.unflatten(-1, (*X.shape[:extra], X.shape[-1])).movedim(tuple(range(-1 - extra, -1)), tuple(range(extra)))


def column_norms(A: Tensor) -> Tensor:
    """Squared norms of a matrix's columns, shape ``(*batch, columns)``."""
    norms: Tensor = _ColumnNorms.apply(A)
    return norms


class _ColumnNorms(torch.autograd.Function):
    """Σ_i A_ij², whose gradient needs one pass over A."""

    @staticmethod
    def forward(ctx: Any, A: Tensor) -> Tensor:
        ctx.save_for_backward(A)
        return (A * A).sum(-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (A,) = ctx.saved_tensors
        return A * (2 * grad)[..., None, :]


class _Factorise(torch.autograd.Function):
    """:func:`factorise`, with the gradients of all three results."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        L, L_inverse, half_logdet_K = factorise(matrix)
        ctx.save_for_backward(L, L_inverse)
        ctx.set_materialize_grads(False)
        return L, L_inverse, half_logdet_K

    @staticmethod
    def backward(ctx: Any, L_bar: Tensor | None, inverse_bar: Tensor | None, half_logdet_bar: Tensor | None) -> Tensor:
        L, J = ctx.saved_tensors
        inner = torch.zeros_like(L) if L_bar is None else product(L.mT, L_bar)
        if inverse_bar is not None:
            inner = inner - product(inverse_bar, J.mT)
        return pull_back(J, inner, half_logdet_bar)


def factorise(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """L, L⁻¹ and Σ log L_ii of a symmetric matrix, without gradients; NaN where there is no factor."""
    *factors, half_logdet_K = inverse_factor(matrix)
    L, L_inverse = (x.masked_fill(half_logdet_K.isnan()[..., None, None], torch.nan) for x in factors)
    return L, L_inverse, half_logdet_K


def pull_back(L_inverse: Tensor, inner: Tensor, half_logdet_bar: Tensor | None = None) -> Tensor:
    r"""The gradient of K = L Lᵀ from those of L, of J = L⁻¹ and of Σ log L_ii. [M2016]

    .. math:: \bar K = \tfrac12 J^\top (\Phi + \Phi^\top) J, \qquad \Phi = \Phi(L^\top \bar L - \bar J J^\top)

    where Φ takes the lower triangle with half of the diagonal.

    Args:
        L_inverse: J.
        inner: :math:`L^\top \bar L - \bar J J^\top`; the strict upper triangle is not read.
        half_logdet_bar: Gradient of Σ log L_ii, shape ``(*batch)``.
    """
    lower = inner.tril()
    if half_logdet_bar is not None:
        lower.diagonal(dim1=-2, dim2=-1).add_(half_logdet_bar[..., None])
    symmetric = (lower + lower.tril(-1).mT).mul_(0.5)
    return product(product(L_inverse.mT, symmetric), L_inverse)


def absolute_jitter(matrix: Tensor, relative: Tensor | float) -> Tensor:
    """Jitter in the matrix's own units; a matrix of zeros has none, and gets the jitter itself."""
    mean_diagonal = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    return relative * torch.where(mean_diagonal == 0, 1.0, mean_diagonal)


def add_to_diagonal(matrix: Tensor, amount: Tensor) -> Tensor:
    """A matrix (*batch, P, P) plus a multiple of the identity (*batch)."""
    shifted = matrix.diagonal(dim1=-2, dim2=-1) + amount[..., None]
    return torch.diagonal_scatter(matrix, shifted, dim1=-2, dim2=-1)


def _escalate(matrix: Tensor, start: float, name: str) -> Tensor:
    """The smallest jitter of start, 10·start, … at which each batch element has a factor."""
    _require_finite_and_symmetric(matrix, name)
    mean_diagonal = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    relative = torch.full_like(mean_diagonal, start)
    while True:
        _, info = torch.linalg.cholesky_ex(add_to_diagonal(matrix, relative * mean_diagonal), check_errors=False)
        failed = info != 0
        if not failed.any():
            return relative
        raised = torch.where(relative > 0, relative * _ESCALATION, default_jitter(matrix.dtype))
        if raised[failed].max() > _LARGEST_JITTER:
            raise FactorizationError(_failure_message(matrix, failed, start, relative, name))
        relative = torch.where(failed, raised, relative)


def _require_finite_and_symmetric(matrix: Tensor, name: str) -> None:
    finite = matrix.isfinite().all(-1).all(-1)
    if not finite.all():
        index = (~finite).nonzero()[0].tolist()
        raise FactorizationError(
            f"The {name} ({_size(matrix)}) has non-finite entries{_at(index)}. No jitter can mend that: look for "
            f"NaN or infinity in the inputs, or for a lengthscale, height or learning rate that has run away."
        )
    symmetric = is_symmetric(matrix)
    if not symmetric.all():
        index = (~symmetric).nonzero()[0].tolist()
        raise FactorizationError(
            f"The {name} ({_size(matrix)}) is not symmetric{_at(index)}. Pass (K + K.mT) / 2 if the difference is "
            f"rounding."
        )


def _failure_message(matrix: Tensor, failed: Tensor, start: float, relative: Tensor, name: str) -> str:
    index = failed.nonzero()[0].tolist()
    smallest = torch.linalg.eigvalsh(matrix[tuple(index)])[0].item()
    remedy = "use float64, " if matrix.dtype != torch.float64 else ""
    return (
        f"The {name} ({_size(matrix)}) has no Cholesky factor{_at(index)}: its smallest eigenvalue is "
        f"{smallest:.3g}, and relative jitter from {start:.1e} to {relative[failed].max().item():.1e} did not help. "
        f"To mend it, {remedy}remove duplicate rows, pass a larger jitter, or check that the diagonal is "
        f"positive."
    )


def _size(matrix: Tensor) -> str:
    return f"shape {tuple(matrix.shape)}, {str(matrix.dtype).removeprefix('torch.')}"


def _at(index: list[int]) -> str:
    return f" at batch element {tuple(index)}" if index else ""

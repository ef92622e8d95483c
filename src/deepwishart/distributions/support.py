r"""The set of positive semi-definite matrices of a given rank, and how to tell whether a matrix is in it.

A sample :math:`F F^\top` computed in floating point has rank P, strictly speaking. The test here allows just the
error that rounding can cause: with :math:`G = \begin{pmatrix} G_{11} & G_{12} \\ G_{21} & G_{22} \end{pmatrix}`
and :math:`W = G_{21} G_{11}^{-1}`, an error of :math:`\epsilon\sqrt{G_{ii}G_{jj}}` in each entry moves the Schur
complement, which is zero at the right rank, by no more than :math:`\epsilon\,(\sqrt{G_{ii}} + \sum_k
|W_{ik}|\sqrt{G_{kk}})(\sqrt{G_{jj}} + \sum_k |W_{jk}|\sqrt{G_{kk}})` to first order. No eigenvalue is computed
unless there is an error to explain.
"""

import torch
from torch import Tensor
from torch.distributions import constraints

from deepwishart.distributions.validation import where_in
from deepwishart.linalg import thin_cholesky

__all__ = ["PositiveSemidefiniteOfRank", "factorise_value"]

_ROUNDING = 8.0


class PositiveSemidefiniteOfRank(constraints.Constraint):
    """Symmetric positive semi-definite matrices of one rank whose leading block of that size is non-singular.

    Args:
        rank: From 1 to P; at P these are the positive definite matrices.
    """

    event_dim = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        finite = value.isfinite().all(-1).all(-1)
        phi = thin_cholesky(value, self.rank)
        return finite & _is_symmetric(value) & _has_rank(value, phi, self.rank)

    def __repr__(self) -> str:
        return f"PositiveSemidefiniteOfRank({self.rank})"


def factorise_value(value: Tensor, rank: int, batch_shape: torch.Size, like: Tensor) -> Tensor:
    """The thin Cholesky factor of a value that must lie in the support.

    Args:
        value: Shape ``(*sample, *batch, P, P)``.
        rank: The rank that the value must have.
        batch_shape: What the leading dimensions of the value must broadcast with.
        like: A parameter of the distribution, for P, dtype and device.

    Raises:
        ValueError: If the value has the wrong shape or dtype, is not finite, not symmetric, not positive
            semi-definite, or of another rank.
    """
    _check_form(value, batch_shape, like)
    finite = value.isfinite()
    if not finite.all():
        raise ValueError(
            f"value must be finite, got {value[~finite][0].item()}{where_in(~finite)}. "
            f"Check the computation that produced it."
        )
    symmetric = _is_symmetric(value)
    if not symmetric.all():
        gap = (value - value.mT).abs()[~symmetric][0].max().item()
        raise ValueError(
            f"value must be symmetric, got entries that differ by {gap:.3g} from their mirror image"
            f"{where_in(~symmetric)}. Pass (value + value.mT) / 2 if the difference is rounding."
        )
    phi = thin_cholesky(value, rank)
    valid = _has_rank(value, phi, rank)
    if not valid.all():
        raise ValueError(_explain_rank(value[~valid][0], rank, where_in(~valid)))
    return phi


def _check_form(value: Tensor, batch_shape: torch.Size, like: Tensor) -> None:
    size = like.shape[-1]
    if not isinstance(value, Tensor) or tuple(value.shape[-2:]) != (size, size):
        given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"value must be a tensor of shape (…, {size}, {size}), got {given}.")
    if value.dtype != like.dtype or value.device != like.device:
        raise ValueError(
            f"value must have the distribution's dtype and device, {like.dtype} on {like.device}, got {value.dtype} "
            f"on {value.device}. Convert it with .to(…)."
        )
    try:
        torch.broadcast_shapes(value.shape[:-2], batch_shape)
    except RuntimeError:
        raise ValueError(
            f"The leading dimensions of value must broadcast with batch_shape {tuple(batch_shape)}, got "
            f"{tuple(value.shape[:-2])}. Put sample dimensions in front of batch dimensions."
        ) from None


def _is_symmetric(value: Tensor) -> Tensor:
    root = value.diagonal(dim1=-2, dim2=-1).abs().sqrt()
    allowed = torch.finfo(value.dtype).eps ** 0.5 * root[..., :, None] * root[..., None, :]
    return ((value - value.mT).abs() <= allowed).all(-1).all(-1)


def _has_rank(value: Tensor, phi: Tensor, rank: int) -> Tensor:
    tolerance = _ROUNDING * value.shape[-1] * torch.finfo(value.dtype).eps
    variances = value.diagonal(dim1=-2, dim2=-1)
    # A pivot that is rounding error: the leading block is singular. (Comparisons with NaN are false.)
    full_block = (phi.diagonal(dim1=-2, dim2=-1) ** 2 > tolerance * variances[..., :rank]).all(-1)
    if rank == value.shape[-1]:
        return full_block
    leading, below = phi[..., :rank, :], phi[..., rank:, :]
    residual = value[..., rank:, rank:] - below @ below.mT
    W = torch.linalg.solve_triangular(leading, below, upper=False, left=False)
    root = variances.clamp_min(0).sqrt()
    reach = root[..., rank:] + (W.abs() @ root[..., :rank, None]).squeeze(-1)
    nothing_left = (residual.abs() <= tolerance * reach[..., :, None] * reach[..., None, :]).all(-1).all(-1)
    return full_block & nothing_left


def _explain_rank(matrix: Tensor, rank: int, where: str) -> str:
    size = matrix.shape[-1]
    eigenvalues = torch.linalg.eigvalsh(matrix)
    tolerance = _ROUNDING * size * torch.finfo(matrix.dtype).eps * eigenvalues.abs().max().item()
    if eigenvalues[0] < -tolerance:
        return (
            f"value must be positive semi-definite, got a matrix with an eigenvalue of {eigenvalues[0].item():.3g}"
            f"{where}. Pass a Gram matrix F @ F.mT."
        )
    found = int((eigenvalues > tolerance).sum())
    if found != rank:
        return (
            f"value must have rank min(df, P) = {rank}, got a {size}×{size} matrix of numerical rank {found}{where}. "
            f"Pass F @ F.mT with an F of {rank} independent columns, or choose another df."
        )
    return (
        f"The leading {rank}×{rank} block of value must be non-singular: the density is with respect to its first "
        f"{rank} columns{where}. Reorder the rows and columns so that independent ones come first, or use float64."
    )

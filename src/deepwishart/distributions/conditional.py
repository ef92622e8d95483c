"""New rows and columns of a Wishart matrix, given those already drawn."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["WishartExtension", "extend_wishart"]


class WishartExtension(NamedTuple):
    """The features that new points t add to those of points i, whose Gram matrix is F Fᵀ.

    Attributes:
        features: f, points last, shape ``(*sample, *batch, r, N)``; G_it is F f.
        diagonal: G_tt of each new point with itself, shape ``(*sample, *batch, N)``.
    """

    features: Tensor
    diagonal: Tensor


def extend_wishart(mean: Tensor, residual: Tensor, noise: Tensor) -> WishartExtension:
    r"""Extend G_ii = F Fᵀ by N points, each drawn independently of the others given G_ii.

    The columns of the features of all points are Gaussian with covariance S, so with :math:`S_{ii} = L L^\top`

    .. math:: f_t = F_w^\top a_t + \sqrt{s_t}\,\xi, \quad F_w = L^{-1}F, \quad a_t = L^{-1} s_{it}, \quad
        s_t = S_{tt} - \lVert a_t\rVert^2, \quad \xi \sim \mathcal{N}(0, I_\nu),

    :math:`G_{it} = F f_t` and :math:`G_{tt} = \lVert f_t\rVert^2`. Where ν > M, F has M columns, and the ν − M others
    are zero at the points i but not at t. [O2023, algorithm 1]

    Args:
        mean: :math:`F_w^\top a`, shape ``(*sample, *batch, r, N)`` with r = min(ν, M).
        residual: :math:`s`, shape ``(*batch, N)``; values below the smallest positive number count as that.
        noise: :math:`\xi`, standard normals of shape ``(*sample, *batch, ν, N)``.
    """
    return WishartExtension(*_Extend.apply(mean, residual, noise))


class _Extend(torch.autograd.Function):
    """In few passes over large tensors; autograd would take twice as many."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, residual: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        rank, spread = mean.shape[-2], _spread(residual)
        f = torch.addcmul(mean, spread, noise[..., :rank, :])
        diagonal = _squared_norms(f)
        if noise.shape[-2] > rank:
            diagonal = diagonal + _squared_norms(spread * noise[..., rank:, :])
        ctx.save_for_backward(f, residual, noise)
        ctx.mean_shape = mean.shape
        return f, diagonal

    @staticmethod
    def backward(ctx: Any, f_bar: Tensor, diagonal_bar: Tensor) -> tuple[Tensor | None, ...]:
        f, residual, noise = ctx.saved_tensors
        rank, spread, twice = f.shape[-2], _spread(residual), (2 * diagonal_bar)[..., None, :]
        f_bar = torch.addcmul(f_bar, f, twice)
        spread_bar = (f_bar * noise[..., :rank, :]).sum(-2, keepdim=True)
        beyond = noise[..., rank:, :]
        if noise.shape[-2] > rank:
            spread_bar = spread_bar + twice * spread * _squared_norms(beyond)[..., None, :]
        residual_bar = (0.5 * spread_bar / spread).squeeze(-2).sum_to_size(residual.shape)
        residual_bar = residual_bar.masked_fill(residual < torch.finfo(residual.dtype).tiny, 0.0)
        noise_bar = None
        if ctx.needs_input_grad[2]:
            noise_bar = torch.cat([f_bar * spread, twice * spread**2 * beyond], -2).sum_to_size(noise.shape)
        return f_bar.sum_to_size(ctx.mean_shape), residual_bar, noise_bar


def _spread(residual: Tensor) -> Tensor:
    return residual.clamp_min(torch.finfo(residual.dtype).tiny).sqrt()[..., None, :]


def _squared_norms(A: Tensor) -> Tensor:
    return (A * A).sum(-2)

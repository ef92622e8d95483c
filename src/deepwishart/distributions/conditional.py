"""New rows and columns of a Wishart matrix, given those already drawn."""

from typing import NamedTuple

import torch
from torch import Tensor

from deepwishart.linalg import column_norms

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
    rank = mean.shape[-2]
    spread = residual.clamp_min(torch.finfo(residual.dtype).tiny).sqrt()[..., None, :]
    f = torch.addcmul(mean, spread, noise[..., :rank, :])
    diagonal = column_norms(f)
    if noise.shape[-2] > rank:
        diagonal = diagonal + column_norms(spread * noise[..., rank:, :])
    return WishartExtension(f, diagonal)

"""New rows and columns of a Wishart matrix, given those already drawn."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["WishartExtension", "extend_wishart"]


class WishartExtension(NamedTuple):
    """The blocks that new points t add to a Gram matrix over points i.

    Attributes:
        cross: G_it, shape ``(*sample, *batch, M, N)``.
        diagonal: G_tt of each new point with itself, shape ``(*sample, *batch, N)``.
    """

    cross: Tensor
    diagonal: Tensor


def extend_wishart(
    F: Tensor, whitened_F: Tensor, whitened_cross: Tensor, residual: Tensor, noise: Tensor
) -> WishartExtension:
    r"""Extend G_ii = F Fᵀ by N points, each drawn independently of the others given G_ii.

    The columns of the features of all points are Gaussian with covariance S, so with :math:`S_{ii} = L L^\top`

    .. math:: f_t = F_w^\top a_t + \sqrt{s_t}\,\xi, \quad F_w = L^{-1}F, \quad a_t = L^{-1} s_{it}, \quad
        s_t = S_{tt} - \lVert a_t\rVert^2, \quad \xi \sim \mathcal{N}(0, I_\nu),

    :math:`G_{it} = F f_t` and :math:`G_{tt} = \lVert f_t\rVert^2`. Where ν > M, F has M columns, and the ν − M others
    are zero at the points i but not at t. [O2023, algorithm 1]

    Args:
        F: Factor of G_ii, shape ``(*sample, *batch, M, r)`` with r = min(ν, M).
        whitened_F: :math:`F_w`, same shape.
        whitened_cross: :math:`a`, shape ``(*batch, M, N)``.
        residual: :math:`s`, shape ``(*batch, N)``; values below the smallest positive number count as that.
        noise: :math:`\xi`, standard normals of shape ``(*sample, *batch, N, ν)``.
    """
    rank, df = F.shape[-1], noise.shape[-1]
    spread = residual.clamp_min(torch.finfo(residual.dtype).tiny).sqrt()
    mean = torch.nn.functional.pad(whitened_cross.mT @ whitened_F, (0, df - rank))
    f = mean + spread[..., :, None] * noise
    return WishartExtension(F @ f[..., :rank].mT, (f**2).sum(-1))

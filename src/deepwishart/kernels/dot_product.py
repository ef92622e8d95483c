r"""Kernels of inner products: linear and arc-cosine."""

import math

import torch
from torch import Tensor

from deepwishart.kernels.base import ScaledKernel

__all__ = ["ArcCosine0", "ArcCosine1", "Linear"]


class Linear(ScaledKernel):
    r""":math:`h^2 G_{ij}`."""

    def equation(self, g_ij: Tensor, g_ii: Tensor, g_jj: Tensor) -> Tensor:
        return self.variance * g_ij


class ArcCosine0(ScaledKernel):
    r"""Infinitely many steps: :math:`h^2(1 - \theta/\pi)` with :math:`\cos\theta = G_{ij}/\sqrt{G_{ii}G_{jj}}`."""

    def equation(self, g_ij: Tensor, g_ii: Tensor, g_jj: Tensor) -> Tensor:
        sine, cosine = _angle(g_ij, g_ii, g_jj)
        return self.variance * (1 - torch.atan2(sine, cosine) / math.pi)


class ArcCosine1(ScaledKernel):
    r"""Infinitely many ReLUs: :math:`\frac{h^2}{\pi}\sqrt{G_{ii}G_{jj}}\,(\sin\theta + (\pi - \theta)\cos\theta)`."""

    def equation(self, g_ij: Tensor, g_ii: Tensor, g_jj: Tensor) -> Tensor:
        sine, cosine = _angle(g_ij, g_ii, g_jj)
        theta = torch.atan2(sine, cosine)
        # sine and cosine are not normalised: both carry the factor √(G_ii G_jj).
        return self.variance / math.pi * (sine + (math.pi - theta) * cosine)


def _angle(g_ij: Tensor, g_ii: Tensor, g_jj: Tensor) -> tuple[Tensor, Tensor]:
    """√(G_ii G_jj) sin θ and √(G_ii G_jj) cos θ.

    The first is the root of a difference. What is left of that after rounding, where points are parallel, is taken to
    be zero, value and gradient: its root would be an angle of √ε that makes the kernel indefinite.
    """
    size = g_ii * g_jj
    area = size - g_ij**2
    positive = area > 16 * torch.finfo(g_ij.dtype).eps * size
    sine = torch.where(positive, torch.where(positive, area, 1.0).sqrt(), 0.0)
    return sine, g_ij

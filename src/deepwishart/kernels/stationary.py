r"""Kernels of the squared distance :math:`R_{ij} = G_{ii} - 2G_{ij} + G_{jj}`, with :math:`s = R/\lambda^2`."""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from deepwishart.kernels.base import ScaledKernel

__all__ = ["Matern12", "Matern32", "Matern52", "RationalQuadratic", "SquaredExponential", "Stationary"]


class Stationary(ScaledKernel):
    r"""A function of distance, :math:`h^2\,k(s)` with :math:`k(0) = 1`."""

    has_lengthscale = True

    @abstractmethod
    def profile(self, s: Tensor) -> Tensor:
        """k(s) for s ≥ 0."""

    def equation(self, g_ij: Tensor, g_ii: Tensor, g_jj: Tensor) -> Tensor:
        # (a − 2a) + a is exactly zero in floating point, so a point's distance to itself is; others may round below.
        R = ((g_ii - 2 * g_ij) + g_jj).clamp_min(0)
        return self.variance * self.profile(R / self.squared_lengthscale)


class SquaredExponential(Stationary):
    r""":math:`h^2\exp(-s/2)`."""

    def profile(self, s: Tensor) -> Tensor:
        return (-0.5 * s).exp()


class Matern12(Stationary):
    r""":math:`h^2\exp(-\sqrt s)`."""

    def profile(self, s: Tensor) -> Tensor:
        return (-_root(s)).exp()


class Matern32(Stationary):
    r""":math:`h^2(1 + \sqrt{3s})\exp(-\sqrt{3s})`."""

    def profile(self, s: Tensor) -> Tensor:
        d = _root(3 * s)
        return (1 + d) * (-d).exp()


class Matern52(Stationary):
    r""":math:`h^2(1 + \sqrt{5s} + 5s/3)\exp(-\sqrt{5s})`."""

    def profile(self, s: Tensor) -> Tensor:
        d = _root(5 * s)
        return (1 + d + d**2 / 3) * (-d).exp()


class RationalQuadratic(Stationary):
    r""":math:`h^2(1 + s/2a)^{-a}`, with a learned.

    Args:
        batch_shape: Shape of the replicas.
        learn_lengthscale: Whether λ is a parameter.
        dtype: Of the parameters.
    """

    def __init__(
        self,
        batch_shape: torch.Size = torch.Size(),
        learn_lengthscale: bool = True,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__(batch_shape, learn_lengthscale, dtype)
        self.log_exponent = nn.Parameter(torch.zeros(batch_shape, dtype=dtype))

    def profile(self, s: Tensor) -> Tensor:
        a = self.log_exponent.exp()[..., None, None]
        return (-a * (s / (2 * a)).log1p()).exp()


def _root(s: Tensor) -> Tensor:
    """√s whose gradient at s = 0 is finite, where it is multiplied by zero."""
    return s.clamp_min(torch.finfo(s.dtype).tiny).sqrt()

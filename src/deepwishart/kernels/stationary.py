r"""Kernels of the squared distance :math:`R_{ij} = G_{ii} - 2G_{ij} + G_{jj}`, with :math:`s = R/\lambda^2`."""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from deepwishart.gram import AnyGram, FeatureGram
from deepwishart.kernels.base import Projection, ScaledKernel
from deepwishart.kernels.exponential import exp_of_product, project_exp_of_product
from deepwishart.linalg import columns_to_samples, samples_to_columns
from deepwishart.products.kernel import thin_factors

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
    r""":math:`h^2\exp(-s/2)`; of features, it is the exponential of a product of thin matrices."""

    def profile(self, s: Tensor) -> Tensor:
        return (-0.5 * s).exp()

    def ii(self, gram: AnyGram) -> Tensor:
        if not isinstance(gram, FeatureGram):
            return super().ii(gram)
        P, Q, _ = self.factors(gram)
        return exp_of_product(P, Q, self.largest_exponent)

    def tt(self, gram: AnyGram) -> Tensor:
        return self.variance[..., 0].expand(gram.tt.shape)

    def project(self, gram: AnyGram, W: Tensor, X: Tensor) -> Projection:
        if not isinstance(gram, FeatureGram):
            return super().project(gram, W, X)
        P, _, p = self.factors(gram)
        columns = samples_to_columns(X, W.ndim)
        mean, norms = project_exp_of_product(P, p, self.largest_exponent, W, columns)
        return Projection(columns_to_samples(mean.mT, X, W.ndim).mT, norms)

    def factors(self, gram: FeatureGram) -> tuple[Tensor, Tensor, Tensor]:
        """P, Q, p with k_ii = exp(P Q) and k_it = exp(P p)."""
        inverse_lengthscale = (-self.log_lengthscale).exp()[..., None, None]
        two_log_height = 2 * self.log_height[..., None, None]
        return thin_factors(gram.inducing, gram.points, gram.tt, inverse_lengthscale, two_log_height)

    @property
    def largest_exponent(self) -> Tensor:
        """2 log h, without a gradient."""
        return 2 * self.log_height.detach()


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

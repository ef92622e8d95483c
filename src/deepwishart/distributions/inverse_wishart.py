"""The inverse Wishart distribution."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.types import _size

from deepwishart.distributions.bartlett import Bartlett, BartlettNoise
from deepwishart.distributions.base import expand_batch, factorise, initialise, validates
from deepwishart.distributions.mixing import TriangularRows
from deepwishart.distributions.support import PositiveSemidefiniteOfRank
from deepwishart.distributions.validation import (
    check_real_df,
    check_scale_tril,
    check_shapes,
    require_real_df,
    square_size,
)
from deepwishart.linalg import half_logdet

__all__ = ["InverseWishart"]


class InverseWishart(Distribution):
    r"""Inverse Wishart over positive definite matrices: :math:`G^{-1} \sim \mathrm{Wishart}(\Psi^{-1}, \nu)`.

    .. math:: \log p(G) = \nu\log|L| - \tfrac{\nu P}{2}\log 2 - \log\Gamma_P(\tfrac\nu2) - \tfrac{\nu+P+1}{2}\log|G|
        - \tfrac12\mathrm{tr}(\Psi G^{-1}), \qquad \Psi = L L^\top

    so that :math:`\mathbb{E}[G] = \Psi/(\nu - P - 1)`, as in SciPy. A sample is :math:`F F^\top` with
    :math:`F = L N^{-\top}`, where N is the Bartlett factor of a standard Wishart. [A2021]

    Args:
        df: Degrees of freedom :math:`\nu > P - 1`, real: a number, or a tensor of shape ``(*batch)``.
        scale_tril: Cholesky factor :math:`L` of :math:`\Psi`, shape ``(*batch, P, P)``.
        scale_tril_inverse: :math:`L^{-1}` if the caller has it; the KL divergence then needs no solve.
        validate_args: As in torch.distributions: whether values are checked.
    """

    has_rsample = True

    def __init__(
        self,
        df: Tensor | float,
        scale_tril: Tensor,
        *,
        scale_tril_inverse: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        P = square_size("scale_tril", scale_tril)
        self._nu = df if isinstance(df, Tensor) else scale_tril.new_tensor(require_real_df(df))
        batch_shape = check_shapes(
            df=(self._nu, ()), scale_tril=(scale_tril, (P, P)), scale_tril_inverse=(scale_tril_inverse, (P, P))
        )
        if validates(validate_args):
            check_real_df(self._nu, P)
            check_scale_tril(scale_tril)
        self.rows = TriangularRows(scale_tril, scale_tril_inverse)
        self.bartlett = Bartlett.standard(self._nu, P, scale_tril)
        initialise(self, batch_shape, scale_tril.shape[-2:], validates(validate_args))

    @property
    def arg_constraints(self) -> dict[str, constraints.Constraint]:
        return {
            "df": constraints.greater_than(self.event_shape[-1] - 1),
            "scale_tril": constraints.lower_cholesky,
        }

    @property
    def support(self) -> constraints.Constraint:
        return PositiveSemidefiniteOfRank(self.event_shape[-1])

    @property
    def df(self) -> Tensor:
        return self._nu.expand(self.batch_shape)

    @property
    def scale_tril(self) -> Tensor:
        return self.rows.matrix.expand(self.batch_shape + self.event_shape)

    # Sampling

    def draw_noise(self, sample_shape: _size = torch.Size(), generator: torch.Generator | None = None) -> BartlettNoise:
        """The noise of one :meth:`rsample_bartlett`; its shapes do not depend on any parameter's value."""
        return BartlettNoise.draw(self._extended_shape(torch.Size(sample_shape)), self.rows.matrix, generator)

    def rsample_bartlett(
        self,
        sample_shape: _size = torch.Size(),
        generator: torch.Generator | None = None,
        noise: BartlettNoise | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The factor N of the inverse and F = L N⁻ᵀ with F Fᵀ = G, both of shape ``(*sample, *batch, P, P)``.

        Args:
            sample_shape: Leading dimensions of independent samples.
            generator: Source of randomness; torch's global one if ``None``.
            noise: From :meth:`draw_noise`, instead of the two above.
        """
        if noise is None:
            noise = self.draw_noise(sample_shape, generator)
        N = self.bartlett.rsample(noise)
        F = torch.linalg.solve_triangular(N, self.rows.matrix.mT.expand_as(N), upper=False).mT
        return N, F

    def rsample(self, sample_shape: _size = torch.Size(), generator: torch.Generator | None = None) -> Tensor:
        _, F = self.rsample_bartlett(sample_shape, generator)
        return F @ F.mT

    def sample(self, sample_shape: _size = torch.Size(), generator: torch.Generator | None = None) -> Tensor:
        with torch.no_grad():
            return self.rsample(sample_shape, generator)

    # Densities

    def log_prob(self, value: Tensor) -> Tensor:
        phi, half_logdet_G = factorise(self, value, self.event_shape[-1], self.rows.matrix)
        # tr(Ψ G⁻¹) = ‖Φ⁻¹L‖².
        root = torch.linalg.solve_triangular(phi, self.rows.matrix, upper=False)
        return self._log_density(half_logdet_G, (root**2).sum((-2, -1)))

    def log_prob_bartlett(self, N: Tensor) -> Tensor:
        """Log-density of the G made from N by :meth:`rsample_bartlett`: nothing is factorised."""
        # |G| = |Ψ| / |N|² and tr(Ψ G⁻¹) = ‖N‖².
        return self._log_density(self.rows.logabsdet - half_logdet(N), (N**2).sum((-2, -1)))

    def _log_density(self, half_logdet_G: Tensor, trace: Tensor) -> Tensor:
        nu, P = self._nu, self.event_shape[-1]
        log_normaliser = nu * self.rows.logabsdet - 0.5 * nu * P * math.log(2) - torch.mvlgamma(0.5 * nu, P)
        return log_normaliser - (nu + P + 1) * half_logdet_G - 0.5 * trace

    # Moments

    @property
    def mean(self) -> Tensor:
        """Ψ/(ν − P − 1); NaN where ν ≤ P + 1, since there is none."""
        excess = (self.df - self.event_shape[-1] - 1)[..., None, None]
        return torch.where(excess > 0, self._scale_matrix / excess, torch.nan)

    @property
    def variance(self) -> Tensor:
        """Variance of every entry; NaN where ν ≤ P + 3, since there is none."""
        excess = (self.df - self.event_shape[-1])[..., None, None]
        psi = self._scale_matrix
        diagonal = psi.diagonal(dim1=-2, dim2=-1)
        outer = diagonal[..., :, None] * diagonal[..., None, :]
        variance = ((excess + 1) * psi**2 + (excess - 1) * outer) / (excess * (excess - 1) ** 2 * (excess - 3))
        return torch.where(excess > 3, variance, torch.nan)

    @property
    def _scale_matrix(self) -> Tensor:
        return self.scale_tril @ self.scale_tril.mT

    # Shapes

    def expand(self, batch_shape: _size, _instance: Any = None) -> Any:
        return expand_batch(self, batch_shape, _instance)

    def __repr__(self) -> str:
        return f"InverseWishart(batch_shape={tuple(self.batch_shape)}, event_shape={tuple(self.event_shape)})"

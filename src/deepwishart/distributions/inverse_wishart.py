"""The inverse Wishart distribution."""

import math

import torch
from torch import Tensor
from torch.distributions import constraints

from deepwishart.distributions.bartlett import Bartlett
from deepwishart.distributions.base import PSDDistribution, validates
from deepwishart.distributions.mixing import TriangularRows
from deepwishart.distributions.validation import (
    check_real_df,
    check_scale_tril,
    check_shapes,
    require_real_df,
    square_size,
)
from deepwishart.linalg import half_logdet

__all__ = ["InverseWishart"]


class InverseWishart(PSDDistribution):
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

    rows: TriangularRows

    def __init__(
        self,
        df: Tensor | float,
        scale_tril: Tensor,
        *,
        scale_tril_inverse: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        P = square_size("scale_tril", scale_tril)
        # Filled in on the device: a copy of a number from the host would synchronise it.
        self._nu = df if isinstance(df, Tensor) else scale_tril.new_full((), require_real_df(df))
        batch_shape = check_shapes(
            {"df": (self._nu, ()), "scale_tril": (scale_tril, (P, P))},
            {"scale_tril_inverse": (scale_tril_inverse, (P, P))},
        )
        if validates(validate_args):
            check_real_df(self._nu, P)
            check_scale_tril(scale_tril, scale_tril_inverse)
        super().__init__(TriangularRows(scale_tril, scale_tril_inverse), P, batch_shape, validate_args)

    @property
    def arg_constraints(self) -> dict[str, constraints.Constraint]:
        return {
            "df": constraints.greater_than(self.event_shape[-1] - 1),
            "scale_tril": constraints.lower_cholesky,
        }

    @property
    def df(self) -> Tensor:
        return self._nu.expand(self.batch_shape)

    @property
    def scale_tril(self) -> Tensor:
        return self._expanded(self.rows.matrix, 2)

    @property
    def bartlett(self) -> Bartlett:
        """The law of N, the factor of the inverse."""
        return Bartlett.standard(self._nu, self.event_shape[-1], self.rows.matrix)

    def _features(self, N: Tensor) -> Tensor:
        """F = L N⁻ᵀ."""
        L = self.rows.matrix
        return torch.linalg.solve_triangular(N, L.mT.expand_as(N), upper=False).mT

    # Densities

    def _log_prob_of_factor(self, phi: Tensor, half_logdet_G: Tensor) -> Tensor:
        # tr(Ψ G⁻¹) = ‖Φ⁻¹L‖².
        root = torch.linalg.solve_triangular(phi, self.rows.matrix, upper=False)
        return self._log_density(half_logdet_G, (root**2).sum((-2, -1)))

    def log_prob_bartlett(self, N: Tensor, F: Tensor) -> Tensor:
        """Log-density of G = F Fᵀ for a pair from :meth:`rsample_bartlett`: nothing is factorised, F is not needed."""
        # |G| = |Ψ| / |N|² and tr(Ψ G⁻¹) = ‖N‖².
        log_density = self._log_density(self.rows.logabsdet - half_logdet(N), (N**2).sum((-2, -1)))
        return self._batched(log_density)

    def _log_density(self, half_logdet_G: Tensor, trace: Tensor) -> Tensor:
        nu, P = self._nu, self.event_shape[-1]
        log_normaliser = nu * self.rows.logabsdet - 0.5 * nu * P * math.log(2) - torch.mvlgamma(0.5 * nu, P)
        return log_normaliser - (nu + P + 1) * half_logdet_G - 0.5 * trace

    # Moments

    @property
    def mean(self) -> Tensor:
        """Ψ/(ν − P − 1); NaN where ν ≤ P + 1, since there is none."""
        excess = (self.df - self.event_shape[-1])[..., None, None]
        exists = excess > 1
        return torch.where(exists, self._scale_matrix / torch.where(exists, excess - 1, 1.0), torch.nan)

    @property
    def variance(self) -> Tensor:
        """Variance of every entry; NaN where ν ≤ P + 3, since there is none."""
        excess = (self.df - self.event_shape[-1])[..., None, None]
        exists = excess > 3
        psi = self._scale_matrix
        diagonal = psi.diagonal(dim1=-2, dim2=-1)
        outer = diagonal[..., :, None] * diagonal[..., None, :]
        # Masked before the division: what does not exist for one element must not poison another's gradient.
        denominator = torch.where(exists, excess * (excess - 1) ** 2 * (excess - 3), 1.0)
        return torch.where(exists, ((excess + 1) * psi**2 + (excess - 1) * outer) / denominator, torch.nan)

    @property
    def _scale_matrix(self) -> Tensor:
        return self.scale_tril @ self.scale_tril.mT

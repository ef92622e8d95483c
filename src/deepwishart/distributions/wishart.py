"""The Wishart distribution, singular or not."""

import math

from torch import Tensor
from torch.distributions import constraints

from deepwishart.distributions.bartlett_wishart import BartlettWishart
from deepwishart.distributions.base import validates
from deepwishart.distributions.mixing import TriangularRows
from deepwishart.distributions.validation import check_scale_tril, check_shapes, require_integer_df, square_size

__all__ = ["Wishart"]


class Wishart(BartlettWishart):
    r"""Wishart over positive semi-definite matrices, singular when ``df < P``.

    .. math:: G = \sum_{\lambda=1}^{\nu} f_\lambda f_\lambda^\top, \qquad f_\lambda \sim \mathcal{N}(0, L L^\top)

    so that :math:`\mathbb{E}[G] = \nu L L^\top`, as in SciPy. The density is with respect to the lower triangle of
    the first :math:`r = \min(\nu, P)` columns [O2023, eq. 30; S2003]:

    .. math:: \log p(G) = \tfrac{\nu(r-P)}{2}\log\pi - \tfrac{\nu P}{2}\log 2 - \nu\log|L| - \log\Gamma_r(\tfrac\nu2)
        + \tfrac{\nu-P-1}{2}\log|G_{:r,:r}| - \tfrac12\lVert L^{-1}F\rVert^2

    Args:
        df: Degrees of freedom :math:`\nu`, a positive integer.
        scale_tril: Cholesky factor :math:`L` of the scale, shape ``(*batch, P, P)``.
        scale_tril_inverse: :math:`L^{-1}` if the caller has it; solves then become matrix products.
        scale_tril_logabsdet: :math:`\log|L|` if the caller has it, shape ``(*batch)``.
        validate_args: As in torch.distributions: whether values are checked.

    Example:
        >>> prior = Wishart(2, torch.eye(3))
        >>> G = prior.sample((5,))
        >>> G.shape, torch.linalg.matrix_rank(G[0]).item()
        (torch.Size([5, 3, 3]), 2)
    """

    rows: TriangularRows
    arg_constraints = {"df": constraints.positive_integer, "scale_tril": constraints.lower_cholesky}

    def __init__(
        self,
        df: int,
        scale_tril: Tensor,
        *,
        scale_tril_inverse: Tensor | None = None,
        scale_tril_logabsdet: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        df = require_integer_df(df)
        P = square_size("scale_tril", scale_tril)
        batch_shape = check_shapes(
            {"scale_tril": (scale_tril, (P, P))},
            {"scale_tril_inverse": (scale_tril_inverse, (P, P)), "scale_tril_logabsdet": (scale_tril_logabsdet, ())},
        )
        if validates(validate_args):
            check_scale_tril(scale_tril, scale_tril_inverse, scale_tril_logabsdet)
        rows = TriangularRows(scale_tril, scale_tril_inverse, scale_tril_logabsdet)
        super().__init__(df, None, rows, None, batch_shape, validate_args)

    def _log_density(self, T: Tensor, half_logdet_G: Tensor, logabsdet_A: Tensor) -> Tensor:
        nu, P, r = self.df, self.event_shape[-1], self.rank
        constant = 0.5 * nu * ((r - P) * math.log(math.pi) - P * math.log(2)) - _log_multigamma(0.5 * nu, r)
        # tr(S⁻¹G) = ‖L⁻¹Φ‖² = ‖T‖².
        trace = (T**2).sum((-2, -1))
        return constant - nu * logabsdet_A + (nu - P - 1) * half_logdet_G - 0.5 * trace

    @property
    def mean(self) -> Tensor:
        return self.df * self.scale_matrix

    @property
    def variance(self) -> Tensor:
        S = self.scale_matrix
        s = S.diagonal(dim1=-2, dim2=-1)
        return self.df * (S**2 + s[..., :, None] * s[..., None, :])

    @property
    def scale_tril(self) -> Tensor:
        return self._expanded(self.rows.matrix, 2)

    @property
    def scale_matrix(self) -> Tensor:
        r"""The scale :math:`S = L L^\top`."""
        return self._expanded(self.rows.matrix @ self.rows.matrix.mT, 2)

    def whiten(self, rhs: Tensor) -> Tensor:
        """``L⁻¹ rhs``."""
        return self.rows.whiten(rhs)


def _log_multigamma(a: float, dimension: int) -> float:
    """log Γ_p(a), a number: ν is one for the whole batch."""
    return dimension * (dimension - 1) / 4 * math.log(math.pi) + sum(math.lgamma(a - 0.5 * j) for j in range(dimension))

"""What Wishart, GW, A-GW and AB-GW share: a Bartlett factor T, mixed into F = A T B, squared into G = F Fᵀ."""

import torch
from torch import Tensor

from deepwishart.distributions.bartlett import Bartlett
from deepwishart.distributions.base import PSDDistribution
from deepwishart.distributions.mixing import GeneralRows, TriangularRows
from deepwishart.linalg import shared_matmul

__all__ = ["BartlettWishart", "column_noise", "mix_columns"]


def mix_columns(T: Tensor, B: Tensor | None) -> Tensor:
    """T B, where ``None`` stands for the identity."""
    return T if B is None else T @ B


def column_noise(variance: Tensor, B: Tensor | None) -> Tensor:
    """Σ_j V_ij h_j with h = diag(B Bᵀ), shape ``(*batch, P)``: the noise that reaches each row of T B."""
    if B is None:
        return variance.sum(-1)
    return (variance @ (B**2).sum(-1, keepdim=True)).squeeze(-1)


class BartlettWishart(PSDDistribution):
    r"""Distribution of :math:`G = F F^\top` with :math:`F = A T B` and a Bartlett factor T.

    The density is with respect to Lebesgue measure on the lower triangle of the first r = min(ν, P) columns of G;
    the rest of a matrix of rank r follows from them.

    Args:
        df: Degrees of freedom ν.
        bartlett: Distribution of T (P × r); ``None`` for the standard one.
        rows: The matrix A (P × P).
        column_mixing: B (r × r), lower triangular, or ``None`` for the identity.
        batch_shape: What all parameters broadcast to.
        validate_args: Whether values are checked, as in torch.distributions.
    """

    def __init__(
        self,
        df: int,
        bartlett: Bartlett | None,
        rows: TriangularRows | GeneralRows,
        column_mixing: Tensor | None,
        batch_shape: torch.Size,
        validate_args: bool | None,
    ) -> None:
        self.df = df
        self._bartlett = bartlett
        self._B = column_mixing
        super().__init__(rows, min(df, rows.matrix.shape[-1]), batch_shape, validate_args)

    @property
    def bartlett(self) -> Bartlett:
        if self._bartlett is None:
            return Bartlett.standard(self.df, self.event_shape[-1], self.rows.matrix)
        return self._bartlett

    def detach_bartlett(self) -> "BartlettWishart":
        """The same distribution with the parameters of T held fixed, for path-derivative gradients."""
        new: BartlettWishart = self.expand(self.batch_shape)
        b = self.bartlett
        new._bartlett = Bartlett(b.concentration.detach(), b.rate.detach(), b.loc.detach(), b.scale.detach())
        return new

    def mix_columns(self, T: Tensor) -> Tensor:
        """T B."""
        return mix_columns(T, self._B)

    def _features(self, T: Tensor) -> Tensor:
        return shared_matmul(self.rows.matrix, self.mix_columns(T))

    # Densities

    def log_prob_bartlett(self, T: Tensor, F: Tensor) -> Tensor:
        """Log-density of G = F Fᵀ for a pair from :meth:`rsample_bartlett`.

        G is not factorised, and nothing of size P × P is if A is triangular or its determinant was given.
        """
        log_density = self._log_density(T, self.rows.half_logdet_leading(F), self.rows.logabsdet)
        return self._batched(log_density)

    def _log_prob_of_factor(self, phi: Tensor, half_logdet_G: Tensor) -> Tensor:
        Lambda, logabsdet_A = self.rows.unmix(phi)
        return self._log_density(self._unmix_columns(Lambda), half_logdet_G, logabsdet_A)

    def _unmix_columns(self, Lambda: Tensor) -> Tensor:
        """T from Λ, the lower-trapezoidal factor of T B Bᵀ Tᵀ with a positive diagonal."""
        if self._B is None:
            return Lambda
        # T B has the signs of B on its diagonal: T B = Λ diag(sign B_jj).
        TB = Lambda * self._B.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
        return torch.linalg.solve_triangular(self._B, TB, upper=False, left=False)

    def _log_density(self, T: Tensor, half_logdet_G: Tensor, logabsdet_A: Tensor) -> Tensor:
        """log Q(G) given T and half of log|G_{:r,:r}|. [O2023, eqs. 12–14, with the minors eliminated]"""
        nu, P, r = self.df, self.event_shape[-1], self.rank
        j = torch.arange(1, r + 1, dtype=T.dtype, device=T.device)
        log_diagonal = T.diagonal(dim1=-2, dim2=-1).log()
        return (
            (nu - P - 1) * half_logdet_G
            - nu * logabsdet_A
            + self.bartlett.log_prob(T)
            - ((nu - j - 1) * log_diagonal).sum(-1)
            - self.column_mixing_logjacobian(nu)
        )

    def column_mixing_logjacobian(self, df: int) -> Tensor:
        """Σ_j (ν + P − 2j + 1) log|B_jj|, what B takes from a log-density; 0 without B."""
        if self._B is None:
            return self.rows.matrix.new_zeros(())
        P, r = self.event_shape[-1], self.rank
        j = torch.arange(1, r + 1, dtype=self._B.dtype, device=self._B.device)
        return ((df + P - 2 * j + 1) * self._B.diagonal(dim1=-2, dim2=-1).abs().log()).sum(-1)

    # Moments

    def column_noise(self, variance: Tensor) -> Tensor:
        """Σ_j V_ij h_j with h = diag(B Bᵀ), shape ``(*batch, P)``: the noise that reaches each row of T B."""
        return column_noise(variance, self._B)

    @property
    def mean(self) -> Tensor:
        r""":math:`\mathbb{E}[G] = A\,(M H M^\top + \mathrm{diag}(V h))\,A^\top`.

        M and V are the mean and the variances of T, H = B Bᵀ and h = diag(H).
        """
        A = self.rows.matrix
        AMB = A @ self.mix_columns(self.bartlett.mean)
        noise = self.column_noise(self.bartlett.variance)
        return self._expanded(AMB @ AMB.mT + (A * noise[..., None, :]) @ A.mT, 2)

    @property
    def variance(self) -> Tensor:
        r"""Variance of every entry of G, from the first four cumulants of T.

        Needs r intermediate matrices of size P × P for each batch element. [docs/notation.md, "Moments"]
        """
        A, M, V, H = self.rows.matrix, self.bartlett.mean, self.bartlett.variance, self._column_gram
        A2, N, H2 = A**2, A @ M @ H, H**2
        # Y[l] = A diag(V[:, l]) Aᵀ: the covariance of rows i and j of A T in column l.
        Y = torch.einsum("...ik,...kl,...jk->...lij", A, V, A)
        quadratic = A2 @ V @ H2 @ V.mT @ A2.mT + torch.einsum("...lij,...lm,...mij->...ij", Y, H2, Y)
        X = A2 @ V @ (N**2).mT
        linear = X + X.mT + 2 * torch.einsum("...lij,...il,...jl->...ij", Y, N, N)
        return self._expanded(quadratic + linear + self._non_gaussian_variance(A, N, H), 2)

    def _non_gaussian_variance(self, A: Tensor, N: Tensor, H: Tensor) -> Tensor:
        """What the skewness and the kurtosis of T's diagonal add to Var[G]."""
        h = H.diagonal(dim1=-2, dim2=-1)
        moments, D = self.bartlett.moments, A[..., :, : self.rank]
        # Σ_d c_d h_d κ3_d (A_id N_jd + A_jd N_id) and Σ_d c_d² h_d² κ4_d, with c_d = A_id A_jd.
        third = (D**2 * (h * moments.third)[..., None, :]) @ (D * N).mT
        fourth = (D**2 * (h**2 * moments.fourth)[..., None, :]) @ (D**2).mT
        return 2 * (third + third.mT) + fourth

    @property
    def _column_gram(self) -> Tensor:
        if self._B is None:
            return torch.eye(self.rank, dtype=self.rows.matrix.dtype, device=self.rows.matrix.device)
        return self._B @ self._B.mT

    # Parameters as torch.distributions would show them

    @property
    def concentration(self) -> Tensor:
        return self._expanded(self.bartlett.concentration, 1)

    @property
    def rate(self) -> Tensor:
        return self._expanded(self.bartlett.rate, 1)

    @property
    def loc(self) -> Tensor:
        return self._expanded(self.bartlett.loc, 2)

    @property
    def scale(self) -> Tensor:
        return self._expanded(self.bartlett.scale, 2)

"""What Wishart, GW, A-GW and AB-GW share: a Bartlett factor T, mixed into F = A T B, squared into G = F Fᵀ."""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.types import _size

from deepwishart.distributions.bartlett import Bartlett, BartlettNoise
from deepwishart.distributions.mixing import GeneralRows, TriangularRows
from deepwishart.distributions.support import PositiveSemidefiniteOfRank, factorise_value
from deepwishart.linalg import half_logdet, thin_cholesky

__all__ = ["BartlettWishart", "expand_batch", "factorise", "initialise", "validates"]


def validates(validate_args: bool | None) -> bool:
    """Whether a distribution made with this argument looks at values; ``None`` is torch's class-wide setting."""
    return bool(Distribution._validate_args) if validate_args is None else validate_args


def initialise(
    distribution: Distribution, batch_shape: torch.Size, event_shape: torch.Size, validate_args: bool
) -> None:
    """torch's constructor without its check of the parameters, which ours precede with better messages."""
    Distribution.__init__(distribution, batch_shape, event_shape, validate_args=False)
    distribution._validate_args = validate_args


def factorise(distribution: Distribution, value: Tensor, rank: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The thin Cholesky factor of a value, and half the log-determinant of its leading block.

    A value without a factor is an error where the distribution validates, and has a NaN determinant where not.
    """
    if distribution._validate_args:
        phi = factorise_value(value, rank, distribution.batch_shape, like)
        return phi, half_logdet(phi)
    phi, definite = thin_cholesky(value, rank)
    return phi, half_logdet(phi).masked_fill(~definite, torch.nan)


def expand_batch(distribution: Any, batch_shape: _size, instance: Any) -> Any:
    """A copy with another batch shape. Parameters broadcast where they are used, so nothing else changes."""
    target = torch.Size(batch_shape)
    if not _broadcasts_to(distribution.batch_shape, target):
        raise ValueError(
            f"batch_shape {tuple(distribution.batch_shape)} cannot be expanded to {tuple(target)}: only dimensions of "
            f"size 1 grow, and new ones come in front."
        )
    new = distribution._get_checked_instance(type(distribution), instance)
    new.__dict__.update(distribution.__dict__)
    initialise(new, target, distribution.event_shape, distribution._validate_args)
    return new


def _broadcasts_to(shape: torch.Size, target: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(shape, target) == target
    except RuntimeError:
        return False


class BartlettWishart(Distribution):
    r"""Distribution of :math:`G = F F^\top` with :math:`F = A T B` and a Bartlett factor T.

    The density is with respect to Lebesgue measure on the lower triangle of the first r = min(ν, P) columns of G;
    the rest of a matrix of rank r follows from them.

    Parameters are kept with the batch shape that they were given and broadcast where they meet, so what samples
    or replicas share is computed once. As attributes they read back expanded to ``batch_shape``.

    Args:
        df: Degrees of freedom ν.
        bartlett: Distribution of T (P × r).
        rows: The matrix A (P × P).
        column_mixing: B (r × r), lower triangular, or ``None`` for the identity.
        batch_shape: What all parameters broadcast to.
        validate_args: Whether values are checked, as in torch.distributions.
    """

    has_rsample = True

    def __init__(
        self,
        df: int,
        bartlett: Bartlett,
        rows: TriangularRows | GeneralRows,
        column_mixing: Tensor | None,
        batch_shape: torch.Size,
        validate_args: bool | None,
    ) -> None:
        self.df = df
        self.bartlett = bartlett
        self.rows = rows
        self._B = column_mixing
        initialise(self, batch_shape, rows.matrix.shape[-2:], validates(validate_args))

    @property
    def rank(self) -> int:
        """r = min(df, P), the rank of every sample."""
        return self.bartlett.rank

    @property
    def support(self) -> constraints.Constraint:
        return PositiveSemidefiniteOfRank(self.rank)

    # Sampling

    def draw_noise(self, sample_shape: _size = torch.Size(), generator: torch.Generator | None = None) -> BartlettNoise:
        """The noise of one :meth:`rsample_bartlett`; its shapes do not depend on any parameter's value."""
        shape = torch.Size(sample_shape) + self.batch_shape + torch.Size((self.event_shape[-1], self.rank))
        return BartlettNoise.draw(shape, self.rows.matrix, generator)

    def rsample_bartlett(
        self,
        sample_shape: _size = torch.Size(),
        generator: torch.Generator | None = None,
        noise: BartlettNoise | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A factor T and F = A T B with F Fᵀ = G, both of shape ``(*sample, *batch, P, r)``.

        Args:
            sample_shape: Leading dimensions of independent samples.
            generator: Source of randomness; torch's global one if ``None``.
            noise: From :meth:`draw_noise`, instead of the two above.
        """
        if noise is None:
            noise = self.draw_noise(sample_shape, generator)
        T = self.bartlett.rsample(noise)
        return T, self.rows.matrix @ self.mix_columns(T)

    def rsample(self, sample_shape: _size = torch.Size(), generator: torch.Generator | None = None) -> Tensor:
        _, F = self.rsample_bartlett(sample_shape, generator)
        return F @ F.mT

    def sample(self, sample_shape: _size = torch.Size(), generator: torch.Generator | None = None) -> Tensor:
        with torch.no_grad():
            return self.rsample(sample_shape, generator)

    # Densities

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of a matrix, from which T is recovered. Costs factorisations: see :meth:`log_prob_bartlett`."""
        phi, half_logdet_G = factorise(self, value, self.rank, self.rows.matrix)
        return self._log_density(self._recover_bartlett(phi), half_logdet_G)

    def log_prob_bartlett(self, T: Tensor, F: Tensor) -> Tensor:
        """Log-density of G = F Fᵀ for a pair from :meth:`rsample_bartlett`: no P × P matrix is factorised."""
        return self._log_density(T, self.rows.half_logdet_leading(F))

    def _log_density(self, T: Tensor, half_logdet_G: Tensor) -> Tensor:
        """log Q(G) given T and half of log|G_{:r,:r}|. [O2023, eqs. 12–14, with the minors eliminated]"""
        nu, P, r = self.df, self.event_shape[-1], self.rank
        j = torch.arange(1, r + 1, dtype=T.dtype, device=T.device)
        log_diagonal = T.diagonal(dim1=-2, dim2=-1).log()
        return (
            (nu - P - 1) * half_logdet_G
            - nu * self.rows.logabsdet
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

    def _recover_bartlett(self, phi: Tensor) -> Tensor:
        """T from the thin Cholesky factor Φ of G."""
        Lambda = self.rows.unmix(phi)
        if self._B is None:
            return Lambda
        # Λ has a positive diagonal and T B has the signs of B: T B = Λ diag(sign B_jj).
        TB = Lambda * self._B.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
        return torch.linalg.solve_triangular(self._B, TB, upper=False, left=False)

    # Moments

    def mix_columns(self, T: Tensor) -> Tensor:
        """T B."""
        return T if self._B is None else T @ self._B

    def column_noise(self, variance: Tensor) -> Tensor:
        """Σ_j V_ij h_j with h = diag(B Bᵀ), shape ``(*batch, P)``: the noise that reaches each row of T B."""
        if self._B is None:
            return variance.sum(-1)
        return (variance @ (self._B**2).sum(-1, keepdim=True)).squeeze(-1)

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

    # Shapes

    def expand(self, batch_shape: _size, _instance: Any = None) -> Any:
        return expand_batch(self, batch_shape, _instance)

    def _expanded(self, parameter: Tensor, event_dims: int) -> Tensor:
        event_shape = parameter.shape[parameter.ndim - event_dims :]
        return parameter.expand(self.batch_shape + event_shape)

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

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(df={self.df}, batch_shape={tuple(self.batch_shape)}, "
            f"event_shape={tuple(self.event_shape)})"
        )

r"""The Bartlett factor: the lower-trapezoidal T from which every distribution of this room is made."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from deepwishart.distributions.gamma import GammaNoise, standard_gamma

__all__ = ["Bartlett", "BartlettNoise", "RootGammaMoments", "root_gamma_moments"]

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class BartlettNoise(NamedTuple):
    """The noise behind one draw of T: data, not state, so a caller may keep it and use it again.

    Attributes:
        gaussian: Standard normals, one for each entry below the diagonal, shape ``(*sample, *batch, entries)``.
        gamma: Noise of the r diagonal entries, shape ``(*sample, *batch, r)``.
    """

    gaussian: Tensor
    gamma: GammaNoise

    @classmethod
    def draw(cls, shape: torch.Size, like: Tensor, generator: torch.Generator | None = None) -> "BartlettNoise":
        """Draw noise for factors of shape ``(*sample, *batch, P, r)`` with the dtype and device of ``like``."""
        *leading, num_rows, rank = shape
        entries = (*leading, _entries_below(num_rows, rank))
        gaussian = torch.randn(entries, dtype=like.dtype, device=like.device, generator=generator)
        gamma = GammaNoise.draw(torch.Size((*leading, rank)), like.dtype, like.device, generator)
        return cls(gaussian, gamma)

    def check(self, batch_shape: torch.Size, num_rows: int, rank: int, like: Tensor) -> None:
        """Refuse noise that was drawn for another shape, dtype or device."""
        *leading, entries = self.gaussian.shape
        fits = (
            entries == _entries_below(num_rows, rank)
            and self.gamma.boost.shape == (*leading, rank)
            and torch.Size(leading[len(leading) - len(batch_shape) :]) == batch_shape
            and (self.gaussian.dtype, self.gaussian.device) == (like.dtype, like.device)
        )
        if not fits:
            raise ValueError(
                f"noise must be drawn for factors of shape {('*sample', *batch_shape, num_rows, rank)}, {like.dtype} "
                f"on {like.device}, got Gammas of shape {tuple(self.gamma.boost.shape)} with {entries} normals each, "
                f"{self.gaussian.dtype} on {self.gaussian.device}. Use this distribution's own draw_noise."
            )

    def below_diagonal(self, num_rows: int) -> Tensor:
        """The normals in their places, shape ``(*sample, *batch, P, r)``, with zeros on and above the diagonal."""
        *leading, rank = self.gamma.boost.shape
        row, column = torch.tril_indices(num_rows, rank, offset=-1, device=self.gaussian.device)
        place = (row * rank + column).expand_as(self.gaussian)
        flat = self.gaussian.new_zeros((*leading, num_rows * rank)).scatter(-1, place, self.gaussian)
        return flat.unflatten(-1, (num_rows, rank))


def _entries_below(num_rows: int, rank: int) -> int:
    return num_rows * rank - rank * (rank + 1) // 2


class Bartlett:
    r"""The independent entries of a lower-trapezoidal factor T (P × r).

    .. math:: T_{jj}^2 \sim \mathrm{Gamma}(\alpha_j, \beta_j), \qquad T_{ij} \sim \mathcal{N}(\mu_{ij}, \sigma_{ij}^2)
        \quad (i > j)

    The rate convention is torch's: the mean of :math:`T_{jj}^2` is :math:`\alpha_j/\beta_j`. Parameters keep the
    batch shape they came with, so that what several samples share is computed once. [O2023, eq. 11]

    Args:
        concentration: :math:`\alpha`, shape ``(*batch, r)``.
        rate: :math:`\beta`, shape ``(*batch, r)``.
        loc: :math:`\mu`, shape ``(*batch, P, r)``; entries on and above the diagonal are ignored and read back as 0.
        scale: :math:`\sigma`, a standard deviation, shape ``(*batch, P, r)``; ignored entries read back as 1.
    """

    def __init__(self, concentration: Tensor, rate: Tensor, loc: Tensor, scale: Tensor) -> None:
        self.concentration = concentration
        self.rate = rate
        self.loc = loc.tril(-1)
        # Before any logarithm: a 0 in an ignored place must not become 0·∞ in a gradient. And by operations that save
        # nothing for the backward pass, so that one distribution serves several.
        self.scale = scale.tril(-1) + torch.ones_like(scale).triu()
        self.num_rows, self.rank = scale.shape[-2:]
        self._num_gaussians = _entries_below(self.num_rows, self.rank)

    @classmethod
    def standard(cls, df: Tensor | int, num_rows: int, like: Tensor) -> "Bartlett":
        """The factor of a standard Wishart, singular if ``df < num_rows``. [O2023, eqs. 10 and 32]"""
        rank = num_rows if isinstance(df, Tensor) else min(df, num_rows)
        concentration = standard_concentration(df, rank, like)
        loc = torch.zeros(num_rows, rank, dtype=like.dtype, device=like.device)
        return cls(concentration, torch.full_like(concentration, 0.5), loc, torch.ones_like(loc))

    def rsample(self, noise: BartlettNoise) -> Tensor:
        """T for the given noise, shape ``(*sample, *batch, P, r)``."""
        gaussian = torch.addcmul(self.loc, self.scale, noise.below_diagonal(self.num_rows))
        # Roots apart: a quotient of a small variate and a large rate could underflow to a zero without a gradient.
        diagonal = standard_gamma(self.concentration, noise.gamma).sqrt() / self.rate.sqrt()
        return torch.diagonal_scatter(gaussian, diagonal, dim1=-2, dim2=-1)

    def log_prob(self, T: Tensor) -> Tensor:
        """Log-density of the coordinates (T_jj², T_ij), i > j."""
        alpha, beta = self.concentration, self.rate
        log_diagonal = T.diagonal(dim1=-2, dim2=-1).log()
        log_gamma = (
            alpha * beta.log() - alpha.lgamma() + 2 * (alpha - 1) * log_diagonal - beta * (2 * log_diagonal).exp()
        )
        standardised = (T.tril(-1) - self.loc) / self.scale
        log_normal = -0.5 * standardised**2 - self.scale.log()
        return log_gamma.sum(-1) + log_normal.sum((-2, -1)) - self._num_gaussians * _HALF_LOG_2PI

    @property
    def moments(self) -> "RootGammaMoments":
        """Moments of the diagonal, each of shape ``(*batch, r)``."""
        return root_gamma_moments(self.concentration, self.rate)

    @property
    def mean(self) -> Tensor:
        """E[T], shape ``(*batch, P, r)``."""
        return self._with_diagonal(self.loc, self.moments.mean)

    @property
    def variance(self) -> Tensor:
        """The variances of T's entries, shape ``(*batch, P, r)``."""
        return self._with_diagonal((self.scale**2).tril(-1), self.moments.variance)

    def kl_to_base_measure(self, df: int) -> Tensor:
        r"""E[log q(T) − log p₀(T)] − ½E‖T‖², where p₀ is the standard factor of ``df`` degrees of freedom.

        That is the divergence from :math:`p_0(T)\,e^{\lVert T\rVert^2/2}`, the standard factor without its exponential,
        and needs neither :math:`\mu` nor a moment of T. The exponential returns as ½E[tr(S⁻¹G)] in
        :func:`deepwishart.distributions.kl.kl_wishart`.
        """
        alpha, beta = self.concentration, self.rate
        a = standard_concentration(df, self.rank, alpha)
        gamma = (alpha - a) * alpha.digamma() - alpha.lgamma() + a.lgamma() + a * (2 * beta).log() - alpha
        return gamma.sum(-1) - self.scale.log().sum((-2, -1)) - 0.5 * self._num_gaussians

    def _with_diagonal(self, strictly_lower: Tensor, diagonal: Tensor) -> Tensor:
        batch_shape = torch.broadcast_shapes(strictly_lower.shape[:-2], diagonal.shape[:-1])
        return torch.diagonal_scatter(
            strictly_lower.expand(*batch_shape, -1, -1), diagonal.expand(*batch_shape, -1), dim1=-2, dim2=-1
        )


def standard_concentration(df: Tensor | int, rank: int, like: Tensor) -> Tensor:
    """(ν − j + 1)/2 for j = 1 … rank: the concentrations of the standard Bartlett factor."""
    steps = torch.arange(rank, dtype=like.dtype, device=like.device)
    return 0.5 * ((df[..., None] if isinstance(df, Tensor) else df) - steps)


class RootGammaMoments(NamedTuple):
    """Mean, variance, third and fourth cumulant of the square root of a Gamma variate."""

    mean: Tensor
    variance: Tensor
    third: Tensor
    fourth: Tensor


# Coefficients of α⁻¹, α⁻², … in u = 1 − 4v, where v is the variance of √Gamma(α, 1). They follow from the Stirling
# series of log Γ(α + ½) − log Γ(α); at α = 32 eight of them leave a relative error of 3e-14.
_VARIANCE_SERIES = (
    1 / 8,
    1 / 32,
    -5 / 512,
    -23 / 2048,
    53 / 16384,
    593 / 65536,
    -5165 / 2097152,
    -110123 / 8388608,
)
_SERIES_FROM = 32.0


def root_gamma_moments(concentration: Tensor, rate: Tensor) -> RootGammaMoments:
    r"""Cumulants of :math:`\sqrt{g}`, :math:`g \sim \mathrm{Gamma}(\alpha, \beta)`, without cancellation.

    With :math:`w = \Gamma(\alpha+\frac12)/\Gamma(\alpha)`, :math:`v = \alpha - w^2` and :math:`u = 1 - 4v`, all four
    follow at rate one:

    .. math:: \kappa_1 = w, \quad \kappa_2 = v, \quad \kappa_3 = \tfrac12 w u, \quad
        \kappa_4 = \tfrac18 + \tfrac14 u - \tfrac38 u^2 - \alpha u.

    :math:`v` tends to ¼ while :math:`\alpha` and :math:`w^2` grow, so from α = 32 on :math:`u` is summed from its
    series. There are only ``r`` values a matrix: they are computed in float64 whatever the dtype.
    """
    alpha = concentration.double()
    large = alpha >= _SERIES_FROM
    # Each branch sees only values it can handle: `where` passes the gradients of both.
    above = torch.where(large, alpha, _SERIES_FROM)
    u_above = _horner(above.reciprocal())
    below = torch.where(large, 1.0, alpha)
    w_below = ((below + 0.5).lgamma() - below.lgamma()).exp()
    v_below = below - w_below**2

    u = torch.where(large, u_above, 1 - 4 * v_below)
    mean = torch.where(large, (above - (1 - u_above) / 4).sqrt(), w_below)
    variance = torch.where(large, (1 - u_above) / 4, v_below)
    third = 0.5 * mean * u
    fourth = 0.125 + 0.25 * u - 0.375 * u**2 - alpha * u

    root_rate = rate.double().sqrt()
    cumulants = (kappa / root_rate**k for k, kappa in enumerate((mean, variance, third, fourth), start=1))
    return RootGammaMoments(*(kappa.to(concentration.dtype) for kappa in cumulants))


def _horner(x: Tensor) -> Tensor:
    """The series of :data:`_VARIANCE_SERIES` in x = 1/α."""
    total = torch.zeros_like(x)
    for coefficient in reversed(_VARIANCE_SERIES):
        total = (total + coefficient) * x
    return total

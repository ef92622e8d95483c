r"""The Bartlett factor: the lower-trapezoidal T from which every distribution of this room is made."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepwishart.distributions.gamma import GammaNoise, standard_gamma_sample
from deepwishart.distributions.noise import standard_normal

__all__ = ["Bartlett", "BartlettNoise", "RootGammaMoments", "root_gamma_moments"]

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class BartlettNoise(NamedTuple):
    """The noise behind one draw of T: data, not state, so a caller may keep it and use it again.

    Attributes:
        gaussian: Standard normals, shape ``(*sample, *batch, P, r)``; those on and above the diagonal are not used.
        gamma: Noise of the r diagonal entries, shape ``(*sample, *batch, r)``.
    """

    gaussian: Tensor
    gamma: GammaNoise

    @classmethod
    def draw(cls, shape: torch.Size, like: Tensor, generator: torch.Generator | None = None) -> "BartlettNoise":
        """Draw noise for factors of shape ``(*sample, *batch, P, r)`` with the dtype and device of ``like``."""
        *leading, _, rank = shape
        gaussian = standard_normal(shape, like, generator)
        gamma = GammaNoise.draw(torch.Size((*leading, rank)), like, generator)
        return cls(gaussian, gamma)

    def check(self, batch_shape: torch.Size, num_rows: int, rank: int, like: Tensor) -> None:
        """Refuse noise that was drawn for another shape, dtype or device."""
        *leading, rows, columns = self.gaussian.shape
        fits = (
            (rows, columns) == (num_rows, rank)
            and self.gamma.boost.shape == (*leading, rank)
            and torch.Size(leading[len(leading) - len(batch_shape) :]) == batch_shape
            and (self.gaussian.dtype, self.gaussian.device) == (like.dtype, like.device)
        )
        if not fits:
            raise ValueError(
                f"noise must be drawn for factors of shape {('*sample', *batch_shape, num_rows, rank)}, {like.dtype} "
                f"on {like.device}, got {tuple(self.gaussian.shape)} with Gammas of shape "
                f"{tuple(self.gamma.boost.shape)}, {self.gaussian.dtype} on {self.gaussian.device}. Use this "
                f"distribution's own draw_noise."
            )


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
        self._num_gaussians = self.num_rows * self.rank - self.rank * (self.rank + 1) // 2

    @classmethod
    def standard(cls, df: Tensor | int, num_rows: int, like: Tensor) -> "Bartlett":
        """The factor of a standard Wishart, singular if ``df < num_rows``. [O2023, eqs. 10 and 32]"""
        rank = num_rows if isinstance(df, Tensor) else min(df, num_rows)
        concentration = standard_concentration(df, rank, like)
        loc = torch.zeros(num_rows, rank, dtype=like.dtype, device=like.device)
        return cls(concentration, torch.full_like(concentration, 0.5), loc, torch.ones_like(loc))

    def rsample(self, noise: BartlettNoise) -> Tensor:
        """T for the given noise, shape ``(*sample, *batch, P, r)``."""
        T: Tensor = _Draw.apply(self.concentration, self.rate, self.loc, self.scale, noise.gaussian, *noise.gamma)
        return T

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
    def mean_and_variance(self) -> tuple[Tensor, Tensor]:
        """E[T] and the variances of T's entries, each of shape ``(*batch, P, r)``."""
        mean, variance = root_gamma_mean_and_variance(self.concentration, self.rate)
        below = (self.scale * self.scale).tril(-1)
        return self._with_diagonal(self.loc, mean), self._with_diagonal(below, variance)

    @property
    def mean(self) -> Tensor:
        """E[T], shape ``(*batch, P, r)``."""
        return self.mean_and_variance[0]

    @property
    def variance(self) -> Tensor:
        """The variances of T's entries, shape ``(*batch, P, r)``."""
        return self.mean_and_variance[1]

    def kl_to_base_measure(self, df: int) -> Tensor:
        r"""E[log q(T) − log p₀(T)] − ½E‖T‖², where p₀ is the standard factor of ``df`` degrees of freedom.

        That is the divergence from :math:`p_0(T)\,e^{\lVert T\rVert^2/2}`, the standard factor without its exponential,
        and needs neither :math:`\mu` nor a moment of T. The exponential returns as ½E[tr(S⁻¹G)] in
        :func:`deepwishart.distributions.kl.kl_wishart`.
        """
        a = standard_concentration(df, self.rank, self.concentration)
        kl: Tensor = _KLToBaseMeasure.apply(self.concentration, self.rate, self.scale, a)
        return kl - 0.5 * self._num_gaussians

    def _with_diagonal(self, strictly_lower: Tensor, diagonal: Tensor) -> Tensor:
        batch_shape = torch.broadcast_shapes(strictly_lower.shape[:-2], diagonal.shape[:-1])
        return torch.diagonal_scatter(
            strictly_lower.expand(*batch_shape, -1, -1), diagonal.expand(*batch_shape, -1), dim1=-2, dim2=-1
        )


class _Draw(torch.autograd.Function):
    """T from its parameters and noise; the gradient of its diagonal is torch's implicit one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        concentration: Tensor,
        rate: Tensor,
        loc: Tensor,
        scale: Tensor,
        gaussian: Tensor,
        normal: Tensor,
        uniform: Tensor,
        boost: Tensor,
    ) -> Tensor:
        below = torch.addcmul(loc, scale, gaussian.tril(-1))
        variate = standard_gamma_sample(concentration, GammaNoise(normal, uniform, boost))
        # Roots apart: a quotient of a small variate and a large rate could underflow to a zero without a gradient.
        return torch.diagonal_scatter(below, variate.sqrt() / rate.sqrt(), dim1=-2, dim2=-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:5], output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, T_bar: Tensor) -> tuple[Tensor | None, ...]:
        concentration, rate, loc, scale, gaussian, T = ctx.saved_tensors
        below_bar = T_bar.tril(-1)
        diagonal, diagonal_bar = (x.diagonal(dim1=-2, dim2=-1) for x in (T, T_bar))
        alpha = concentration.expand_as(diagonal)
        # T_jj = √g/√β: its derivative by g is ½T_jj/g, by β −½T_jj/β.
        variate = (diagonal * diagonal * rate).clamp_min(torch.finfo(rate.dtype).tiny)
        half = 0.5 * diagonal_bar * diagonal
        concentration_bar = half / variate * torch._standard_gamma_grad(alpha, variate)
        return (
            concentration_bar.sum_to_size(concentration.shape),
            -(half / rate).sum_to_size(rate.shape),
            below_bar.sum_to_size(loc.shape),
            (below_bar * gaussian).sum_to_size(scale.shape),
            None,
            None,
            None,
            None,
        )


class _KLToBaseMeasure(torch.autograd.Function):
    """Σ_j [(α−a)ψ(α) − log Γ(α) + log Γ(a) + a log 2β − α] − Σ log σ."""

    @staticmethod
    def forward(ctx: Any, alpha: Tensor, beta: Tensor, sigma: Tensor, a: Tensor) -> Tensor:
        ctx.save_for_backward(alpha, beta, sigma, a)
        gamma = (alpha - a) * alpha.digamma() - alpha.lgamma() + a.lgamma() + a * (2 * beta).log() - alpha
        return gamma.sum(-1) - sigma.log().sum((-2, -1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, bar: Tensor) -> tuple[Tensor | None, ...]:
        alpha, beta, sigma, a = ctx.saved_tensors
        alpha_bar = bar[..., None] * ((alpha - a) * alpha.polygamma(1) - 1)
        beta_bar = bar[..., None] * (a / beta)
        sigma_bar = -bar[..., None, None] / sigma
        return (
            alpha_bar.sum_to_size(alpha.shape),
            beta_bar.sum_to_size(beta.shape),
            sigma_bar.sum_to_size(sigma.shape),
            None,
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


def root_gamma_moments(concentration: Tensor, rate: Tensor) -> RootGammaMoments:
    r"""Cumulants of :math:`\sqrt{g}`, :math:`g \sim \mathrm{Gamma}(\alpha, \beta)`, without cancellation.

    With :math:`w = \Gamma(\alpha+\frac12)/\Gamma(\alpha)`, :math:`v = \alpha - w^2` and :math:`u = 1 - 4v`, all four
    follow at rate one:

    .. math:: \kappa_1 = w, \quad \kappa_2 = v, \quad \kappa_3 = \tfrac12 w u, \quad
        \kappa_4 = \tfrac18 + \tfrac14 u - \tfrac38 u^2 - \alpha u.

    :math:`v` tends to ¼ while :math:`\alpha` and :math:`w^2` grow, so from α = 32 on :math:`u` is summed from its
    series. There are only ``r`` values a matrix: they are computed in float64 whatever the dtype.
    """
    alpha, root_rate = concentration.double(), rate.double().sqrt()
    w, v, u = _RootGamma.apply(alpha)
    fourth = 0.125 + 0.25 * u - 0.375 * u**2 - alpha * u
    cumulants = (kappa / root_rate**k for k, kappa in enumerate((w, v, 0.5 * w * u, fourth), start=1))
    return RootGammaMoments(*(kappa.to(concentration.dtype) for kappa in cumulants))


def root_gamma_mean_and_variance(concentration: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """The first two of :func:`root_gamma_moments`, which are all that a divergence needs."""
    w, v, _ = _RootGamma.apply(concentration.double())
    dtype = concentration.dtype
    return w.to(dtype) / rate.sqrt(), v.to(dtype) / rate


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
_SLOPE_SERIES = tuple(k * coefficient for k, coefficient in enumerate(_VARIANCE_SERIES, start=1))  # of −α du/dα
_SERIES_FROM = 32.0


class _RootGamma(torch.autograd.Function):
    """w, v and u of :func:`root_gamma_moments` from α, with their derivatives in closed form."""

    @staticmethod
    def forward(ctx: Any, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        large = alpha >= _SERIES_FROM
        u_above = _series(alpha, _VARIANCE_SERIES)
        below = torch.where(large, 1.0, alpha)
        w_below = ((below + 0.5).lgamma() - below.lgamma()).exp()
        v = torch.where(large, (1 - u_above) / 4, below - w_below * w_below)
        w = torch.where(large, (alpha - v).sqrt(), w_below)
        ctx.save_for_backward(alpha, w)
        return w, v, torch.where(large, u_above, 1 - 4 * v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_w: Tensor, grad_v: Tensor, grad_u: Tensor) -> Tensor:
        alpha, w = ctx.saved_tensors
        # dw/dα = w (ψ(α + ½) − ψ(α)) and dv/dα = 1 − 2w dw/dα; from the series of u where that cancels.
        v_above = 0.25 * _series(alpha, _SLOPE_SERIES) / alpha
        slope = w * ((alpha + 0.5).digamma() - alpha.digamma())
        dv = torch.where(alpha >= _SERIES_FROM, v_above, 1 - 2 * w * slope)
        dw = (1 - dv) / (2 * w)
        return grad_w * dw + (grad_v - 4 * grad_u) * dv


def _series(alpha: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Σ_k c_k α^−k from k = 1 on, where α is at least 32; by Horner's rule, which needs no constants on the device."""
    x = alpha.clamp_min(_SERIES_FROM).reciprocal()
    total = torch.zeros_like(x)
    for coefficient in reversed(coefficients):
        total = x * (total + coefficient)
    return total

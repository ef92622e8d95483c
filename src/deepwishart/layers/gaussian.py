"""Gaussian features: the hidden layer of a deep GP with global inducing points, and the output of every process."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepwishart.gram import Gram
from deepwishart.kernels import Kernel
from deepwishart.layers.base import KLEstimator, LayerOutput, check_kl_estimator, condition
from deepwishart.linalg import Cholesky, cholesky, half_logdet

__all__ = ["GaussianLayer", "GaussianNoise", "GaussianOutput", "GaussianPosterior", "Marginals", "Whitened"]


class Whitened(NamedTuple):
    r"""The posterior of inducing outputs u = L w, in terms of w: :math:`q(w) = \mathcal{N}(m, (R R^\top)^{-1})`.

    Outputs come in g groups of c columns that share a precision: one group, or one column a group.

    Attributes:
        mean: m, shape ``(*, g, M, c)``.
        R: Cholesky factor of the precision I + LᵀΛL, shape ``(*, g, M, M)``.
        R_inverse: Its inverse.
    """

    mean: Tensor
    R: Tensor
    R_inverse: Tensor

    @property
    def kl(self) -> Tensor:
        r"""KL from the prior N(0, I): ½(c‖R⁻¹‖² + ‖m‖² − Mc) + c Σ log R_ii, summed over groups, shape ``(*)``."""
        M, c = self.mean.shape[-2:]
        quadratic = c * (self.R_inverse**2).sum((-2, -1)) + (self.mean**2).sum((-2, -1)) - M * c
        return (0.5 * quadratic + c * half_logdet(self.R)).sum(-1)


class GaussianPosterior(nn.Module):
    r"""Inducing outputs as if v had been observed with precision Λ: the global inducing posterior.

    .. math:: Q(u) = \mathcal{N}(\Sigma\Lambda v, \Sigma), \qquad \Sigma = (K^{-1} + \Lambda)^{-1}

    Its factors are those of I + LᵀΛL, whose eigenvalues are at least one: no jitter is needed.

    Args:
        targets: v to start from, shape ``(*batch, M, C)``.
        precision: Standard deviation⁻² of the pseudo-observations to start from.
        shared: Whether all outputs share one Λ.
        diagonal: Whether Λ is diagonal; else it is any positive semi-definite ℓℓᵀ.
    """

    def __init__(self, targets: Tensor, precision: float = 0.018, shared: bool = True, diagonal: bool = False) -> None:
        super().__init__()
        *batch, M, C = targets.shape
        self.groups = 1 if shared else C
        self.diagonal = diagonal
        self.v = nn.Parameter(targets.clone())
        if diagonal:
            self.log_precision = nn.Parameter(targets.new_full((*batch, self.groups, M), precision).log())
        else:
            identity = torch.eye(M, dtype=targets.dtype, device=targets.device)
            self.precision_root = nn.Parameter(precision**0.5 * identity.expand(*batch, self.groups, M, M).clone())

    def forward(self, prior: Cholesky) -> Whitened:
        """q(w) given the Cholesky factor of the prior's covariance."""
        L = prior.tril[..., None, :, :]
        v = self._grouped(self.v)
        # root: Λ^½ L up to a rotation, and the same factor applied to v, so that LᵀΛL and LᵀΛv share it.
        if self.diagonal:
            scale = (0.5 * self.log_precision).exp()[..., None]
            root, seen = scale * L, scale * v
        else:
            ell = self.precision_root.mT
            root, seen = ell @ L, ell @ v
        identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
        factor = cholesky(identity + root.mT @ root, jitter=0.0)
        mean = factor.solve(root.mT @ seen)
        return Whitened(mean, factor.tril, factor.tril_inverse)

    def _grouped(self, values: Tensor) -> Tensor:
        """(*, M, C) → (*, g, M, c)."""
        return values.unflatten(-1, (self.groups, -1)).movedim(-2, -3)


def ungroup(values: Tensor) -> Tensor:
    """(*, g, M, c) → (*, M, C)."""
    return values.movedim(-3, -2).flatten(-2)


class GaussianNoise(NamedTuple):
    """Noise of one pass through a Gaussian layer.

    Attributes:
        inducing: Standard normals, shape ``(*sample, *batch, g, M, c)``.
        points: Standard normals, shape ``(*sample, *batch, N or 1, ν)``.
    """

    inducing: Tensor
    points: Tensor


class GaussianLayer(nn.Module):
    r"""A layer of a deep GP with global inducing points: ν features from a GP, returned as their Gram matrix.

    .. math:: F \sim \mathcal{N}(0, K), \qquad G = F F^\top / \nu

    The same prior as the Wishart layer's, but features are sampled and K, not K/ν, is their covariance: here ν divides
    the Gram matrix.

    Args:
        kernel: Applied to the Gram matrix below.
        posterior: Of the inducing features; it has ν outputs.
        jitter: Relative to the kernel's mean diagonal, shape ``(*batch)``.
        kl: ``"closed-form"``, ``"sampled"`` or ``"path-derivative"``.
    """

    jitter: Tensor

    def __init__(
        self, kernel: Kernel, posterior: GaussianPosterior, jitter: Tensor, kl: KLEstimator = "closed-form"
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.posterior = posterior
        self.kl = check_kl_estimator(kl)
        self.register_buffer("jitter", jitter)

    @property
    def df(self) -> int:
        """The width ν."""
        return self.posterior.v.shape[-1]

    def draw_noise(self, shape: torch.Size, num_points: int, generator: torch.Generator | None = None) -> GaussianNoise:
        """Noise of one pass, for ``shape = sample_shape + batch_shape``."""
        v, groups = self.posterior.v, self.posterior.groups
        M, nu = v.shape[-2:]
        inducing = torch.randn(*shape, groups, M, nu // groups, dtype=v.dtype, device=v.device, generator=generator)
        points = torch.randn(*shape, num_points, nu, dtype=v.dtype, device=v.device, generator=generator)
        return GaussianNoise(inducing, points)

    def forward(self, gram: Gram, noise: GaussianNoise) -> LayerOutput:
        """Sample the next Gram matrix."""
        factor, cross, residual = condition(self.kernel(gram), self.jitter)
        q = self.posterior(factor)
        w = q.mean + q.R_inverse.mT @ noise.inducing
        F_w = ungroup(w)
        F = factor.tril @ F_w
        f = cross.mT @ F_w + residual.sqrt()[..., :, None] * noise.points
        features = Gram(F @ F.mT, F @ f.mT, (f**2).sum(-1))
        return LayerOutput(features / self.df, self._kl(q, w, noise))

    def _kl(self, q: Whitened, w: Tensor, noise: GaussianNoise) -> Tensor:
        if self.kl == "closed-form":
            return q.kl
        epsilon = noise.inducing
        half_logdet_R = half_logdet(q.R)
        if self.kl == "path-derivative":
            # log Q with its parameters held fixed, as a function of the sample alone.
            epsilon = q.R.detach().mT @ (w - q.mean.detach())
            half_logdet_R = half_logdet_R.detach()
        columns = w.shape[-1]
        log_ratio = 0.5 * ((epsilon**2).sum((-2, -1)) - (w**2).sum((-2, -1))) - columns * half_logdet_R
        return -log_ratio.sum(-1)


class Marginals(NamedTuple):
    """Gaussian marginals of the latent functions and the divergence of their posterior.

    Attributes:
        mean: Shape ``(*sample, *batch, N, C)``.
        variance: Same shape.
        kl: Shape ``(*sample, *batch)``.
    """

    mean: Tensor
    variance: Tensor
    kl: Tensor


class GaussianOutput(nn.Module):
    """The Gaussian process on top of every deep kernel process; given the Gram matrix below it is analytic.

    Args:
        kernel: Applied to the Gram matrix below.
        posterior: Of the inducing outputs.
        jitter: Relative to the kernel's mean diagonal, shape ``(*batch)``.
    """

    jitter: Tensor

    def __init__(self, kernel: Kernel, posterior: GaussianPosterior, jitter: Tensor) -> None:
        super().__init__()
        self.kernel = kernel
        self.posterior = posterior
        self.register_buffer("jitter", jitter)

    def forward(self, gram: Gram) -> Marginals:
        """Marginals of the latent functions at the points t."""
        factor, cross, residual = condition(self.kernel(gram), self.jitter)
        q = self.posterior(factor)
        a = cross[..., None, :, :]
        mean = ungroup(a.mT @ q.mean)
        from_inducing = ((q.R_inverse @ a) ** 2).sum(-2)  # (*, g, N)
        variance = residual[..., None, :] + from_inducing
        columns = q.mean.shape[-1]
        return Marginals(mean, variance.mT.repeat_interleave(columns, -1), q.kl)

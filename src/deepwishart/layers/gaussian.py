"""Gaussian features: the hidden layer of a deep GP with global inducing points, and the output of every process."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepwishart.distributions.noise import standard_normal
from deepwishart.gram import AnyGram, FeatureGram
from deepwishart.kernels import Kernel
from deepwishart.layers.base import KLEstimator, LayerOutput, check_kl_estimator, remaining_variance
from deepwishart.layers.fused import Fusable, fusable, output_step
from deepwishart.linalg import (
    Cholesky,
    absolute_jitter,
    add_to_diagonal,
    cholesky,
    column_norms,
    half_logdet,
    shared_matmul,
)

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


class Observed(NamedTuple):
    r"""The posterior of inducing outputs as that of a regression on v with noise of precision Λ = ℓℓᵀ.

    With :math:`C = I + \ell^\top K \ell = R R^\top` and the gain :math:`W = R^{-1}\ell^\top`, a point with
    covariances k to the inducing points has mean :math:`(Wk)^\top Wv` and variance :math:`k_{tt} - \lVert Wk\rVert^2`,
    by Woodbury's identity. K is not factorised, and the eigenvalues of C are at least one: this is the cheapest form,
    and the best conditioned.

    Attributes:
        gain: W, shape ``(*, g, M, M)``.
        seen: W v, shape ``(*, g, M, c)``.
        kl: KL from the prior, summed over groups, shape ``(*)``.
    """

    gain: Tensor
    seen: Tensor
    kl: Tensor


class GaussianPosterior(nn.Module):
    r"""Inducing outputs as if v had been observed with precision Λ: the global inducing posterior.

    .. math:: Q(u) = \mathcal{N}(\Sigma\Lambda v, \Sigma), \qquad \Sigma = (K^{-1} + \Lambda)^{-1}

    Its factors are those of I + LᵀΛL, whose eigenvalues are at least one: no jitter is needed. Λ is diag(e^½p) H Hᵀ
    diag(e^½p): the precisions of good fits span many powers of ten, which p crosses in steps of one size, where the
    entries of a plain square root would need thousands.

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
        self.log_precision = nn.Parameter(targets.new_full((*batch, self.groups, M), precision).log())
        if not diagonal:
            identity = torch.eye(M, dtype=targets.dtype, device=targets.device)
            self.precision_mixing = nn.Parameter(identity.expand(*batch, self.groups, M, M).clone())

    @property
    def precision_root(self) -> Tensor:
        """ℓ with Λ = ℓℓᵀ, shape ``(*batch, g, M, M)``."""
        scale = (0.5 * self.log_precision).exp()
        return scale.diag_embed() if self.diagonal else scale[..., None] * self.precision_mixing

    def forward(self, prior: Cholesky) -> Whitened:
        """q(w) given the Cholesky factor of the prior's covariance."""
        L = prior.tril[..., None, :, :]
        v = self._grouped(self.v)
        # root: Λ^½ L up to a rotation, and the same factor applied to v, so that LᵀΛL and LᵀΛv share it.
        ell = self.precision_root.mT
        root, seen = ell @ L, ell @ v
        identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
        factor = cholesky(identity + root.mT @ root, jitter=0.0)
        mean = factor.solve(root.mT @ seen)
        return Whitened(mean, factor.tril, factor.tril_inverse)

    def observed(self, K: Tensor) -> "Observed":
        """The same q(u), given the prior's covariance, in a form that never factorises it."""
        v = self._grouped(self.v)
        K = K[..., None, :, :]
        ell = self.precision_root
        identity = torch.eye(K.shape[-1], dtype=K.dtype, device=K.device)
        C = cholesky(identity + ell.mT @ (K @ ell), jitter=0.0)
        gain = C.tril_inverse @ ell.mT
        seen = gain @ v
        z = gain.mT @ seen
        M, c = v.shape[-2:]
        quadratic = c * (column_norms(C.tril_inverse).sum(-1) - M) + (z * (K @ z)).sum((-2, -1))
        return Observed(gain, seen, (0.5 * quadratic + c * C.half_logdet).sum(-1))

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
        points: Standard normals, shape ``(*sample, *batch, ν, N or 1)``.
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
        inducing = standard_normal((*shape, groups, M, nu // groups), v, generator)
        points = standard_normal((*shape, nu, num_points), v, generator)
        return GaussianNoise(inducing, points)

    def forward(self, gram: AnyGram, noise: GaussianNoise) -> LayerOutput:
        """Sample the next Gram matrix."""
        K = cholesky(self.kernel.ii(gram), self.jitter)
        q = self.posterior(K)
        w = q.mean + shared_matmul(q.R_inverse.mT, noise.inducing)
        F_w = ungroup(w)
        mean, explained = self.kernel.project(gram, K.tril_inverse, F_w)
        residual = remaining_variance(self.kernel.tt(gram), K.jitter[..., None], explained)
        f = torch.addcmul(mean, residual.sqrt()[..., None, :], noise.points)
        features = FeatureGram(shared_matmul(K.tril, F_w), f, column_norms(f))
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

    def forward(self, gram: AnyGram) -> Marginals:
        """Marginals of the latent functions at the points t."""
        fused = fusable(self.kernel, gram, self.jitter)
        if fused is not None and self.posterior.groups == 1 and not self.posterior.diagonal:
            return self._fused(fused, self.kernel.tt(gram))
        K_ii = self.kernel.ii(gram)
        white = absolute_jitter(K_ii, self.jitter)
        q = self.posterior.observed(add_to_diagonal(K_ii, white))
        groups = [self.kernel.project(gram, W, X) for W, X in zip(q.gain.unbind(-3), q.seen.unbind(-3), strict=True)]
        mean = torch.cat([group.mean for group in groups], -2).mT
        tt, white = self.kernel.tt(gram), white[..., None]
        variance = torch.stack([remaining_variance(tt, white, group.norms) for group in groups], -1)
        return Marginals(mean, variance.repeat_interleave(q.seen.shape[-1], -1), q.kl)

    def _fused(self, fused: Fusable, tt: Tensor) -> Marginals:
        """The same, in one step with its own backward pass."""
        layout = fused.layout
        ell, v = self.posterior.precision_root[..., 0, :, :], self.posterior.v
        results = output_step(fused, layout.fold_shared(ell), layout.fold_shared(v))
        mean, explained, kl = (layout.unfold(x) for x in results)
        variance = remaining_variance(tt, self.jitter[..., None] * tt[..., :1], explained)
        return Marginals(mean.mT, variance[..., None].expand_as(mean.mT), kl)

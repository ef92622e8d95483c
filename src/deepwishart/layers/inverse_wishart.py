"""The inverse Wishart layer: G_ℓ | G_{ℓ−1} ~ InverseWishart(δK(G_{ℓ−1}), δ + P + 1)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import kl_divergence

from deepwishart.distributions import BartlettNoise, InverseWishart, log_density_ratio
from deepwishart.distributions.gamma import GammaNoise, standard_gamma
from deepwishart.distributions.noise import standard_normal
from deepwishart.gram import AnyGram, FeatureGram
from deepwishart.kernels import Kernel
from deepwishart.layers.base import KLEstimator, LayerOutput, check_kl_estimator, remaining_variance
from deepwishart.linalg import cholesky, column_norms

__all__ = ["InverseWishartLayer", "InverseWishartNoise"]


class InverseWishartNoise(NamedTuple):
    """Noise of one pass through an inverse Wishart layer.

    Attributes:
        inducing: Of the inducing block.
        scale: Of the Schur complement of each other point, shape ``(*sample, *batch, N or 1)``.
        points: Standard normals, shape ``(*sample, *batch, M, N or 1)``.
    """

    inducing: BartlettNoise
    scale: GammaNoise
    points: Tensor


class InverseWishartLayer(nn.Module):
    r"""A layer of a deep inverse Wishart process with inducing points. [A2021]

    The prior :math:`\mathcal{W}^{-1}(\delta K, \delta + P + 1)` has mean K and is consistent: a part of the matrix has
    the same law with its own P. The posterior of the inducing block is
    :math:`\mathcal{W}^{-1}(\delta K + V V^\top, \delta + M + 1 + \gamma)`. Each other point is drawn from the prior
    given that block, one by one, with δ + M + 2 degrees of freedom whatever the size of the batch.

    Args:
        kernel: Applied to the Gram matrix below.
        prior_tril: Cholesky factor of the kernel matrix to start from, shape ``(*batch, M, M)``.
        jitter: Relative to the kernel's mean diagonal, shape ``(*batch)``.
        kl: ``"closed-form"``, ``"sampled"`` or ``"path-derivative"``.
        delta: δ to start from; above 2 the prior has a variance.
        generator: Source of randomness.
    """

    jitter: Tensor

    def __init__(
        self,
        kernel: Kernel,
        prior_tril: Tensor,
        jitter: Tensor,
        kl: KLEstimator = "closed-form",
        delta: float = 10.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.kl = check_kl_estimator(kl)
        *batch, M, _ = prior_tril.shape
        self.log_delta = nn.Parameter(prior_tril.new_full(batch, delta).log())
        self.log_gamma = nn.Parameter(prior_tril.new_full(batch, 1.0).log())
        # At V = 0 its gradient vanishes. In the prior's own directions a small V costs little in all of them.
        normal = torch.randn(*batch, M, M, dtype=prior_tril.dtype, device=prior_tril.device, generator=generator)
        self.V = nn.Parameter(0.03 * delta**0.5 * prior_tril @ normal / M**0.5)
        self.register_buffer("jitter", jitter)

    def draw_noise(
        self, shape: torch.Size, num_points: int, generator: torch.Generator | None = None
    ) -> InverseWishartNoise:
        """Noise of one pass, for ``shape = sample_shape + batch_shape``."""
        V = self.V
        M = V.shape[-1]
        inducing = BartlettNoise.draw(shape + V.shape[-2:], V, generator)
        scale = GammaNoise.draw(torch.Size((*shape, num_points)), V, generator)
        points = standard_normal((*shape, M, num_points), V, generator)
        return InverseWishartNoise(inducing, scale, points)

    def forward(self, gram: AnyGram, noise: InverseWishartNoise) -> LayerOutput:
        """Sample the next Gram matrix."""
        kernel = self.kernel(gram)
        factor = cholesky(kernel.ii, self.jitter)
        cross = factor.whiten(kernel.it)
        residual = remaining_variance(kernel.tt, factor.jitter[..., None], column_norms(cross))
        M = self.V.shape[-1]
        delta, gamma = self.log_delta.exp(), self.log_gamma.exp()
        root_delta = delta.sqrt()[..., None, None]
        L0 = root_delta * factor.tril
        prior = InverseWishart(delta + M + 1, L0, validate_args=False)
        Psi = L0 @ L0.mT + self.V @ self.V.mT
        posterior = InverseWishart(delta + M + 1 + gamma, cholesky(Psi, jitter=0.0).tril, validate_args=False)
        N, F = posterior.rsample_bartlett(noise=noise.inducing)

        # Given the inducing block: 1/g ~ Gamma((δ + M + 2)/2, δs/2), h = L0⁻ᵀ(√δ a + √g ξ), of prior Ψ = δK.
        shape = 0.5 * (delta + M + 2)[..., None]
        g = 0.5 * delta[..., None] * residual / standard_gamma(shape, noise.scale)
        h = factor.tril_inverse.mT @ (cross + (g.sqrt() / delta.sqrt()[..., None])[..., None, :] * noise.points)
        f = F.mT @ h  # G_it = G_ii h = F f, and h_tᵀ G_ii h_t = ‖f_t‖²
        return LayerOutput(FeatureGram(F, f, g + column_norms(f)), self._kl(prior, posterior, N, F))

    def _kl(self, prior: InverseWishart, posterior: InverseWishart, N: Tensor, F: Tensor) -> Tensor:
        if self.kl == "closed-form":
            return kl_divergence(posterior, prior)
        if self.kl == "path-derivative":
            posterior = InverseWishart(posterior.df.detach(), posterior.scale_tril, validate_args=False)
        return -log_density_ratio(prior, posterior, N, F)

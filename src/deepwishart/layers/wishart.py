"""The Wishart layer: G_ℓ | G_{ℓ−1} ~ Wishart(K(G_{ℓ−1})/ν, ν)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import kl_divergence

from deepwishart.distributions import BartlettNoise, Wishart, extend_wishart, log_density_ratio
from deepwishart.distributions.bartlett_wishart import BartlettWishart
from deepwishart.gram import Gram
from deepwishart.kernels import Kernel
from deepwishart.layers.base import KLEstimator, LayerOutput, check_kl_estimator, condition
from deepwishart.layers.posterior import WishartPosterior

__all__ = ["WishartLayer", "WishartNoise"]


class WishartNoise(NamedTuple):
    """Noise of one pass through a Wishart layer.

    Attributes:
        inducing: Of the inducing block.
        points: Standard normals of the other points, shape ``(*sample, *batch, N or 1, ν)``.
    """

    inducing: BartlettNoise
    points: Tensor


class WishartLayer(nn.Module):
    r"""A layer of a deep Wishart process with inducing points. [O2023, algorithm 1]

    The prior of the Gram matrix is :math:`\mathcal{W}(K/\nu, \nu)`, which has mean K: the only place where ν divides.
    The inducing block comes from the posterior; every other point from the prior given that block, one by one.

    Args:
        kernel: Applied to the Gram matrix below.
        posterior: Of the inducing block; its ``df`` is the layer's width ν.
        jitter: Relative to the kernel's mean diagonal, shape ``(*batch)``.
        kl: ``"closed-form"``; or ``"sampled"``, log Q − log P at the sample; or ``"path-derivative"``, the same with
            the parameters of T held fixed in log Q, whose gradient has less variance near the optimum.
    """

    jitter: Tensor

    def __init__(
        self, kernel: Kernel, posterior: WishartPosterior, jitter: Tensor, kl: KLEstimator = "closed-form"
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.posterior = posterior
        self.kl = check_kl_estimator(kl)
        self.register_buffer("jitter", jitter)

    @property
    def df(self) -> int:
        """The width ν."""
        return self.posterior.df

    def draw_noise(self, shape: torch.Size, num_points: int, generator: torch.Generator | None = None) -> WishartNoise:
        """Noise of one pass, for ``shape = sample_shape + batch_shape``."""
        loc = self.posterior.loc
        inducing = BartlettNoise.draw(shape + loc.shape[-2:], loc, generator)
        points = torch.randn(*shape, num_points, self.df, dtype=loc.dtype, device=loc.device, generator=generator)
        return WishartNoise(inducing, points)

    def forward(self, gram: Gram, noise: WishartNoise) -> LayerOutput:
        """Sample the next Gram matrix."""
        scale = self.kernel(gram) / self.df
        factor, cross, residual = condition(scale, self.jitter)
        prior = Wishart(self.df, factor.tril, scale_tril_inverse=factor.tril_inverse, validate_args=False)
        posterior = self.posterior(factor)
        T, F = posterior.rsample_bartlett(noise=noise.inducing)
        others = extend_wishart(F, factor.whiten(F), cross, residual, noise.points)
        return LayerOutput(Gram(F @ F.mT, others.cross, others.diagonal), self._kl(prior, posterior, T, F))

    def _kl(self, prior: Wishart, posterior: BartlettWishart, T: Tensor, F: Tensor) -> Tensor:
        if self.kl == "closed-form":
            return kl_divergence(posterior, prior)
        if self.kl == "path-derivative":
            posterior = posterior.detach_bartlett()
        return -log_density_ratio(prior, posterior, T, F)

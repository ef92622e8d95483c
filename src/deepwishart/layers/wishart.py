"""The Wishart layer: G_ℓ | G_{ℓ−1} ~ Wishart(K(G_{ℓ−1})/ν, ν)."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributions import kl_divergence

from deepwishart.distributions import BartlettNoise, Wishart, extend_wishart, log_density_ratio
from deepwishart.distributions.bartlett_wishart import BartlettWishart
from deepwishart.distributions.noise import standard_normal
from deepwishart.gram import AnyGram, FeatureGram
from deepwishart.kernels import Kernel, SquaredExponential
from deepwishart.layers.base import KLEstimator, LayerOutput, check_kl_estimator, remaining_variance
from deepwishart.layers.fused import Fusable, fusable, whitened_step, wishart_step
from deepwishart.layers.posterior import Draw, WishartPosterior, draw_together
from deepwishart.linalg import cholesky, columns_to_samples, samples_to_columns

__all__ = ["WishartLayer", "WishartNoise", "draw_ahead"]


class WishartNoise(NamedTuple):
    """Noise of one pass through a Wishart layer.

    Attributes:
        inducing: Of the inducing block.
        points: Standard normals of the other points, shape ``(*sample, *batch, ν, N or 1)``.
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
        points = standard_normal((*shape, self.df, num_points), loc, generator)
        return WishartNoise(inducing, points)

    def forward(self, gram: AnyGram, noise: WishartNoise, draw: Draw | None = None) -> LayerOutput:
        """Sample the next Gram matrix.

        Args:
            gram: Of the layer below.
            noise: From :meth:`draw_noise`.
            draw: What :func:`draw_ahead` made of the noise, if it was called.
        """
        fused = fusable(self.kernel, gram, self.jitter)
        if fused is not None and self.kl == "closed-form":
            draw = self.posterior.tensors.draw(noise.inducing) if draw is None else draw
            return self._fused(fused, self.kernel.tt(gram), draw, noise.points)
        K = cholesky(self.kernel.ii(gram), self.jitter)
        S = K.divide(self.df)
        prior = Wishart(
            self.df,
            S.tril,
            scale_tril_inverse=S.tril_inverse,
            scale_tril_logabsdet=S.half_logdet,
            validate_args=False,
        )
        posterior = self.posterior(S)
        T, F = posterior.rsample_bartlett(noise=noise.inducing)
        # The means of new points are the same in units of K and of S; their variances are not.
        mean, explained = self.kernel.project(gram, K.tril_inverse, K.whiten(F))
        residual = remaining_variance(self.kernel.tt(gram), K.jitter[..., None], explained) / self.df
        f, G_tt = extend_wishart(mean, residual, noise.points)
        return LayerOutput(FeatureGram(F, f, G_tt), self._kl(prior, posterior, T, F))

    def _fused(self, fused: Fusable, tt: Tensor, draw: Draw, points: Tensor) -> LayerOutput:
        """The same, in one step with its own backward pass."""
        layout, T, kl = fused.layout, draw.T, draw.divergence
        # Samples that the Gram matrix below does not have are columns.
        ndim = len(layout.sample_shape) + len(layout.batch_shape) + 2
        columns = layout.fold(samples_to_columns(T, ndim))
        if self.posterior.whitened:
            F, mean, explained = (layout.unfold(x) for x in whitened_step(fused, self.df, columns))
        else:
            rest, added, second_moment = (layout.fold_shared(x) for x in (draw.rest, draw.added, draw.second_moment))
            results = wishart_step(fused, self.df, rest, added, columns, second_moment)
            F, mean, explained, trace, logdet = (layout.unfold(x) for x in results)
            kl = torch.add(kl + 0.5 * trace, logdet, alpha=-self.df)
        F, mean = columns_to_samples(F, T, ndim), columns_to_samples(mean.mT, T, ndim).mT
        residual = remaining_variance(tt, self.jitter[..., None] * tt[..., :1], explained)
        f, G_tt = extend_wishart(mean, residual / self.df, points)
        return LayerOutput(FeatureGram(F, f, G_tt), kl)

    def _kl(self, prior: Wishart, posterior: BartlettWishart, T: Tensor, F: Tensor) -> Tensor:
        if self.kl == "closed-form":
            return kl_divergence(posterior, prior)
        if self.kl == "path-derivative":
            posterior = posterior.detach_bartlett()
        return -log_density_ratio(prior, posterior, T, F)


def draw_ahead(layers: Iterable[nn.Module], noise: Sequence[Any]) -> list[Draw | None]:
    """Samples of those layers' posteriors that use them, all at once: they do not depend on the layers below."""
    layers = list(layers)
    ready = [
        index
        for index, layer in enumerate(layers)
        if isinstance(layer, WishartLayer) and layer.kl == "closed-form" and type(layer.kernel) is SquaredExponential
    ]
    posteriors = [cast(WishartLayer, layers[index]).posterior for index in ready]
    draws = draw_together(posteriors, [noise[index].inducing for index in ready]) if ready else []
    found = dict(zip(ready, draws, strict=True))
    return [found.get(index) for index in range(len(layers))]

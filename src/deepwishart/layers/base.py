"""What every layer takes and returns: a Gram matrix and noise in, a Gram matrix and a KL divergence out."""

from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from deepwishart.gram import Gram
from deepwishart.linalg import Cholesky, cholesky

__all__ = ["Conditioned", "KLEstimator", "Layer", "LayerOutput", "check_kl_estimator", "condition"]

KLEstimator = Literal["closed-form", "sampled", "path-derivative"]


class LayerOutput(NamedTuple):
    """What a hidden layer returns; nothing of it is kept on the layer.

    Attributes:
        gram: Sampled Gram matrix, blocks of shape ``(*sample, *batch, ·, ·)``.
        kl: Divergence of the layer's posterior from its prior, shape ``(*sample, *batch)``; without the sample
            dimensions where it does not depend on a sample.
    """

    gram: Gram
    kl: Tensor


class Layer(Protocol):
    """A hidden layer: it maps a Gram matrix to a Gram matrix."""

    def draw_noise(self, shape: torch.Size, num_points: int, generator: torch.Generator | None = None) -> Any:
        """Noise of one pass, for ``shape = sample_shape + batch_shape``.

        With ``num_points = 1`` all points share their noise: every marginal stays exact, and the prediction of a
        point does not depend on which others it comes with.
        """

    def __call__(self, gram: Gram, noise: Any) -> LayerOutput:
        """Sample the Gram matrix of the next layer."""


class Conditioned(NamedTuple):
    """A kernel matrix, ready for conditioning other points on the inducing points.

    Attributes:
        factor: Cholesky factor L of the inducing block, with its inverse and jitter.
        cross: a = L⁻¹ k_it, shape ``(*, M, N)``.
        residual: k_tt − ‖a‖², with the jitter that ii has, shape ``(*, N)``.
    """

    factor: Cholesky
    cross: Tensor
    residual: Tensor


def condition(kernel: Gram, jitter: Tensor) -> Conditioned:
    """Factorise the inducing block and whiten the rest. Never looks at a value.

    Args:
        kernel: A kernel matrix.
        jitter: Relative to the mean diagonal, shape ``(*batch)``. It is white noise: ii and tt have it, it has not.
    """
    factor = cholesky(kernel.ii, jitter)
    cross = factor.whiten(kernel.it)
    residual = kernel.tt + factor.jitter[..., None] - (cross**2).sum(-2)
    # In exact arithmetic the residual is at least the jitter.
    return Conditioned(factor, cross, torch.maximum(residual, _positive(factor.jitter)[..., None]))


def _positive(jitter: Tensor) -> Tensor:
    return jitter.detach().clamp_min(torch.finfo(jitter.dtype).tiny)


def check_kl_estimator(name: str) -> KLEstimator:
    """One of the three names, or an error."""
    if name not in ("closed-form", "sampled", "path-derivative"):
        raise ValueError(f"kl must be closed-form, sampled or path-derivative, got {name!r}.")
    return name  # type: ignore[return-value]

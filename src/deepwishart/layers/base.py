"""What every layer takes and returns: a Gram matrix and noise in, a Gram matrix and a KL divergence out."""

from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from deepwishart.gram import AnyGram, FeatureGram

__all__ = ["KLEstimator", "Layer", "LayerOutput", "check_kl_estimator", "remaining_variance"]

KLEstimator = Literal["closed-form", "sampled", "path-derivative"]


class LayerOutput(NamedTuple):
    """What a hidden layer returns; nothing of it is kept on the layer.

    Attributes:
        gram: Sampled Gram matrix, blocks of shape ``(*sample, *batch, ·, ·)``.
        kl: Divergence of the layer's posterior from its prior, shape ``(*sample, *batch)``; without the sample
            dimensions where it does not depend on a sample.
    """

    gram: FeatureGram
    kl: Tensor


class Layer(Protocol):
    """A hidden layer: it maps a Gram matrix to a Gram matrix."""

    def draw_noise(self, shape: torch.Size, num_points: int, generator: torch.Generator | None = None) -> Any:
        """Noise of one pass, for ``shape = sample_shape + batch_shape``.

        With ``num_points = 1`` all points share their noise: every marginal stays exact, and the prediction of a
        point does not depend on which others it comes with.
        """

    def __call__(self, gram: AnyGram, noise: Any) -> LayerOutput:
        """Sample the Gram matrix of the next layer."""


def check_kl_estimator(name: str) -> KLEstimator:
    """One of the three names, or an error."""
    if name not in ("closed-form", "sampled", "path-derivative"):
        raise ValueError(f"kl must be closed-form, sampled or path-derivative, got {name!r}.")
    return name  # type: ignore[return-value]


def remaining_variance(tt: Tensor, jitter: Tensor, explained: Tensor) -> Tensor:
    """k_tt − ‖a‖², with the jitter that ii has: white noise is in both. In exact arithmetic that much is left.

    Args:
        tt: Shape ``(*, N)``.
        jitter: Absolute, broadcasts to the same.
        explained: ‖a‖², shape ``(*, N)``.
    """
    floor = jitter.detach().clamp_min(torch.finfo(jitter.dtype).tiny)
    return torch.maximum(tt + jitter - explained, floor)

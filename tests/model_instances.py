"""Models to test, by the name of their method, and data to make them from."""

from typing import Any

import torch
from torch import Tensor

from deepwishart.layers import GaussianLayer, GaussianOutput, InverseWishartLayer
from deepwishart.models import (
    DeepKernelProcess,
    deep_gaussian_process,
    deep_inverse_wishart_process,
    deep_wishart_process,
)
from tests.distributions.instances import generator

METHODS = ("gw", "a-gw", "ab-gw", "dgp", "diwp")


def build(method: str, X: Tensor, y: Tensor, **options: Any) -> DeepKernelProcess:
    """A model by the name of its method."""
    options = {"generator": generator(0), **options}
    if method == "dgp":
        return deep_gaussian_process(X, y, **options)
    if method == "diwp":
        options.pop("widths", None)
        return deep_inverse_wishart_process(X, y, **options)
    return deep_wishart_process(X, y, posterior=method, **options)


def data(N: int = 40, D: int = 3, batch: tuple[int, ...] = (), seed: int = 0) -> tuple[Tensor, Tensor]:
    g = generator(seed)
    X = torch.randn(*batch, N, D, dtype=torch.float64, generator=g)
    y = (X[..., :1] * 1.5).sin() + 0.2 * torch.randn(*batch, N, 1, dtype=torch.float64, generator=g)
    return X, y


def to_the_prior(model: DeepKernelProcess) -> DeepKernelProcess:
    """Every posterior equal to its prior. The Wishart layers below the first must be whitened for that."""
    with torch.no_grad():
        for module in (model.output, *model.layers):
            if isinstance(module, GaussianLayer | GaussianOutput):
                module.posterior.precision_mixing.zero_()
            if isinstance(module, InverseWishartLayer):
                module.V.zero_()
                module.log_gamma.fill_(-40.0)
    return model

"""Layers to test, on a small input Gram matrix."""

from typing import Any

import torch
from torch import Tensor

from deepwishart.gram import AnyGram, FeatureGram, gram_of_features
from deepwishart.kernels import make_kernel
from deepwishart.layers import (
    INITIALISATIONS,
    GaussianLayer,
    GaussianPosterior,
    InverseWishartLayer,
    WishartLayer,
    WishartPosterior,
)
from deepwishart.linalg import cholesky
from tests.distributions.instances import generator

METHODS = ("gw", "a-gw", "ab-gw", "dgp", "diwp")
JITTER = 1e-6


def inputs(
    M: int, N: int, seed: int = 0, batch: tuple[int, ...] = (), dtype: torch.dtype = torch.float64
) -> FeatureGram:
    X = torch.randn(*batch, M + N, 3, dtype=dtype, generator=generator(seed))
    return gram_of_features(X[..., :M, :], X[..., M:, :])


def make_layer(
    method: str,
    gram: AnyGram,
    df: int,
    initialisation: str = "prior",
    kl: Any = "closed-form",
    is_first: bool = True,
    kernel: str = "squared-exponential",
    seed: int = 0,
) -> Any:
    """A layer that starts on a given Gram matrix, at its prior or near it."""
    *batch, M, _ = gram.ii.shape
    like = gram.ii
    batch_shape = torch.Size(batch)
    module = make_kernel(kernel, batch_shape, dtype=like.dtype)
    jitter = like.new_full(batch_shape, JITTER)
    with torch.no_grad():
        K = module(gram)
    if method == "dgp":
        return GaussianLayer(module, GaussianPosterior(like.new_zeros(*batch, M, df), 1e-12), jitter, kl)
    if method == "diwp":
        return InverseWishartLayer(module, cholesky(K.ii, jitter).tril, jitter, kl, generator=generator(seed))
    tril = cholesky(K.ii / df, jitter).tril
    posterior = WishartPosterior(method, df, tril, INITIALISATIONS[initialisation], is_first, generator(seed))
    return WishartLayer(module, posterior, jitter, kl)


def perturb(module: torch.nn.Module, size: float = 0.1, seed: int = 0) -> None:
    """Move every parameter a little, so that nothing is at a special value."""
    g = generator(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn(parameter.shape, dtype=parameter.dtype, generator=g))


def joint(gram: AnyGram) -> Tensor:
    """The whole matrix over the inducing points and the one other."""
    top = torch.cat([gram.ii, gram.it], -1)
    bottom = torch.cat([gram.it.mT, gram.tt[..., None]], -1)
    return torch.cat([top, bottom], -2)

"""The ELBO and predictions: functions of a model and a batch."""

from collections.abc import Iterator

import torch
from torch import Tensor

from deepwishart.layers import Marginals
from deepwishart.likelihoods import Components
from deepwishart.models import DeepKernelProcess
from deepwishart.predictive import Predictive

__all__ = ["elbo", "predict", "predict_f", "predict_in_chunks", "predictive_log_likelihood"]


def elbo(
    model: DeepKernelProcess,
    X: Tensor,
    Y: Tensor,
    num_data: int | None = None,
    num_samples: int = 10,
    kl_weight: float | Tensor = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""An unbiased estimate of the evidence lower bound, in nats, one for each replica.

    .. math:: \mathcal{L} = \frac{N}{|b|}\sum_{i\in b}\mathbb{E}[\log p(y_i \mid f_i)]
        - w\,\mathbb{E}\sum_\ell \mathrm{KL}_\ell

    Args:
        model: A deep kernel process.
        X: Rows of a batch b, shape ``(*batch, |b|, D)``.
        Y: Their targets, shape ``(*batch, |b|, outputs)``.
        num_data: N, the number of rows of the whole data; that of the batch by default.
        num_samples: Posterior samples of the hidden layers; a model of depth 1 needs none.
        kl_weight: w, for annealing.
        generator: Source of randomness.
    """
    noise = model.draw_noise(num_samples, X.shape[-2], generator)
    output = model(X, noise)
    fit = model.likelihood.expected_log_prob(Y, output.marginals.mean, output.marginals.variance)
    scale = 1.0 if num_data is None else num_data / X.shape[-2]
    bound = scale * fit.sum(-1) - kl_weight * output.kl
    return bound.mean(0) if model.layers else bound


def predict_f(
    model: DeepKernelProcess,
    X: Tensor,
    num_samples: int = 100,
    generator: torch.Generator | None = None,
    chunk_size: int = 10_000,
) -> Predictive:
    """The latent functions at the rows of X: a mixture over posterior samples. See :func:`predict` for y."""
    marginals = _marginals(model, X, num_samples, generator, chunk_size)
    normal = torch.distributions.Normal(marginals.mean, marginals.variance.sqrt(), validate_args=False)
    return Predictive(Components(normal.expand((1, *normal.batch_shape)), marginals.mean.new_zeros(1)))


def predict(
    model: DeepKernelProcess,
    X: Tensor,
    num_samples: int = 100,
    generator: torch.Generator | None = None,
    chunk_size: int = 10_000,
) -> Predictive:
    """The observations at the rows of X: a mixture over posterior samples.

    All rows share the noise of a sample, so every marginal is exact, and a row's prediction does not depend on which
    rows it comes with, nor on the chunks.

    Args:
        model: A deep kernel process.
        X: Shape ``(*batch, N, D)``.
        num_samples: Posterior samples.
        generator: Source of randomness; the same seed gives the same predictions.
        chunk_size: Rows in one pass.
    """
    marginals = _marginals(model, X, num_samples, generator, chunk_size)
    with torch.no_grad():
        return Predictive(model.likelihood.predict(marginals.mean, marginals.variance))


def predict_in_chunks(
    model: DeepKernelProcess,
    X: Tensor,
    num_samples: int = 100,
    generator: torch.Generator | None = None,
    chunk_size: int = 10_000,
) -> Iterator[Predictive]:
    """:func:`predict`, a chunk of rows at a time, for tables whose samples would not fit into memory together."""
    noise = model.draw_noise(num_samples, 1, generator)
    for rows in X.split(chunk_size, -2):
        with torch.no_grad():
            marginals = _with_samples(model, model(rows, noise).marginals)
            yield Predictive(model.likelihood.predict(marginals.mean, marginals.variance))


def predictive_log_likelihood(
    model: DeepKernelProcess,
    X: Tensor,
    Y: Tensor,
    num_samples: int = 100,
    generator: torch.Generator | None = None,
    chunk_size: int = 10_000,
) -> Tensor:
    """log p(y | data) of every row, by log-mean-exp over samples, shape ``(*batch, N)``."""
    chunks = predict_in_chunks(model, X, num_samples, generator, chunk_size)
    return torch.cat([p.log_prob(y) for p, y in zip(chunks, Y.split(chunk_size, -2), strict=True)], -1)


def _marginals(
    model: DeepKernelProcess, X: Tensor, num_samples: int, generator: torch.Generator | None, chunk_size: int
) -> Marginals:
    noise = model.draw_noise(num_samples, 1, generator)
    with torch.no_grad():
        parts = [_with_samples(model, model(rows, noise).marginals) for rows in X.split(chunk_size, -2)]
    return Marginals(torch.cat([p.mean for p in parts], -2), torch.cat([p.variance for p in parts], -2), parts[0].kl)


def _with_samples(model: DeepKernelProcess, marginals: Marginals) -> Marginals:
    """A model of depth 1 is analytic: one sample stands for all."""
    if model.layers:
        return marginals
    return Marginals(marginals.mean[None], marginals.variance[None], marginals.kl[None])

"""The ELBO and predictions: functions of a model and a batch."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deepwishart.gram import deal
from deepwishart.layers import Marginals
from deepwishart.likelihoods import one_component
from deepwishart.models import DeepKernelProcess
from deepwishart.predictive import Predictive

_CHUNK_BYTES = 2**28

__all__ = [
    "check_inputs",
    "check_targets",
    "elbo",
    "elbo_given_noise",
    "predict",
    "predict_f",
    "predict_f_in_chunks",
    "predict_in_chunks",
    "predictive_log_likelihood",
    "sample_grams",
]


def elbo(
    model: DeepKernelProcess,
    X: Tensor,
    Y: Tensor,
    num_data: int | None = None,
    num_samples: int = 10,
    kl_weight: float | Tensor = 1.0,
    generator: torch.Generator | None = None,
    weights: Tensor | None = None,
    deal_rows: bool = False,
) -> Tensor:
    r"""An unbiased estimate of the evidence lower bound, in nats, one for each replica.

    .. math:: \mathcal{L} = \frac{N}{|b|}\sum_{i\in b} c_i\,\mathbb{E}[\log p(y_i \mid f_i)]
        - w\,\mathbb{E}\sum_\ell \mathrm{KL}_\ell

    Args:
        model: A deep kernel process.
        X: Rows of a batch b, shape ``(*batch, |b|, D)``.
        Y: Their targets, shape ``(*batch, |b|, outputs)``, or ``(*batch, |b|)`` for one output.
        num_data: N, the number of rows of the whole data; that of the batch by default.
        num_samples: Posterior samples of the hidden layers; a model of depth 1 needs none.
        kl_weight: w, for annealing.
        generator: Source of randomness.
        weights: c, how often a row counts, shape ``(*batch, |b|)``; once by default.
        deal_rows: Whether each row is seen by one sample instead of all, so that more rows cost less; their number must
            be a multiple of that of the samples.
    """
    check_inputs(model, X, num_samples)
    Y = check_targets(model, X, Y)
    if not X.shape[-2]:
        raise ValueError("A batch must have at least one row, got none.")
    if deal_rows and X.shape[-2] % num_samples:
        raise ValueError(
            f"deal_rows needs a multiple of num_samples rows, got {X.shape[-2]} rows and {num_samples} samples. "
            f"Leave out {X.shape[-2] % num_samples} of them."
        )
    noise = model.draw_noise(num_samples, X.shape[-2], generator, deal_rows)
    return elbo_given_noise(model, X, Y, noise, num_data, kl_weight, weights, deal_rows)


def elbo_given_noise(
    model: DeepKernelProcess,
    X: Tensor,
    Y: Tensor,
    noise: tuple[Any, ...],
    num_data: int | None = None,
    kl_weight: float | Tensor = 1.0,
    weights: Tensor | None = None,
    deal_rows: bool = False,
) -> Tensor:
    """:func:`elbo`, for noise of :meth:`DeepKernelProcess.draw_noise` and without checks: a function to be compiled."""
    output = model(X, noise, deal_rows)
    mean, variance, _ = output.marginals
    if deal_rows and model.layers:
        Y = deal(Y.mT, len(mean)).mT
        weights = None if weights is None else deal(weights, len(mean))
    fit = model.likelihood.expected_log_prob(Y, mean, variance)
    if weights is not None:
        fit = fit * weights
    scale = (X.shape[-2] if num_data is None else num_data) / fit.shape[-1]
    bound = scale * fit.sum(-1) - kl_weight * output.kl
    return bound.mean(0) if model.layers else bound


def predict_f(
    model: DeepKernelProcess,
    X: Tensor,
    num_samples: int = 100,
    generator: torch.Generator | None = None,
    chunk_size: int | None = None,
) -> Predictive:
    """The latent functions at the rows of X: a mixture over posterior samples. See :func:`predict` for y."""
    return _latents(_all_marginals(model, X, num_samples, generator, chunk_size))


def predict_f_in_chunks(
    model: DeepKernelProcess,
    X: Tensor,
    num_samples: int = 100,
    generator: torch.Generator | None = None,
    chunk_size: int | None = None,
) -> Iterator[Predictive]:
    """:func:`predict_f`, a chunk of rows at a time."""
    return map(_latents, _marginals(model, X, num_samples, generator, chunk_size))


def _latents(marginals: Marginals) -> Predictive:
    normal = torch.distributions.Normal(marginals.mean, marginals.variance.sqrt(), validate_args=False)
    return Predictive(one_component(normal, marginals.mean))


def predict(
    model: DeepKernelProcess,
    X: Tensor,
    num_samples: int = 100,
    generator: torch.Generator | None = None,
    chunk_size: int | None = None,
) -> Predictive:
    """The observations at the rows of X: a mixture over posterior samples.

    All rows share the noise of a sample, so every marginal is exact, and a row's prediction does not depend on which
    rows it comes with, nor on the chunks.

    Args:
        model: A deep kernel process.
        X: Shape ``(*batch, N, D)``.
        num_samples: Posterior samples.
        generator: Source of randomness; the same seed gives the same predictions.
        chunk_size: Rows at a time; by default as many as fit into a quarter of a gigabyte.
    """
    marginals = _all_marginals(model, X, num_samples, generator, chunk_size)
    with torch.no_grad():
        return Predictive(model.likelihood.predict(marginals.mean, marginals.variance))


def predict_in_chunks(
    model: DeepKernelProcess,
    X: Tensor,
    num_samples: int = 100,
    generator: torch.Generator | None = None,
    chunk_size: int | None = None,
) -> Iterator[Predictive]:
    """:func:`predict`, a chunk of rows at a time, for tables whose samples would not fit into memory together."""
    for marginals in _marginals(model, X, num_samples, generator, chunk_size):
        with torch.no_grad():
            components = model.likelihood.predict(marginals.mean, marginals.variance)
        yield Predictive(components)


def predictive_log_likelihood(
    model: DeepKernelProcess,
    X: Tensor,
    Y: Tensor,
    num_samples: int = 100,
    generator: torch.Generator | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """log p(y | data) of every row, by log-mean-exp over samples, shape ``(*batch, N)``."""
    check_inputs(model, X, num_samples)
    Y = check_targets(model, X, Y)
    size = _chunk_size(model, num_samples, chunk_size)
    chunks = predict_in_chunks(model, X, num_samples, generator, size)
    return torch.cat([p.log_prob(y) for p, y in zip(chunks, Y.split(size, -2), strict=True)], -1)


@torch.no_grad()
def sample_grams(
    model: DeepKernelProcess, num_samples: int = 50, generator: torch.Generator | None = None
) -> list[Tensor]:
    """The Gram matrix of the inducing points at the inputs and after every hidden layer, mean over samples.

    Each has shape ``(*batch, M, M)``.
    """
    gram = model.input_gram(model.inducing_inputs[..., :1, :])
    grams = [gram.ii]
    for layer, noise in zip(model.layers, model.draw_noise(num_samples, 1, generator), strict=True):
        gram, _ = layer(gram, noise)
        grams.append(gram.ii.mean(0))
    return grams


def _marginals(
    model: DeepKernelProcess, X: Tensor, num_samples: int, generator: torch.Generator | None, chunk_size: int | None
) -> Iterator[Marginals]:
    """Marginals of the latent functions, a chunk of rows at a time, all under one noise."""
    check_inputs(model, X, num_samples)
    noises = [model.draw_noise(count, 1, generator) for count in _samples_by_pass(model, num_samples)]
    for rows in X.split(_chunk_size(model, num_samples, chunk_size), -2):
        with torch.no_grad():
            parts = [model(rows, noise).marginals for noise in noises]
        # A model of depth 1 is analytic: one sample stands for all.
        join = torch.cat if model.layers else torch.stack
        yield Marginals(*(join(part) for part in zip(*parts, strict=True)))


def _chunk_size(model: DeepKernelProcess, num_samples: int, chunk_size: int | None) -> int:
    """Rows of a chunk: as many as one sample, or the nodes of a likelihood for all samples, leave memory for.

    Few passes are made for many rows, since each factorises the matrices of the inducing points anew.
    """
    if chunk_size is None:
        likelihood = model.likelihood
        nodes = likelihood.get_buffer("nodes").shape[0] * likelihood.num_latents(model.num_outputs)
        return _that_fit(model, max(model.inducing_inputs.shape[-2], num_samples * nodes))
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")
    return chunk_size


def _samples_by_pass(model: DeepKernelProcess, num_samples: int) -> list[int]:
    """How many samples each pass draws; whatever the rows, so that predictions do not depend on those."""
    if not model.layers:
        return [num_samples]
    M = model.inducing_inputs.shape[-2]
    at_once = _that_fit(model, M * max(M, _chunk_size(model, num_samples, None)))
    return [min(at_once, num_samples - begun) for begun in range(0, num_samples, at_once)]


def _that_fit(model: DeepKernelProcess, numbers: int) -> int:
    """How many things that need so many numbers for each replica, some four times, fit into a chunk's memory."""
    return max(1, _CHUNK_BYTES // (4 * model.batch_shape.numel() * numbers * model.inducing_inputs.element_size()))


def _all_marginals(
    model: DeepKernelProcess, X: Tensor, num_samples: int, generator: torch.Generator | None, chunk_size: int | None
) -> Marginals:
    parts = list(_marginals(model, X, num_samples, generator, chunk_size))
    return Marginals(torch.cat([p.mean for p in parts], -2), torch.cat([p.variance for p in parts], -2), parts[0].kl)


def check_inputs(model: DeepKernelProcess, X: Tensor, num_samples: int) -> None:
    """Shapes alone: nothing here looks at a value, so nothing synchronises a device."""
    batch, D = tuple(model.batch_shape), model.inducing_inputs.shape[-1]
    if X.ndim < 2 or tuple(X.shape[:-2]) != batch or X.shape[-1] != D:
        raise ValueError(f"X must have shape {(*batch, 'N', D)}, as the model was made for, got {tuple(X.shape)}.")
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}.")


def check_targets(model: DeepKernelProcess, X: Tensor, Y: Tensor) -> Tensor:
    """Targets with a dimension for outputs, and one row for each of X's."""
    Y = Y[..., None] if Y.ndim == X.ndim - 1 else Y
    expected = (*X.shape[:-1], model.num_outputs)
    if tuple(Y.shape) != expected:
        raise ValueError(f"Y must have shape {expected}, one row for each row of X, got {tuple(Y.shape)}.")
    return Y

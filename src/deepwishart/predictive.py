"""Predictive distributions: a mixture over posterior samples, and within each over quadrature nodes."""

import itertools
import math

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Poisson

from deepwishart.likelihoods import Components

__all__ = ["Predictive"]

_BISECTIONS = 80
_TAIL = 1e-6  # mass beyond which a score does not look
_CRPS_NODES = 256
_BLOCK = 10_000_000  # numbers that a block of draws may hold


class Predictive:
    """The mixture of Components over S equally likely samples. Outputs are independent within a sample.

    Args:
        components: Batch shape ``(nodes, S, *batch, N, outputs)``.
    """

    def __init__(self, components: Components) -> None:
        self.components = components.distribution
        self.log_weights = components.log_weights

    @property
    def num_samples(self) -> int:
        """S, the number of posterior samples."""
        return int(self.components.batch_shape[1])

    @property
    def mean(self) -> Tensor:
        """Shape ``(*batch, N, outputs)``."""
        self._refuse_classes("mean or variance")
        return self._average(self.components.mean)

    @property
    def variance(self) -> Tensor:
        """By the law of total variance: the mean of the variances plus the variance of the means."""
        mean = self.mean
        return self._average(self.components.variance + (self.components.mean - mean) ** 2)

    @property
    def stddev(self) -> Tensor:
        """Square root of the variance."""
        return self.variance.sqrt()

    @property
    def probs(self) -> Tensor:
        """Probabilities of the classes, shape ``(*batch, N, classes)``; for Bernoulli that of 1, ``(*batch, N, 1)``."""
        if not hasattr(self.components, "probs"):
            raise ValueError(
                f"Only classes have probabilities, not {type(self.components).__name__}. Ask for quantiles."
            )
        probs: Tensor = self.components.probs
        # Analytic in f: one node.
        return (probs[..., 0, :] if isinstance(self.components, Categorical) else probs)[0].mean(0)

    def _refuse_classes(self, what: str) -> None:
        if isinstance(self.components, Categorical):
            raise ValueError(f"Classes have no order, hence no {what}. Ask for probs.")

    def log_prob(self, Y: Tensor) -> Tensor:
        """log of the mean density over samples, all outputs of a point together, shape ``(*batch, N)``."""
        log_prob = self.components.log_prob(Y)
        given_sample = (log_prob + self.log_weights).logsumexp(0).sum(-1)
        return given_sample.logsumexp(0) - math.log(self.num_samples)

    def cdf(self, Y: Tensor) -> Tensor:
        """P(y ≤ Y) of each output, shape ``(*batch, N, outputs)``."""
        return self._average(_cdf(self.components, Y))

    def quantile(self, levels: Tensor | list[float] | tuple[float, ...]) -> Tensor:
        """Quantiles of each output by bisection of the cdf, shape ``(levels, *batch, N, outputs)``.

        For counts, the smallest whole number whose cdf reaches the level.
        """
        self._refuse_classes("quantiles")
        mean = self.components.mean
        level = torch.as_tensor(levels, dtype=mean.dtype, device=mean.device).reshape(-1, *(1,) * (mean.ndim - 2))
        if not ((level > 0) & (level < 1)).all():
            raise ValueError(f"levels must lie strictly between 0 and 1, got {levels}.")
        low, high = self._bracket(level)
        counts = isinstance(self.components, Poisson)
        for _ in range(_BISECTIONS):
            if counts and (high - low).max() < 0.25:
                break
            middle = (low + high) / 2
            below = torch.stack([self.cdf(values) for values in middle]) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high.floor() if counts else high

    def sample(self, sample_shape: tuple[int, ...] = (), generator: torch.Generator | None = None) -> Tensor:
        """Draws of y, shape ``(*sample_shape, *batch, N, outputs)``: a sample, a node, an observation each.

        One posterior sample serves all points of a draw; a node is drawn for each point and output.
        """
        count, device = math.prod(sample_shape), self.log_weights.device
        sample = torch.randint(self.num_samples, (count,), generator=generator, device=device)
        return self._draws(sample, generator).reshape(*sample_shape, *self.components.batch_shape[2:])

    def sample_each(self, generator: torch.Generator | None = None) -> Tensor:
        """One draw of y for every posterior sample, shape ``(S, *batch, N, outputs)``."""
        return self._draws(torch.arange(self.num_samples, device=self.log_weights.device), generator)

    def _draws(self, sample: Tensor, generator: torch.Generator | None) -> Tensor:
        """A draw for each of the posterior samples named, some at a time."""
        device = self.log_weights.device
        # torch's samplers know only the global generator: fork it, seeded from ours.
        seed = int(torch.randint(2**62, (), generator=generator, device=device))
        numbers_a_draw = math.prod(self.components.batch_shape[:1] + self.components.batch_shape[2:])
        block = max(1, _BLOCK // max(1, numbers_a_draw))
        with torch.no_grad(), torch.random.fork_rng(devices=[] if device.type == "cpu" else None):
            torch.manual_seed(seed)
            return torch.cat([self._draw(samples) for samples in sample.split(block)])

    def _draw(self, sample: Tensor) -> Tensor:
        """One observation of every point for each of the posterior samples named."""
        log_weights = self.log_weights.expand(self.components.batch_shape)[:, sample]
        # The largest of log-weights with Gumbel noise: a node, drawn with its weight.
        gumbel = -torch.empty_like(log_weights).exponential_().log()
        return _pick(self.components, sample, (log_weights + gumbel).argmax(0)).sample()

    def crps(self, Y: Tensor) -> Tensor:
        r"""Continuous ranked probability score of each output, :math:`\int (F(z) - 1[z \ge y])^2 dz`; lower is better.

        The integrals on either side of y end where no mass is left. For counts they are sums.
        """
        if isinstance(self.components, Poisson):
            return self._crps_of_counts(Y)
        low, high = self._bracket(
            torch.tensor([_TAIL, 1 - _TAIL], dtype=Y.dtype, device=Y.device).reshape(-1, *(1,) * Y.ndim)
        )
        nodes, weights = np.polynomial.legendre.leggauss(_CRPS_NODES)
        total = torch.zeros_like(Y)
        for end, sign in ((torch.minimum(low[0], Y), 1), (torch.maximum(high[1], Y), -1)):
            width = sign * (Y - end)
            for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
                F = self.cdf(end + sign * node * width)
                total += weight * width * (F if sign > 0 else 1 - F) ** 2
        return total

    def _crps_of_counts(self, Y: Tensor) -> Tensor:
        """Of large counts, blocks of them stand for all: the cdf is smooth there."""
        highest = int(torch.maximum(self.quantile((1 - _TAIL,))[0], Y).max())
        edges = torch.linspace(0, highest + 1, min(highest + 1, _CRPS_NODES * 2) + 1, dtype=torch.float64).round()
        total = torch.zeros_like(Y)
        for low, high in itertools.pairwise(edges.tolist()):
            F = self.cdf(torch.full_like(Y, (low + high - 1) // 2))
            above = (high - Y.clamp(low, high)).clamp_min(0)  # so many counts of the block are at least y
            total += above * (1 - F) ** 2 + (high - low - above) * F**2
        return total

    def pool(self, replicas: Tensor) -> "Predictive":
        """Some replicas of a model with a dimension of them, as one mixture: batch shape (R) → ()."""
        parameters = {}
        for name, event in _parameters(self.components):
            value = getattr(self.components, name).expand(self.components.batch_shape + event)
            parameters[name] = value[:, :, replicas].flatten(1, 2)
        samples = (self.num_samples, self.components.batch_shape[2])
        log_weights = self.log_weights.expand(-1, *samples, -1, -1)[:, :, replicas].flatten(1, 2)
        return Predictive(Components(type(self.components)(**parameters, validate_args=False), log_weights))

    def _average(self, values: Tensor) -> Tensor:
        """Mean over nodes (weighted) and samples, the two dimensions in front."""
        return (self.log_weights.exp() * values).sum(0).mean(0)

    def _bracket(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """Values below and above every quantile asked for; doubled until they are."""
        shape = (level.shape[0], *self.components.batch_shape[2:])
        width = self.stddev.clamp_min(torch.finfo(level.dtype).tiny) * 4
        low, high = (self.mean - width).expand(shape), (self.mean + width).expand(shape)
        for _ in range(200):
            too_high = torch.stack([self.cdf(values) for values in low]) >= level
            too_low = torch.stack([self.cdf(values) for values in high]) < level
            if not (too_high.any() or too_low.any()):
                break
            low = torch.where(too_high, low - 2 * (high - low), low)
            high = torch.where(too_low, high + 2 * (high - low), high)
        return low, high


def _pick(distribution: Distribution, sample: Tensor, node: Tensor) -> Distribution:
    """The components of chosen samples (n) and nodes (n, *batch, N, outputs), one distribution of the latter shape."""
    parameters = {}
    for name, event in _parameters(distribution):
        value = getattr(distribution, name)
        chosen = value.expand(distribution.batch_shape + event)[:, sample]
        index = node[None, ..., None].expand(1, *node.shape, *event) if event else node[None]
        parameters[name] = chosen.gather(0, index).squeeze(0)
    return type(distribution)(**parameters, validate_args=False)


def _parameters(distribution: Distribution) -> list[tuple[str, torch.Size]]:
    """Names of what a distribution was made with, and the dimensions that each has beyond the batch."""
    names = [name for name in distribution.arg_constraints if name in distribution.__dict__]
    if "probs" in names:
        names = ["probs"]  # torch keeps logits beside them once they were asked for
    classes = getattr(distribution, names[0]).shape[-1:] if isinstance(distribution, Categorical) else torch.Size()
    return [(name, classes) for name in names]


def _cdf(distribution: Distribution, Y: Tensor) -> Tensor:
    if isinstance(distribution, Poisson):
        # P(y ≤ k) = Q(k + 1, rate), the upper regularised incomplete gamma function.
        count = Y.floor()
        upper = torch.special.gammaincc((count + 1).clamp_min(1), distribution.rate)
        return torch.where(count < 0, torch.zeros_like(upper), upper)
    if isinstance(distribution, Bernoulli | Categorical):
        raise ValueError("Classes have no order, hence no cdf or quantiles. Ask for probs.")
    return distribution.cdf(Y)

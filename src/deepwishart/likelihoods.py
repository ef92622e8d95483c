"""Likelihoods: how an observation depends on the latent functions at its point.

A likelihood says how many latent functions it needs, integrates its logarithm over Gaussian marginals for the ELBO,
and turns the same marginals into a predictive distribution. Constructors only store; a model calls
:meth:`Likelihood.initialise` on a copy, with its replicas and outputs.
"""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli as BernoulliDistribution
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution, Normal
from torch.distributions import Poisson as PoissonDistribution
from torch.distributions import StudentT as StudentTDistribution

__all__ = [
    "Bernoulli",
    "Categorical",
    "Components",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Poisson",
    "StudentT",
]

_NUM_NODES = 20
_NUM_DENSITY_NODES = 64
_NUM_CLASS_NODES = 128


class Components(NamedTuple):
    """A predictive distribution given the marginals of one sample: a mixture over quadrature nodes.

    Attributes:
        distribution: Of the observations, batch shape ``(nodes, *sample, *batch, N, outputs)``.
        log_weights: Shape ``(nodes)``.
    """

    distribution: Distribution
    log_weights: Tensor


class Likelihood(nn.Module, ABC):
    """p(y | f), independent over points, and over outputs given f."""

    def num_latents(self, num_outputs: int) -> int:
        """How many latent functions the outputs need."""
        return num_outputs

    def initialise(self, batch_shape: torch.Size, num_outputs: int, like: Tensor) -> None:
        """Create the parameters of all replicas and outputs, with the dtype and device of ``like``."""

    @abstractmethod
    def check_targets(self, Y: Tensor) -> None:
        """Refuse targets that cannot be observations. They are finite and of shape ``(*batch, N, outputs)``."""

    def pseudo_targets(self, Y: Tensor) -> Tensor:
        """Values of the latent functions to start from, shape ``(*batch, N, latents)``; zeros if there are none."""
        return Y.new_zeros(*Y.shape[:-1], self.num_latents(Y.shape[-1]))

    @abstractmethod
    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """E[log p(y | f)] under Gaussian marginals of f, summed over outputs, shape ``(*sample, *batch, N)``."""

    @abstractmethod
    def predict(self, mean: Tensor, variance: Tensor) -> Components:
        """The distribution of y under Gaussian marginals of f."""


class Gaussian(Likelihood):
    r""":math:`y \sim \mathcal{N}(f, \sigma^2)` with one learned noise an output.

    Args:
        noise: σ² to start from; targets are standardised.
    """

    def __init__(self, noise: float = 1.0) -> None:
        super().__init__()
        self.initial_noise = _require_positive("noise", noise)

    def initialise(self, batch_shape: torch.Size, num_outputs: int, like: Tensor) -> None:
        self.log_noise = nn.Parameter(like.new_full((*batch_shape, num_outputs), math.log(self.initial_noise)))

    def check_targets(self, Y: Tensor) -> None:
        """Any finite number will do."""

    def pseudo_targets(self, Y: Tensor) -> Tensor:
        return Y

    @property
    def noise(self) -> Tensor:
        """σ², shape ``(*batch, 1, outputs)``."""
        return self.log_noise.exp()[..., None, :]

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        log_noise = self.log_noise[..., None, :]
        squares = ((Y - mean) ** 2 + variance) * (-log_noise).exp()
        return -0.5 * (squares + log_noise + math.log(2 * math.pi)).sum(-1)

    def predict(self, mean: Tensor, variance: Tensor) -> Components:
        return _one_component(Normal(mean, (variance + self.noise).sqrt(), validate_args=False), mean)


class HeteroscedasticGaussian(Likelihood):
    r""":math:`y \sim \mathcal{N}(f, \sigma^2 e^g)`: a second latent function for the noise of every output.

    Latents are ordered f₁ … f_C, g₁ … g_C.

    Args:
        noise: σ² to start from, at g = 0.
    """

    def __init__(self, noise: float = 1.0) -> None:
        super().__init__()
        self.initial_noise = _require_positive("noise", noise)

    def num_latents(self, num_outputs: int) -> int:
        return 2 * num_outputs

    def initialise(self, batch_shape: torch.Size, num_outputs: int, like: Tensor) -> None:
        self.log_noise = nn.Parameter(like.new_full((*batch_shape, num_outputs), math.log(self.initial_noise)))

    def check_targets(self, Y: Tensor) -> None:
        """Any finite number will do."""

    def pseudo_targets(self, Y: Tensor) -> Tensor:
        return torch.cat([Y, torch.zeros_like(Y)], -1)

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        (f, g), (f_variance, g_variance) = mean.chunk(2, -1), variance.chunk(2, -1)
        log_noise = self.log_noise[..., None, :] + g
        # E[e^{−g}] = e^{−m + v/2}.
        squares = ((Y - f) ** 2 + f_variance) * (0.5 * g_variance - log_noise).exp()
        return -0.5 * (squares + log_noise + math.log(2 * math.pi)).sum(-1)

    def predict(self, mean: Tensor, variance: Tensor) -> Components:
        (f, g), (f_variance, g_variance) = mean.chunk(2, -1), variance.chunk(2, -1)
        nodes, log_weights = _gauss_hermite(mean)
        log_noise = self.log_noise[..., None, :] + _at_nodes(g, g_variance, nodes)
        return Components(Normal(f, (f_variance + log_noise.exp()).sqrt(), validate_args=False), log_weights)


class StudentT(Likelihood):
    r""":math:`y = f + \sigma t` with Student's t of learned degrees of freedom above two: robust to outliers.

    Args:
        df: Degrees of freedom to start from.
        scale: σ to start from.
    """

    def __init__(self, df: float = 5.0, scale: float = 1.0) -> None:
        super().__init__()
        if not df > 2:
            raise ValueError(f"df must exceed 2, so that y has a variance, got {df}.")
        self.initial_df = df
        self.initial_scale = _require_positive("scale", scale)

    def initialise(self, batch_shape: torch.Size, num_outputs: int, like: Tensor) -> None:
        self.log_df_excess = nn.Parameter(like.new_full((*batch_shape, num_outputs), math.log(self.initial_df - 2)))
        self.log_scale = nn.Parameter(like.new_full((*batch_shape, num_outputs), math.log(self.initial_scale)))

    def check_targets(self, Y: Tensor) -> None:
        """Any finite number will do."""

    def pseudo_targets(self, Y: Tensor) -> Tensor:
        return Y

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return _expected_log_prob(self._components(mean, variance, _NUM_NODES), Y)

    def predict(self, mean: Tensor, variance: Tensor) -> Components:
        # A density is less smooth than its logarithm: it needs more nodes.
        return self._components(mean, variance, _NUM_DENSITY_NODES)

    def _components(self, mean: Tensor, variance: Tensor, num_nodes: int) -> Components:
        nodes, log_weights = _gauss_hermite(mean, num_nodes)
        df = 2 + self.log_df_excess.exp()[..., None, :]
        scale = self.log_scale.exp()[..., None, :]
        location = _at_nodes(mean, variance, nodes)
        return Components(StudentTDistribution(df, location, scale, validate_args=False), log_weights)


class Bernoulli(Likelihood):
    r"""Two classes, 0 and 1: :math:`p(y = 1) = 1/(1 + e^{-f})`."""

    def check_targets(self, Y: Tensor) -> None:
        """Zeros and ones."""
        _require_targets((Y == 0) | (Y == 1), Y, "zeros and ones", "Encode two classes as 0 and 1.")

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        nodes, log_weights = _gauss_hermite(mean)
        logits = _at_nodes(mean, variance, nodes)
        return _expected_log_prob(Components(BernoulliDistribution(logits=logits, validate_args=False), log_weights), Y)

    def predict(self, mean: Tensor, variance: Tensor) -> Components:
        nodes, log_weights = _gauss_hermite(mean)
        # y has two values: the mixture over nodes is again a Bernoulli.
        probability = _average(_at_nodes(mean, variance, nodes).sigmoid(), log_weights)
        return _one_component(BernoulliDistribution(probs=probability, validate_args=False), mean)


class Categorical(Likelihood):
    r"""Any number of classes, 0 to C − 1, with one latent function each: :math:`p(y = c) \propto e^{f_c}`.

    Args:
        num_classes: C, at least two.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, got {num_classes}.")
        self.num_classes = num_classes

    def num_latents(self, num_outputs: int) -> int:
        if num_outputs != 1:
            raise ValueError(f"Categorical takes one column of class numbers, got {num_outputs} outputs.")
        return self.num_classes

    def check_targets(self, Y: Tensor) -> None:
        """Whole numbers from 0 to C − 1."""
        valid = (Y.round() == Y) & (Y >= 0) & (self.num_classes > Y)
        _require_targets(valid, Y, f"class numbers from 0 to {self.num_classes - 1}", "Encode the classes in that way.")

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        logits, log_weights = self._logits(mean, variance)
        log_prob = CategoricalDistribution(logits=logits, validate_args=False).log_prob(Y[..., 0])
        return _average(log_prob, log_weights)

    def predict(self, mean: Tensor, variance: Tensor) -> Components:
        logits, log_weights = self._logits(mean, variance)
        probabilities = _average(logits.softmax(-1), log_weights)
        # One output: the number of the class.
        return _one_component(CategoricalDistribution(probs=probabilities[..., None, :], validate_args=False), mean)

    def _logits(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Latents at the points of a fixed quasi-random normal sample, all classes at once."""
        sobol = torch.quasirandom.SobolEngine(self.num_classes, scramble=True, seed=0)
        uniform = sobol.draw(_NUM_CLASS_NODES, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
        nodes = torch.special.ndtri(uniform).to(mean)
        nodes = nodes.reshape(_NUM_CLASS_NODES, *(1,) * (mean.ndim - 1), self.num_classes)
        log_weights = mean.new_full((_NUM_CLASS_NODES,), -math.log(_NUM_CLASS_NODES))
        return mean + variance.sqrt() * nodes, log_weights


class Poisson(Likelihood):
    r"""Counts: :math:`y \sim \mathrm{Poisson}(e^f)`."""

    def check_targets(self, Y: Tensor) -> None:
        """Whole numbers from 0 on."""
        _require_targets((Y.round() == Y) & (Y >= 0), Y, "counts: whole numbers from 0 on", "Do not standardise them.")

    def pseudo_targets(self, Y: Tensor) -> Tensor:
        return (Y + 0.5).log()

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return (Y * mean - (mean + 0.5 * variance).exp() - (Y + 1).lgamma()).sum(-1)

    def predict(self, mean: Tensor, variance: Tensor) -> Components:
        nodes, log_weights = _gauss_hermite(mean)
        rate = _at_nodes(mean, variance, nodes).exp()
        return Components(PoissonDistribution(rate, validate_args=False), log_weights)


# Quadrature


def _gauss_hermite(like: Tensor, num_nodes: int = _NUM_NODES) -> tuple[Tensor, Tensor]:
    """Nodes and log-weights of a standard normal; the nodes have a dimension in front of those of ``like``."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    log_weights = torch.from_numpy(np.log(weights / math.sqrt(2 * math.pi))).to(like)
    return torch.from_numpy(nodes).to(like).reshape(-1, *(1,) * like.ndim), log_weights


def _at_nodes(mean: Tensor, variance: Tensor, nodes: Tensor) -> Tensor:
    return mean + variance.sqrt() * nodes


def _average(values: Tensor, log_weights: Tensor) -> Tensor:
    """Weighted mean over the nodes in front."""
    return torch.tensordot(log_weights.exp(), values, dims=([0], [0]))


def _expected_log_prob(components: Components, Y: Tensor) -> Tensor:
    """E[log p(y | f)], summed over outputs."""
    return _average(components.distribution.log_prob(Y), components.log_weights).sum(-1)


def _one_component(distribution: Distribution, like: Tensor) -> Components:
    """Analytic in f: one node of weight one."""
    expanded = distribution.expand(torch.Size((1, *distribution.batch_shape)))
    return Components(expanded, like.new_zeros(1))


def _require_positive(name: str, value: float) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be positive and finite, got {value}.")
    return float(value)


def _require_targets(valid: Tensor, Y: Tensor, requirement: str, remedy: str) -> None:
    if not valid.all():
        raise ValueError(f"targets must be {requirement}, got {Y[~valid].flatten()[0].item():g}. {remedy}")

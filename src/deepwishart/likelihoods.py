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

__all__ = [
    "Bernoulli",
    "Categorical",
    "Components",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Poisson",
    "StudentT",
    "one_component",
]

_NUM_NODES = 20  # of Gauss and Hermite, for smooth functions of f
_NUM_NOISE_NODES = 8  # and of the logarithm of the noise
_NUM_GRID_NODES = 128  # of an even grid, for densities that may be narrow in f
_NUM_CLASS_NODES = 64  # pairs ±z of quasi-random normals


class Components(NamedTuple):
    """A predictive distribution given the marginals of one sample: a mixture over quadrature nodes.

    Attributes:
        distribution: Of the observations, batch shape ``(nodes, *sample, *batch, N, outputs)``.
        log_weights: Broadcasts to that shape, with all nodes in front.
    """

    distribution: Distribution
    log_weights: Tensor


class Likelihood(nn.Module, ABC):
    """p(y | f), independent over points, and over outputs given f.

    Quadrature nodes are buffers: made once, so that no training step copies anything to a device.
    """

    nodes: Tensor
    node_log_weights: Tensor

    def num_latents(self, num_outputs: int) -> int:
        """How many latent functions the outputs need."""
        return num_outputs

    def initialise(self, batch_shape: torch.Size, num_outputs: int, like: Tensor) -> None:
        """Create the parameters of all replicas and outputs, with the dtype and device of ``like``."""
        nodes, log_weights = self._rule()
        self.register_buffer("nodes", nodes.to(like), persistent=False)
        self.register_buffer("node_log_weights", log_weights.to(like), persistent=False)

    def _rule(self) -> tuple[Tensor, Tensor]:
        """Nodes and log-weights for a standard normal, shape ``(nodes)``."""
        return _gauss_hermite(_NUM_NODES)

    def _at_nodes(self, mean: Tensor, variance: Tensor) -> Tensor:
        """f at the nodes, which come in front."""
        return mean + variance.sqrt() * _in_front(self.nodes, mean)

    @abstractmethod
    def check_targets(self, Y: Tensor) -> None:
        """Refuse targets that cannot be observations. They are finite and of shape ``(*batch, N, outputs)``."""

    def pseudo_targets(self, Y: Tensor) -> Tensor:
        """Values of the latent functions to start from, shape ``(*batch, N, latents)``; zeros if there are none."""
        return Y.new_zeros(*Y.shape[:-1], self.num_latents(Y.shape[-1]))

    @property
    def pseudo_precision(self) -> float:
        """With which a row knows them, before anything is learned: the curvature of −log p(y | f) there."""
        return 1.0

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
        super().initialise(batch_shape, num_outputs, like)
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
        return one_component(Normal(mean, (variance + self.noise).sqrt(), validate_args=False), mean)


class HeteroscedasticGaussian(Likelihood):
    r""":math:`y \sim \mathcal{N}(f, \sigma^2 e^{\tau g})`: a second latent function for the noise of every output.

    Latents are ordered f₁ … f_C, g₁ … g_C. All have the height of one kernel, that of the targets; the spread τ gives
    noise its own.

    Args:
        noise: σ² to start from, at g = 0.
    """

    def __init__(self, noise: float = 1.0) -> None:
        super().__init__()
        self.initial_noise = _require_positive("noise", noise)

    def num_latents(self, num_outputs: int) -> int:
        return 2 * num_outputs

    def initialise(self, batch_shape: torch.Size, num_outputs: int, like: Tensor) -> None:
        super().initialise(batch_shape, num_outputs, like)
        self.log_noise = nn.Parameter(like.new_full((*batch_shape, num_outputs), math.log(self.initial_noise)))
        self.log_spread = nn.Parameter(like.new_zeros(*batch_shape, num_outputs))

    def _rule(self) -> tuple[Tensor, Tensor]:
        # Predictions are mixtures over samples and nodes: few will do for a variance that is as uncertain as this one.
        return _gauss_hermite(_NUM_NOISE_NODES)

    def check_targets(self, Y: Tensor) -> None:
        """Any finite number will do."""

    def pseudo_targets(self, Y: Tensor) -> Tensor:
        return torch.cat([Y, torch.zeros_like(Y)], -1)

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        (f, g), (f_variance, g_variance) = mean.chunk(2, -1), variance.chunk(2, -1)
        spread = self.log_spread.exp()[..., None, :]
        log_noise = self.log_noise[..., None, :] + spread * g
        # E[e^{−τg}] = e^{−τm + τ²v/2}.
        squares = ((Y - f) ** 2 + f_variance) * (0.5 * spread**2 * g_variance - log_noise).exp()
        return -0.5 * (squares + log_noise + math.log(2 * math.pi)).sum(-1)

    def predict(self, mean: Tensor, variance: Tensor) -> Components:
        (f, g), (f_variance, g_variance) = mean.chunk(2, -1), variance.chunk(2, -1)
        log_noise = self.log_noise[..., None, :] + self.log_spread.exp()[..., None, :] * self._at_nodes(g, g_variance)
        scale = (f_variance + log_noise.exp()).sqrt()
        return Components(Normal(f, scale, validate_args=False), _in_front(self.node_log_weights, mean))


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
        super().initialise(batch_shape, num_outputs, like)
        self.log_df_excess = nn.Parameter(like.new_full((*batch_shape, num_outputs), math.log(self.initial_df - 2)))
        self.log_scale = nn.Parameter(like.new_full((*batch_shape, num_outputs), math.log(self.initial_scale)))

    def _rule(self) -> tuple[Tensor, Tensor]:
        return _even_grid()

    def check_targets(self, Y: Tensor) -> None:
        """Any finite number will do."""

    def pseudo_targets(self, Y: Tensor) -> Tensor:
        return Y

    @property
    def df(self) -> Tensor:
        """Degrees of freedom, shape ``(*batch, 1, outputs)``."""
        return 2 + self.log_df_excess.exp()[..., None, :]

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        nu, log_scale = self.df, self.log_scale[..., None, :]
        z = (Y - self._at_nodes(mean, variance)) * (-log_scale).exp()
        average = _average((z**2 / nu).log1p(), _in_front(self.node_log_weights, mean))
        constant = (0.5 * (nu + 1)).lgamma() - (0.5 * nu).lgamma() - 0.5 * (nu * math.pi).log() - log_scale
        return (constant - 0.5 * (nu + 1) * average).sum(-1)

    def predict(self, mean: Tensor, variance: Tensor) -> Components:
        """Student's t is a normal of random precision λ ~ Gamma(ν/2, ν/2), so f integrates out: nodes are in log λ."""
        nu = self.df
        width = (2 / nu).sqrt()
        low, high = -(80 / nu + 12 * width), (80 / nu).log1p() + 3 * width
        step = torch.linspace(0, 1, _NUM_GRID_NODES, dtype=mean.dtype, device=mean.device)
        log_precision = low + (high - low) * _in_front(step, nu)
        log_weights = (0.5 * nu * (log_precision - log_precision.exp())).log_softmax(0)
        while log_weights.ndim <= mean.ndim:
            log_precision, log_weights = log_precision.unsqueeze(1), log_weights.unsqueeze(1)
        noise = (2 * self.log_scale[..., None, :] - log_precision).exp()
        return Components(Normal(mean, (variance + noise).sqrt(), validate_args=False), log_weights)


class Bernoulli(Likelihood):
    r"""Two classes, 0 and 1: :math:`p(y = 1) = 1/(1 + e^{-f})`."""

    def check_targets(self, Y: Tensor) -> None:
        """Zeros and ones."""
        _require_targets((Y == 0) | (Y == 1), Y, "zeros and ones", "Encode two classes as 0 and 1.")

    def pseudo_targets(self, Y: Tensor) -> Tensor:
        """Laplace's approximation at f = 0: slope y − ½ over curvature ¼."""
        return (Y - 0.5) / self.pseudo_precision

    @property
    def pseudo_precision(self) -> float:
        return 0.25

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        # log p = −log(1 + e^{−f}) for y = 1 and with f's sign turned for y = 0.
        f = (2 * Y - 1) * self._at_nodes(mean, variance)
        return _average(nn.functional.logsigmoid(f), _in_front(self.node_log_weights, mean)).sum(-1)

    def predict(self, mean: Tensor, variance: Tensor) -> Components:
        # y has two values: the mixture over nodes is again a Bernoulli.
        probability = _average(self._at_nodes(mean, variance).sigmoid(), _in_front(self.node_log_weights, mean))
        return one_component(BernoulliDistribution(probs=probability, validate_args=False), mean)


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

    def pseudo_targets(self, Y: Tensor) -> Tensor:
        """Laplace's approximation at f = 0, class by class: slope 1[y = c] − 1/C over curvature (C − 1)/C²."""
        classes = nn.functional.one_hot(Y[..., 0].long(), self.num_classes).to(Y)
        return (classes - 1 / self.num_classes) / self.pseudo_precision

    @property
    def pseudo_precision(self) -> float:
        return (self.num_classes - 1) / self.num_classes**2

    def _rule(self) -> tuple[Tensor, Tensor]:
        """A quasi-random normal sample of all classes at once, with its mirror image, shape ``(nodes, classes)``."""
        sobol = torch.quasirandom.SobolEngine(self.num_classes, scramble=True, seed=0)
        uniform = sobol.draw(_NUM_CLASS_NODES, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
        nodes = torch.special.ndtri(uniform)
        log_weights = torch.full((2 * _NUM_CLASS_NODES,), -math.log(2 * _NUM_CLASS_NODES), dtype=torch.float64)
        return torch.cat([nodes, -nodes]), log_weights

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        # Only the normaliser needs nodes; it is common to all classes, so the rule prefers none.
        normaliser = self._at_nodes(mean, variance).logsumexp(-1)
        chosen = mean.gather(-1, Y.long().expand(*mean.shape[:-1], 1))[..., 0]
        return chosen - _average(normaliser, _in_front(self.node_log_weights, normaliser[0]))

    def predict(self, mean: Tensor, variance: Tensor) -> Components:
        probabilities = self._at_nodes(mean, variance).softmax(-1)
        average = _average(probabilities, _in_front(self.node_log_weights, mean))
        # One output: the number of the class.
        return one_component(CategoricalDistribution(probs=average[..., None, :], validate_args=False), mean)

    def _at_nodes(self, mean: Tensor, variance: Tensor) -> Tensor:
        nodes = self.nodes.reshape(-1, *(1,) * (mean.ndim - 1), self.num_classes)
        return mean + variance.sqrt() * nodes


class Poisson(Likelihood):
    r"""Counts: :math:`y \sim \mathrm{Poisson}(e^f)`.

    The ELBO is exact. Predictions sum over a grid in f, which resolves counts up to about 100 divided by f's variance.
    """

    def _rule(self) -> tuple[Tensor, Tensor]:
        return _even_grid()

    def check_targets(self, Y: Tensor) -> None:
        """Whole numbers from 0 on."""
        _require_targets((Y.round() == Y) & (Y >= 0), Y, "counts: whole numbers from 0 on", "Do not standardise them.")

    def pseudo_targets(self, Y: Tensor) -> Tensor:
        return (Y + 0.5).log()

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return (Y * mean - (mean + 0.5 * variance).exp() - (Y + 1).lgamma()).sum(-1)

    def predict(self, mean: Tensor, variance: Tensor) -> Components:
        rate = self._at_nodes(mean, variance).exp()
        return Components(PoissonDistribution(rate, validate_args=False), _in_front(self.node_log_weights, mean))


# Quadrature


def _gauss_hermite(count: int) -> tuple[Tensor, Tensor]:
    """Nodes and log-weights for a standard normal, exact for polynomials."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return torch.from_numpy(nodes), torch.from_numpy(np.log(weights / math.sqrt(2 * math.pi)))


def _even_grid() -> tuple[Tensor, Tensor]:
    """An even grid for a standard normal: a trapezoidal rule, which smooth functions of any kind converge under."""
    nodes = torch.linspace(-7.5, 7.5, _NUM_GRID_NODES, dtype=torch.float64)
    return nodes, (-0.5 * nodes**2).log_softmax(0)


def _in_front(values: Tensor, like: Tensor) -> Tensor:
    """A vector, as a dimension in front of those of ``like``."""
    return values.reshape(-1, *(1,) * like.ndim)


def _average(values: Tensor, log_weights: Tensor) -> Tensor:
    """Weighted mean over the nodes in front."""
    return (log_weights.exp() * values).sum(0)


def one_component(distribution: Distribution, like: Tensor) -> Components:
    """Analytic in f: one node of weight one."""
    expanded = distribution.expand(torch.Size((1, *distribution.batch_shape)))
    return Components(expanded, like.new_zeros((1,) * (like.ndim + 1)))


def _require_positive(name: str, value: float) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be positive and finite, got {value}.")
    return float(value)


def _require_targets(valid: Tensor, Y: Tensor, requirement: str, remedy: str) -> None:
    if not valid.all():
        raise ValueError(f"targets must be {requirement}, got {Y[~valid].flatten()[0].item():g}. {remedy}")

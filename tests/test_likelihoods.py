"""Likelihoods: expectations against quadrature by SciPy, predictive moments against their definition, bad targets."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from torch import Tensor

from deepwishart.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    StudentT,
)
from deepwishart.predictive import Predictive
from tests.distributions.instances import generator

MEAN, VARIANCE = 0.4, 0.6
Density = Callable[[float, float], float]

# A likelihood of one latent function, an observation, and log p(y | f) from elsewhere.
SCALAR: dict[str, tuple[Likelihood, float, Density]] = {
    "gaussian": (Gaussian(0.3), 1.1, lambda y, f: scipy.stats.norm.logpdf(y, f, 0.3**0.5)),
    "student-t": (StudentT(4.0, 0.5), -1.2, lambda y, f: scipy.stats.t.logpdf(y, 4.0, f, 0.5)),
    "bernoulli": (Bernoulli(), 1.0, lambda y, f: -math.log1p(math.exp(-f))),
    "poisson": (Poisson(), 3.0, lambda y, f: scipy.stats.poisson.logpmf(y, math.exp(f))),
}


def tensor(value: float) -> Tensor:
    return torch.full((1, 1), value, dtype=torch.float64)


def ready(likelihood: Likelihood, outputs: int = 1, batch: tuple[int, ...] = ()) -> Likelihood:
    likelihood.initialise(torch.Size(batch), outputs, torch.zeros((), dtype=torch.float64))
    return likelihood


def expectation(function: Callable[[float], float]) -> float:
    """Under f ~ N(MEAN, VARIANCE)."""
    law = scipy.stats.norm(MEAN, VARIANCE**0.5)
    value, _ = scipy.integrate.quad(lambda f: law.pdf(f) * function(f), -9, 10, limit=400)
    return float(value)


@pytest.mark.parametrize("name", SCALAR)
def test_expected_log_prob_and_predictive_density(name: str) -> None:
    likelihood, y, log_density = SCALAR[name]
    ready(likelihood)
    found = likelihood.expected_log_prob(tensor(y), tensor(MEAN), tensor(VARIANCE))
    assert found.item() == pytest.approx(expectation(lambda f: log_density(y, f)), rel=1e-5)
    predictive = Predictive(likelihood.predict(tensor(MEAN)[None], tensor(VARIANCE)[None]))
    density = expectation(lambda f: math.exp(log_density(y, f)))
    assert predictive.log_prob(tensor(y)).item() == pytest.approx(math.log(density), abs=1e-5)


@pytest.mark.parametrize("spread", [1.0, 0.4])
def test_heteroscedastic_gaussian_against_double_integration(spread: float) -> None:
    likelihood = ready(HeteroscedasticGaussian(0.5))
    torch.nn.init.constant_(likelihood.get_parameter("log_spread"), math.log(spread))
    mean = torch.tensor([[0.4, -0.3]], dtype=torch.float64)
    variance = torch.tensor([[0.6, 0.2]], dtype=torch.float64)
    y = 1.3
    f, g = scipy.stats.norm(0.4, 0.6**0.5), scipy.stats.norm(-0.3, 0.2**0.5)

    def log_density(a: float, b: float) -> float:
        return float(scipy.stats.norm.logpdf(y, a, (0.5 * math.exp(spread * b)) ** 0.5))

    expected, _ = scipy.integrate.dblquad(lambda b, a: f.pdf(a) * g.pdf(b) * log_density(a, b), -5, 6, -4, 3)
    assert likelihood.expected_log_prob(tensor(y), mean, variance).item() == pytest.approx(expected, rel=1e-5)
    density, _ = scipy.integrate.dblquad(lambda b, a: f.pdf(a) * g.pdf(b) * math.exp(log_density(a, b)), -5, 6, -4, 3)
    predictive = Predictive(likelihood.predict(mean[None], variance[None]))
    assert predictive.log_prob(tensor(y)).item() == pytest.approx(math.log(density), abs=1e-6)
    noise = 0.5 * math.exp(-0.3 * spread + 0.1 * spread**2)  # E[σ² e^{τg}]
    assert predictive.variance.item() == pytest.approx(0.6 + noise, rel=1e-6)


def test_categorical_against_monte_carlo() -> None:
    likelihood = ready(Categorical(3))
    mean = torch.tensor([[0.5, -0.2, 1.0]], dtype=torch.float64)
    variance = torch.tensor([[0.3, 1.0, 0.1]], dtype=torch.float64)
    f = mean + variance.sqrt() * torch.randn(400_000, 1, 3, dtype=torch.float64, generator=generator(0))
    log_p = f.log_softmax(-1)[:, 0]
    predictive = Predictive(likelihood.predict(mean[None], variance[None]))
    torch.testing.assert_close(predictive.probs[0], log_p.exp().mean(0), rtol=0, atol=4e-3)
    for c in range(3):
        y = tensor(float(c))
        expected = log_p[:, c].mean().item()
        assert likelihood.expected_log_prob(y, mean, variance).item() == pytest.approx(expected, abs=0.02)
        assert predictive.log_prob(y).item() == pytest.approx(predictive.probs[0, c].log().item(), abs=1e-12)
    assert predictive.probs.sum().item() == pytest.approx(1)


def test_categorical_prefers_no_class() -> None:
    """Equal latents are equal classes, in the ELBO to the last digit."""
    likelihood = ready(Categorical(4))
    mean, variance = torch.zeros(1, 4, dtype=torch.float64), torch.full((1, 4), 4.0, dtype=torch.float64)
    found = [likelihood.expected_log_prob(tensor(float(c)), mean, variance).item() for c in range(4)]
    assert found == pytest.approx([found[0]] * 4, abs=1e-14)


@pytest.mark.parametrize(("y", "mean", "variance"), [(200.0, 5.3, 0.3), (50.0, 4.0, 0.5), (0.0, -1.0, 2.0)])
def test_counts_large_and_small(y: float, mean: float, variance: float) -> None:
    predictive = Predictive(ready(Poisson()).predict(tensor(mean)[None], tensor(variance)[None]))
    law = scipy.stats.norm(mean, variance**0.5)
    low, high = mean - 9 * variance**0.5, mean + 9 * variance**0.5
    near = [math.log(y + 0.5)] if low < math.log(y + 0.5) < high else None
    density, _ = scipy.integrate.quad(
        lambda f: law.pdf(f) * scipy.stats.poisson.pmf(y, math.exp(f)), low, high, limit=400, points=near
    )
    assert predictive.log_prob(tensor(y)).item() == pytest.approx(math.log(density), abs=1e-4)


@pytest.mark.parametrize("df", [2.1, 4.0, 30.0, 500.0])
@pytest.mark.parametrize("scale", [0.05, 0.5, 3.0])
def test_student_t_however_narrow_and_far_out(df: float, scale: float) -> None:
    """Density and cdf of f + σt, f ~ N(0, ½), against integration over f."""
    predictive = Predictive(ready(StudentT(df, scale)).predict(tensor(0.0)[None], tensor(0.5)[None]))
    law = scipy.stats.norm(0, 0.5**0.5)
    for y in (0.0, 0.13, 4.0, 30.0):
        near = [point for point in (y - scale, y, y + scale) if abs(point) < 7] or None

        def integral(of: Any, y: float = y, near: list[float] | None = near) -> float:
            value, _ = scipy.integrate.quad(lambda f: law.pdf(f) * of(y, df, f, scale), -7, 7, limit=800, points=near)
            return float(value)

        density = integral(scipy.stats.t.pdf)
        if density > 1e-25:  # beyond that the grid in log λ ends
            assert predictive.log_prob(tensor(y)).item() == pytest.approx(math.log(density), abs=1e-5)
        assert predictive.cdf(tensor(y)).item() == pytest.approx(integral(scipy.stats.t.cdf), abs=1e-7)


def test_bernoulli_probabilities() -> None:
    predictive = Predictive(ready(Bernoulli()).predict(tensor(MEAN)[None], tensor(VARIANCE)[None]))
    expected = expectation(lambda f: 1 / (1 + math.exp(-f)))
    assert predictive.probs.item() == pytest.approx(expected, rel=1e-8)
    assert predictive.mean.item() == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("outputs", [1, 3])
def test_several_outputs_replicas_and_samples(outputs: int) -> None:
    """Shapes of everything, for likelihoods of any number of outputs."""
    S, R, N = 4, 2, 5
    for likelihood in (Gaussian(), HeteroscedasticGaussian(), StudentT(), Bernoulli(), Poisson()):
        ready(likelihood, outputs, (R,))
        latents = likelihood.num_latents(outputs)
        mean = torch.randn(S, R, N, latents, dtype=torch.float64, generator=generator(0))
        variance = torch.rand(S, R, N, latents, dtype=torch.float64, generator=generator(1)) + 0.1
        Y = torch.ones(R, N, outputs, dtype=torch.float64)
        assert likelihood.expected_log_prob(Y, mean, variance).shape == (S, R, N)
        predictive = Predictive(likelihood.predict(mean, variance))
        assert predictive.log_prob(Y).shape == (R, N)
        assert predictive.mean.shape == predictive.variance.shape == (R, N, outputs)
        assert predictive.sample((7,), generator(2)).shape == (7, R, N, outputs)
        assert likelihood.pseudo_targets(Y).shape == (R, N, latents)


def test_noise_is_learned_for_each_replica_and_output() -> None:
    likelihood = ready(Gaussian(0.2), 3, (2,))
    assert isinstance(likelihood, Gaussian)
    assert likelihood.log_noise.shape == (2, 3)
    torch.testing.assert_close(likelihood.noise.detach(), torch.full((2, 1, 3), 0.2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("likelihood", "bad", "message"),
    [
        (Bernoulli(), 2.0, "zeros and ones, got 2"),
        (Categorical(3), 3.0, "class numbers from 0 to 2, got 3"),
        (Categorical(3), 0.5, "class numbers from 0 to 2, got 0.5"),
        (Poisson(), -1.0, "counts: whole numbers from 0 on, got -1"),
        (Poisson(), 1.5, "counts"),
    ],
)
def test_targets_of_the_wrong_kind_are_refused(likelihood: Likelihood, bad: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        likelihood.check_targets(tensor(bad))


def test_arguments_are_checked() -> None:
    for call in (lambda: Gaussian(0.0), lambda: HeteroscedasticGaussian(-1.0), lambda: StudentT(scale=math.inf)):
        with pytest.raises(ValueError, match="must be positive and finite, got"):
            call()
    with pytest.raises(ValueError, match="df must exceed 2"):
        StudentT(2.0)
    with pytest.raises(ValueError, match="num_classes must be at least 2, got 1"):
        Categorical(1)
    with pytest.raises(ValueError, match="one column of class numbers, got 2 outputs"):
        Categorical(3).num_latents(2)


# Predictive mixtures.


def mixture(name: str, S: int = 3, N: int = 4) -> Predictive:
    likelihood = ready({"heteroscedastic": HeteroscedasticGaussian()}.get(name) or SCALAR[name][0])
    latents = likelihood.num_latents(1)
    mean = torch.randn(S, N, latents, dtype=torch.float64, generator=generator(3))
    variance = 0.1 + torch.rand(S, N, latents, dtype=torch.float64, generator=generator(4))
    return Predictive(likelihood.predict(mean, variance))


ORDERED = ["gaussian", "student-t", "heteroscedastic", "poisson"]


@pytest.mark.parametrize("name", ORDERED)
def test_samples_follow_the_mixture(name: str) -> None:
    """Mean, variance and cdf against the draws."""
    predictive = mixture(name)
    draws = predictive.sample((40_000,), generator(5))
    error = draws.std(0) / 40_000**0.5
    assert ((draws.mean(0) - predictive.mean).abs() < 5 * error).all()
    torch.testing.assert_close(draws.var(0), predictive.variance, rtol=0.15, atol=0)
    for level in (-0.5, 0.7, 2.0):
        at = torch.full((4, 1), level, dtype=torch.float64)
        share = (draws <= level).double().mean(0)
        torch.testing.assert_close(predictive.cdf(at), share, rtol=0, atol=0.012)


@pytest.mark.parametrize("name", ["gaussian", "student-t", "heteroscedastic"])
def test_quantiles_invert_the_cdf(name: str) -> None:
    predictive = mixture(name)
    levels = (0.001, 0.05, 0.5, 0.95, 0.999)
    for level, quantile in zip(levels, predictive.quantile(levels), strict=True):
        torch.testing.assert_close(predictive.cdf(quantile), torch.full((4, 1), level, dtype=torch.float64))


def test_quantiles_of_counts_are_counts() -> None:
    predictive = mixture("poisson")
    for level, quantile in zip((0.05, 0.5, 0.95), predictive.quantile((0.05, 0.5, 0.95)), strict=True):
        assert (quantile == quantile.round()).all()
        assert (predictive.cdf(quantile) >= level).all()
        assert (predictive.cdf(quantile - 1) < level).all()


def test_variance_is_total_not_mean() -> None:
    """Two samples far apart: the spread of their means is part of the variance."""
    likelihood = ready(Gaussian(0.01))
    mean = torch.tensor([[[-3.0]], [[3.0]]], dtype=torch.float64)
    predictive = Predictive(likelihood.predict(mean, torch.full_like(mean, 0.04)))
    assert predictive.mean.item() == 0
    assert predictive.variance.item() == pytest.approx(9 + 0.05)
    expected = np.log(np.mean(scipy.stats.norm.pdf(1.0, [-3.0, 3.0], 0.05**0.5)))
    assert predictive.log_prob(tensor(1.0)).item() == pytest.approx(expected)


def test_outputs_are_dependent_through_the_sample() -> None:
    """The density of two outputs is the mean over samples of products, not a product of means."""
    likelihood = ready(Gaussian(0.1), 2)
    mean = torch.tensor([[[-1.0, -1.0]], [[1.0, 1.0]]], dtype=torch.float64)
    predictive = Predictive(likelihood.predict(mean, torch.full_like(mean, 0.1)))
    density = scipy.stats.norm.pdf([1.0, 1.0], mean[:, 0].numpy(), 0.2**0.5).prod(1).mean()
    assert predictive.log_prob(torch.ones(1, 2, dtype=torch.float64)).item() == pytest.approx(math.log(density))


def test_what_makes_no_sense_is_refused() -> None:
    bernoulli = Predictive(ready(Bernoulli()).predict(tensor(0.0)[None], tensor(1.0)[None]))
    with pytest.raises(ValueError, match="Classes have no order"):
        bernoulli.quantile((0.5,))
    classes = Predictive(ready(Categorical(3)).predict(torch.zeros(1, 1, 3), torch.ones(1, 1, 3)))
    with pytest.raises(ValueError, match="Classes have no order, hence no mean"):
        _ = classes.variance
    with pytest.raises(ValueError, match="Only classes have probabilities"):
        _ = mixture("gaussian").probs
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        mixture("gaussian").quantile((0.0,))


def test_classes_are_sampled_with_their_probabilities() -> None:
    likelihood = ready(Categorical(3))
    mean = torch.randn(2, 1, 3, dtype=torch.float64, generator=generator(0))
    predictive = Predictive(likelihood.predict(mean, torch.full_like(mean, 0.5)))
    draws = predictive.sample((40_000,), generator(1))
    assert draws.shape == (40_000, 1, 1)
    shares = torch.bincount(draws.flatten().long(), minlength=3) / 40_000
    torch.testing.assert_close(shares.double(), predictive.probs[0], rtol=0, atol=0.012)


def test_sampling_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    first = mixture("student-t").sample((3,), generator(0))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, mixture("student-t").sample((3,), generator(0)))


@pytest.mark.parametrize("likelihood", [Bernoulli(), Categorical(4)])
def test_classes_start_from_laplaces_approximation(likelihood: Likelihood) -> None:
    """At f = 0: a Newton step of each latent function by itself, by automatic differentiation."""
    likelihood = ready(likelihood)
    Y = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    latents = likelihood.num_latents(1)

    def log_prob(f: Tensor) -> Tensor:
        return likelihood.expected_log_prob(Y[:1], f[None], torch.zeros(1, latents, dtype=torch.float64)).sum()

    zero = torch.zeros(latents, dtype=torch.float64)
    slope = torch.autograd.functional.jacobian(log_prob, zero)
    curvature = -torch.autograd.functional.hessian(log_prob, zero).diagonal()
    torch.testing.assert_close(likelihood.pseudo_targets(Y)[0], slope / curvature)
    torch.testing.assert_close(curvature, torch.full_like(curvature, likelihood.pseudo_precision))

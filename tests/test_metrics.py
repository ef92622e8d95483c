"""Scores against answers from elsewhere."""

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch.distributions import Normal, Poisson

from deepwishart.likelihoods import Components
from deepwishart.metrics import calibration, coverage, crps_gaussian, gaussian_log_likelihood, rmse
from deepwishart.predictive import Predictive

rng = np.random.RandomState(0)


def test_plain_scores() -> None:
    assert rmse([1, 2], [2, 4]) == pytest.approx(np.sqrt(2.5))
    assert coverage([0, 1, 2], [-1, 1.5, 1], [1, 2, 3]) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="one shape"):
        rmse(np.zeros(3), np.zeros((3, 1)))
    y, mean, std = rng.randn(3, 5)
    std = np.exp(std)
    assert gaussian_log_likelihood(y, mean, std) == pytest.approx(stats.norm.logpdf(y, mean, std).mean())


def crps_by_quadrature(cdf: object, y: float) -> float:
    below, _ = integrate.quad(lambda z: cdf(z) ** 2, -60, y, limit=200)  # type: ignore[operator]
    above, _ = integrate.quad(lambda z: (1 - cdf(z)) ** 2, y, 60, limit=200)  # type: ignore[operator]
    return float(below + above)


def test_the_crps_of_a_normal_is_its_integral() -> None:
    expected = crps_by_quadrature(lambda z: stats.norm.cdf(z, 0.3, 1.7), 2.0)
    assert crps_gaussian([2.0], [0.3], [1.7]) == pytest.approx(expected, rel=1e-6)


def mixture(samples: int = 7, rows: int = 4) -> Predictive:
    loc, scale = torch.from_numpy(rng.randn(2, 1, samples, rows, 1))
    return Predictive(Components(Normal(3 * loc, (0.5 * scale).exp()), torch.zeros(1, 1, 1, 1, dtype=torch.float64)))


def test_the_crps_of_a_mixture_is_its_integral_and_the_closed_form() -> None:
    predictive = mixture()
    Y = torch.from_numpy(rng.randn(4, 1)) * 3
    found = predictive.crps(Y)
    loc, scale = (getattr(predictive.components, name)[0, :, :, 0].numpy() for name in ("loc", "scale"))

    def absolute(m: np.ndarray, s: np.ndarray) -> np.ndarray:
        """E|z| of a normal."""
        return 2 * s * stats.norm.pdf(m / s) + m * (2 * stats.norm.cdf(m / s) - 1)

    for i in range(4):
        m, s, y = loc[:, i], scale[:, i], Y[i, 0].item()
        pairs = absolute(m[:, None] - m, np.sqrt(s[:, None] ** 2 + s**2)).mean()
        assert found[i, 0].item() == pytest.approx(absolute(y - m, s).mean() - 0.5 * pairs, rel=1e-5)
        by_quadrature = crps_by_quadrature(lambda z, m=m, s=s: np.mean(stats.norm.cdf(z, m, s)), y)
        assert found[i, 0].item() == pytest.approx(by_quadrature, rel=1e-5)


def test_far_away_the_crps_is_the_distance() -> None:
    predictive = mixture()
    Y = torch.full((4, 1), 1e4, dtype=torch.float64)
    torch.testing.assert_close(predictive.crps(Y), Y - predictive.mean, rtol=1e-3, atol=0)


def test_the_crps_of_counts_is_a_sum() -> None:
    rate = torch.tensor([0.7, 4.0, 30.0], dtype=torch.float64)[:, None]
    predictive = Predictive(Components(Poisson(rate[None, None]), torch.zeros(1, 1, 1, 1, dtype=torch.float64)))
    Y = torch.tensor([[0.0], [9.0], [25.0]], dtype=torch.float64)
    k = np.arange(400)
    for i in range(3):
        F = stats.poisson.cdf(k, rate[i].item())
        expected = ((F - (k >= Y[i].item())) ** 2).sum()
        assert predictive.crps(Y)[i, 0].item() == pytest.approx(expected, rel=1e-4)


def test_the_crps_of_large_counts_is_a_sum_over_blocks() -> None:
    rate, y = 2_000.0, 2_100.0
    predictive = Predictive(
        Components(Poisson(torch.full((1, 1, 1, 1), rate).double()), torch.zeros(1, 1, 1, 1, dtype=torch.float64))
    )
    k = np.arange(4_000)
    expected = ((stats.poisson.cdf(k, rate) - (k >= y)) ** 2).sum()
    assert predictive.crps(torch.tensor([[y]], dtype=torch.float64)).item() == pytest.approx(expected, rel=0.01)


def test_replicas_pool_into_one_mixture() -> None:
    loc, scale = torch.from_numpy(rng.rand(2, 1, 5, 3, 4, 1) + 0.5)  # nodes, samples, replicas, rows, outputs
    whole = Predictive(Components(Normal(loc, scale), torch.zeros(1, 1, 1, 1, 1, dtype=torch.float64)))
    pooled = whole.pool(torch.tensor([0, 2]))
    torch.testing.assert_close(pooled.mean, whole.mean[[0, 2]].mean(0))
    Y = torch.zeros(4, 1, dtype=torch.float64)
    torch.testing.assert_close(pooled.cdf(Y), whole.cdf(Y.expand(3, 4, 1))[[0, 2]].mean(0))
    torch.testing.assert_close(pooled.log_prob(Y).exp(), whole.log_prob(Y.expand(3, 4, 1)).exp()[[0, 2]].mean(0))


def test_calibration_of_even_and_of_timid_predictions() -> None:
    even = calibration(np.linspace(0, 1, 10_001))
    assert even.error < 1e-3
    timid = calibration(np.full(10, 0.5))
    assert (timid.observed == 1).all()

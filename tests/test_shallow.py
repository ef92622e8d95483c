"""The plain GP from which deep models start."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from scipy.stats import norm
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from torch import Tensor
from torch.distributions import MultivariateNormal

from deepwishart import shallow
from deepwishart.linalg import default_jitter
from deepwishart.shallow import (
    ShallowGP,
    count_inducing,
    cross_validated,
    fit_shallow_gp,
    has_neighbours,
    marginal_likelihood,
)
from tests.distributions.instances import generator


def data(N: int = 60, D: int = 3) -> tuple[Tensor, Tensor]:
    X = torch.randn(N, D, dtype=torch.float64, generator=generator(0))
    Y = torch.sin(2 * X[:, :1]) + 0.2 * torch.randn(N, 1, dtype=torch.float64, generator=generator(1))
    return X, (Y - Y.mean()) / Y.std(correction=0)


def test_the_marginal_likelihood_and_its_gradient_agree_with_torch() -> None:
    X, _ = data(20)
    Y = torch.randn(20, 2, dtype=torch.float64, generator=generator(2))
    logs = torch.tensor([0.1, 0.5, -0.2, 0.3, -1.0], dtype=torch.float64, requires_grad=True)
    Z = X / logs[:3].exp()
    K = logs[3].exp() * (-0.5 * ((Z[:, None] - Z) ** 2).sum(-1)).exp()
    white = logs[4].exp() + default_jitter(X.dtype) * logs[3].exp()
    expected = (
        MultivariateNormal(torch.zeros(20, dtype=X.dtype), K + white * torch.eye(20, dtype=X.dtype))
        .log_prob(Y.mT)
        .sum()
    )
    (expected_gradient,) = torch.autograd.grad(expected, logs)
    value, gradient = marginal_likelihood(X, Y, logs.detach())
    torch.testing.assert_close(value, expected.detach(), rtol=1e-10, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-8, atol=1e-10)


def test_the_optimum_is_that_of_scikit_learn() -> None:
    X, Y = data()
    found = fit_shallow_gp(X, Y)
    wide = (1e-5, 1e5)
    kernel = ConstantKernel(found.variance.item(), wide) * RBF(found.lengthscale.numpy(), wide)
    kernel += WhiteKernel(found.noise.item(), wide)
    exact = GaussianProcessRegressor(kernel, alpha=0, random_state=0).fit(X.numpy(), Y[:, 0].numpy())
    logs = torch.cat([found.lengthscale.log(), found.variance.log()[None], found.noise.log()[None]])
    value, _ = marginal_likelihood(X, Y, logs)
    assert value.item() == pytest.approx(exact.log_marginal_likelihood(kernel.theta), abs=1e-3)
    assert exact.log_marginal_likelihood_value_ < value.item() + 1e-2  # nothing better is near


def test_several_starts_find_what_one_misses() -> None:
    X = torch.randn(80, 2, dtype=torch.float64, generator=generator(0))
    noise = 0.1 * torch.randn(80, 1, dtype=torch.float64, generator=generator(1))
    Y = torch.sin(5 * X[:, :1]) + noise
    one, several = (fit_shallow_gp(X, Y, num_starts=n, generator=generator(2)) for n in (1, 12))
    assert one.noise > 0.3  # it sees nothing but noise
    assert several.noise == pytest.approx(noise.var().item(), rel=0.5)
    assert several.lengthscale[0] < 1 < 10 < several.lengthscale[1]


@pytest.mark.parametrize("folds", [2, 3, 20])
def test_cross_validation_is_that_of_scikit_learn(folds: int) -> None:
    X, Y = data(20)
    logs = torch.tensor([0.1, 0.5, -0.2, 0.3, -1.0], dtype=torch.float64)
    kernel = ConstantKernel(math.exp(0.3)) * RBF(logs[:3].exp().numpy()) + WhiteKernel(math.exp(-1.0))
    total = 0.0
    for held in np.array_split(np.arange(20), folds):
        rest = np.setdiff1d(np.arange(20), held)
        exact = GaussianProcessRegressor(kernel, alpha=0, optimizer=None).fit(X[rest].numpy(), Y[rest, 0].numpy())
        mean, std = exact.predict(X[held].numpy(), return_std=True)
        total += norm(mean, std).logpdf(Y[held, 0].numpy()).sum()
    assert cross_validated(X, Y, logs, folds) == pytest.approx(total / 20, abs=1e-6)


def test_a_kernel_that_rounding_has_spoiled_predicts_nothing() -> None:
    X = 1e5 + 1e-3 * torch.randn(30, 1, dtype=torch.float64, generator=generator(0))
    logs = torch.tensor([0.0, 0.0, -30.0], dtype=torch.float64)
    assert cross_validated(X, X - X.mean(), logs) == -math.inf


def test_noise_is_not_taken_for_a_function() -> None:
    for seed in range(10):
        X = torch.randn(150, 1, dtype=torch.float64, generator=generator(seed))
        Y = torch.randn(150, 1, dtype=torch.float64, generator=generator(100 + seed))
        assert fit_shallow_gp(X, Y, generator=generator(seed)).noise > 0.7


def test_rows_resemble_their_neighbours_under_a_kernel_that_tells() -> None:
    X = torch.linspace(0, 1, 11, dtype=torch.float64)[:, None]
    for lengthscale, expected in ((0.2, True), (0.086, True), (0.084, False), (0.01, False)):  # exp(−½ 0.1²/ℓ²) = ½
        assert has_neighbours(X, torch.tensor([math.log(lengthscale), 3.0, 0.0], dtype=X.dtype)) == expected


def test_of_several_maxima_the_one_that_predicts_best_is_taken() -> None:
    X, Y = data(40)
    good, poor = (torch.tensor([0.0, 3.0, 3.0, 0.0, v], dtype=torch.float64) for v in (-3.0, 2.0))
    starts = torch.stack([poor, good, poor])
    with (
        mock.patch.object(shallow, "_maximise", side_effect=lambda X, Y, logs, *_: logs),
        mock.patch.object(shallow, "_starting_points", return_value=starts),
    ):
        assert fit_shallow_gp(X, Y).noise == pytest.approx(math.exp(-3.0))
        assert fit_shallow_gp(X, Y, choose_by="likelihood").noise == pytest.approx(math.exp(-3.0))
        with mock.patch.object(shallow, "cross_validated", side_effect=lambda X, Y, logs: logs[-1].item()):
            assert fit_shallow_gp(X, Y).noise == pytest.approx(math.exp(2.0))
            assert fit_shallow_gp(X, Y, choose_by="likelihood").noise == pytest.approx(math.exp(-3.0))
    with pytest.raises(ValueError, match="prediction, likelihood"):
        fit_shallow_gp(X, Y, choose_by="luck")  # type: ignore[arg-type]


def test_repeated_rows_count_once_and_large_tables_are_sampled() -> None:
    X, Y = data(40)
    Y = torch.cat([Y, Y], -1)
    repeated = (torch.cat([X, X]), torch.cat([Y + 0.3, Y - 0.3]))
    once, twice = (fit_shallow_gp(*rows, num_starts=1) for rows in ((X, Y), repeated))
    torch.testing.assert_close(twice.noise, once.noise + 0.3**2, rtol=1e-3, atol=0)
    torch.testing.assert_close(twice.lengthscale, once.lengthscale, rtol=1e-2, atol=0)
    assert fit_shallow_gp(X, Y, max_rows=10, generator=generator(0)).noise > 0


@pytest.mark.parametrize(("lengthscale", "noise"), [(10.0, 0.1), (2.0, 0.1), (2.0, 0.01)])
def test_inducing_points_are_enough_when_they_leave_a_tenth_of_the_noise(lengthscale: float, noise: float) -> None:
    X, _ = data(300)
    gp = ShallowGP(torch.tensor([lengthscale, 1.0, 3.0], dtype=X.dtype), X.new_tensor(2.0), X.new_tensor(noise))
    Z = X / gp.lengthscale
    K = gp.variance * (-0.5 * ((Z[:, None] - Z) ** 2).sum(-1)).exp()
    chosen: list[int] = []
    left = K.diagonal()
    while left.mean() > 0.1 * noise:
        chosen.append(int(left.argmax()))
        left = (K - K[:, chosen] @ torch.linalg.solve(K[chosen][:, chosen], K[chosen])).diagonal()
    assert count_inducing(X, gp, least=5) == len(chosen)
    assert 5 < len(chosen) < 100


def test_there_are_no_more_inducing_points_than_asked_for_or_rows() -> None:
    X, _ = data(300)
    gp = ShallowGP(torch.full((3,), 0.1, dtype=X.dtype), X.new_tensor(1.0), X.new_tensor(1e-3))
    assert count_inducing(X, gp, most=20) == 20
    assert count_inducing(X, gp._replace(noise=X.new_tensor(1e3)), least=30) == 30
    assert count_inducing(X[:7], gp) == 7

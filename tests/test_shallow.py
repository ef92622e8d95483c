"""The plain GP, and deep models that start from it."""

import math
from typing import Any, cast
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
from deepwishart.gram import FeatureGram
from deepwishart.layers import WishartLayer
from deepwishart.likelihoods import Bernoulli, Gaussian
from deepwishart.linalg import default_jitter
from deepwishart.models import deep_gaussian_process, deep_inverse_wishart_process, deep_wishart_process
from deepwishart.objectives import elbo, predict, predict_f, sample_grams
from deepwishart.shallow import (
    ShallowGP,
    count_inducing,
    cross_validated,
    fit_shallow_gp,
    has_neighbours,
    marginal_likelihood,
    match_noise,
    start_from,
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
    repeated = (torch.cat([X, X]), torch.cat([Y + 0.3, Y - 0.3]))
    once, twice = (fit_shallow_gp(*rows, num_starts=1) for rows in ((X, Y), repeated))
    torch.testing.assert_close(twice.noise, once.noise + 0.3**2, rtol=1e-3, atol=0)
    torch.testing.assert_close(twice.lengthscale, once.lengthscale, rtol=1e-2, atol=0)
    assert fit_shallow_gp(X, Y, max_rows=10, generator=generator(0)).noise > 0


def replicated(gp: ShallowGP) -> ShallowGP:
    return ShallowGP(*(part[None] for part in gp))


def test_a_sparse_gp_starts_as_the_exact_one() -> None:
    X, Y = data()
    gp = fit_shallow_gp(X, Y)
    model = deep_wishart_process(X[None], Y[None], depth=1, num_inducing=60, generator=generator(3))
    start_from(model, replicated(gp), 60)
    logs = torch.cat([gp.lengthscale.log(), gp.variance.log()[None], gp.noise.log()[None]])
    exact, _ = marginal_likelihood(X, Y, logs)
    assert elbo(model, X[None], Y[None]).item() == pytest.approx(exact.item(), abs=1e-3)


@pytest.mark.parametrize("method", ["gw", "a-gw", "ab-gw", "gw prior", "a-gw prior", "ab-gw prior", "dgp", "diwp"])
@pytest.mark.parametrize("depth", [2, 3])
def test_a_deep_model_starts_near_the_gp(method: str, depth: int) -> None:
    X, Y = data()
    gp = fit_shallow_gp(X, Y)
    options: dict[str, Any] = {"depth": depth, "num_inducing": 60, "generator": generator(4)}
    if method == "dgp":
        model = deep_gaussian_process(X[None], Y[None], **options)
    elif method == "diwp":
        model = deep_inverse_wishart_process(X[None], Y[None], **options)
    else:
        method, _, initialisation = method.partition(" ")
        model = deep_wishart_process(
            X[None], Y[None], posterior=method, initialisation=initialisation or "whitened", **options
        )
    start_from(model, replicated(gp), 60)
    mean = predict(model, X[None], 200, generator(5)).mean
    correlation = torch.corrcoef(torch.stack([mean.flatten(), Y.flatten()]))[0, 1]
    assert correlation > 0.85


@pytest.mark.parametrize("initialisation", ["whitened", "prior"])
def test_the_first_wishart_layer_starts_at_the_scaled_inputs(initialisation: str) -> None:
    X, Y = data(40)
    gp = ShallowGP(*(torch.tensor(v, dtype=torch.float64) for v in ([1.0, 3.0, 9.0], 1.0, 0.01)))
    model = deep_wishart_process(
        X[None], Y[None], num_inducing=40, initialisation=initialisation, generator=generator(6)
    )
    start_from(model, replicated(gp), 40)
    scaled = (model.inducing_inputs[0] / gp.lengthscale).detach()
    X_unit = scaled / (scaled**2).sum(-1).mean().sqrt()
    layer = cast(WishartLayer, model.layers[0])
    S = layer.kernel(model.input_gram(X[None, :1])).ii[0].detach() / 3 + 1e-9 * torch.eye(40, dtype=X.dtype)
    # F ~ N(0, S), column by column, and X is F seen through noise of variance ¼/ν: E[F Fᵀ] is dense algebra.
    covariance = torch.linalg.inv(torch.linalg.inv(S) + 3 / 0.25 * torch.eye(40, dtype=X.dtype))
    mean = covariance @ X_unit * 3 / 0.25
    expected = mean @ mean.mT + 3 * covariance
    found = sample_grams(model, 20_000, generator(7))[1][0].detach()
    assert (found - expected).norm() < 0.05 * expected.norm()
    # On those features, the output's kernel is the GP's.
    K = model.output.kernel.ii(FeatureGram(X_unit[None], X_unit[None, :0].mT, X_unit[None, :0, 0]))[0]
    torch.testing.assert_close(K.detach(), (-0.5 * torch.cdist(scaled, scaled) ** 2).exp(), rtol=1e-6, atol=1e-9)


def test_entries_without_correlation_start_with_the_spread_of_their_precision() -> None:
    X, Y = data(20)
    model = deep_wishart_process(X[None], Y[None], num_inducing=20, initialisation="prior", generator=generator(18))
    gp = ShallowGP(*(torch.tensor(v, dtype=torch.float64) for v in ([1.0, 3.0, 9.0], 1.0, 0.01)))
    start_from(model, replicated(gp), 20)
    layer = cast(WishartLayer, model.layers[0])
    S = layer.kernel(model.input_gram(X[None, :1])).ii[0].detach() / 3
    L = torch.linalg.cholesky(S + default_jitter(X.dtype) * S.diagonal().mean() * torch.eye(20, dtype=X.dtype))
    # W of F = L W has the precision I + LᵀL/s², with s² = ¼/ν.
    expected = (1 + 3 / 0.25 * (L**2).sum(0)).rsqrt()
    found = layer.posterior.log_scale[0, :, 0].exp().detach()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("width", [2, 5])
def test_narrow_and_wide_layers_start_finite(width: int) -> None:
    X, Y = data(30)
    model = deep_wishart_process(X[None], Y[None], widths=width, initialisation="whitened", generator=generator(8))
    start_from(model, replicated(fit_shallow_gp(X, Y)), 30)
    assert elbo(model, X[None], Y[None], generator=generator(9)).isfinite()


def test_smooth_data_ask_for_fewer_inducing_points() -> None:
    X, _ = data(300)
    counts = [
        count_inducing(
            X, ShallowGP(torch.full((3,), scale, dtype=X.dtype), *(X.new_tensor(v) for v in (1.0, noise))), 5
        )
        for scale, noise in ((10.0, 0.1), (2.0, 0.1), (2.0, 0.001), (0.1, 0.001))
    ]
    assert counts == sorted(counts)
    assert counts[0] < 20
    assert counts[-1] == 300
    assert count_inducing(X[:7], ShallowGP(torch.ones(3), torch.tensor(1.0), torch.tensor(math.e))) == 7


def test_the_noise_is_what_is_left_unexplained() -> None:
    X, Y = data()
    gp = ShallowGP(*(torch.tensor(v, dtype=torch.float64) for v in ([1.0, 3.0, 9.0], 1.0, 1e-4)))
    model = deep_wishart_process(X[None], Y[None], depth=4, initialisation="whitened", generator=generator(10))
    start_from(model, replicated(gp), 60)
    before = elbo(model, X[None], Y[None], generator=generator(11)) / 60
    match_noise(model, X[None], Y[None], generator=generator(12))
    after = elbo(model, X[None], Y[None], generator=generator(11)) / 60
    assert before < -20
    assert after > -3
    # The variance of f has grown with the noise since; once more, and it is close to the best.
    match_noise(model, X[None], Y[None], generator=generator(12))
    noise = cast(Gaussian, model.likelihood).log_noise
    values = []
    for step in (-0.7, 0.0, 0.7):
        with torch.no_grad():
            noise.add_(step)
            values.append(elbo(model, X[None], Y[None], num_samples=50, generator=generator(13)).item())
            noise.sub_(step)
    assert values[1] == max(values)


@pytest.mark.parametrize(("misfit", "raised"), [(1.0, True), (3.0, True), (1e6, False)])
def test_the_noise_is_raised_to_a_share_of_the_misfit(misfit: float, raised: bool) -> None:
    X, Y = data()
    gp = ShallowGP(*(torch.tensor(v, dtype=torch.float64) for v in ([1.0, 3.0, 9.0], 1.0, 1e-4)))
    model = deep_wishart_process(X[None], Y[None], depth=1, num_inducing=5, generator=generator(17))
    start_from(model, replicated(gp), 60)
    f = predict_f(model, X[None], 1).components  # of a sparse GP, the same for all samples
    unexplained = ((Y - f.mean[0, 0]) ** 2 + f.variance[0, 0]).mean().item()
    match_noise(model, X[None], Y[None], misfit=misfit)
    noise = cast(Gaussian, model.likelihood).log_noise.exp().item()
    assert noise == pytest.approx(unexplained / misfit if raised else 1e-4, rel=1e-9)


def test_rows_count_by_their_weights_in_the_noise() -> None:
    X, Y = data()
    weights = torch.arange(60, dtype=X.dtype) % 3
    repeated = torch.arange(60).repeat_interleave(weights.long())
    noises = []
    for inputs, targets, counts in ((X, Y, weights), (X[repeated], Y[repeated], None)):
        model = deep_wishart_process(X[None], Y[None], depth=1, num_inducing=60, generator=generator(14))
        match_noise(model, inputs[None], targets[None], counts)
        noises.append(cast(Gaussian, model.likelihood).log_noise.detach())
    torch.testing.assert_close(noises[0], noises[1])


def test_classes_have_no_noise_to_match() -> None:
    X, Y = data()
    model = deep_wishart_process(X[None], (Y[None] > 0).double(), likelihood=Bernoulli(), generator=generator(15))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    match_noise(model, X[None], (Y[None] > 0).double())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_gp_gives_no_start_to_the_authors_initialisation() -> None:
    X, Y = data()
    model = deep_wishart_process(X[None], Y[None], initialisation="authors", generator=generator(16))
    with pytest.raises(ValueError, match="“prior” and “whitened”"):
        start_from(model, replicated(fit_shallow_gp(X, Y)), 60)

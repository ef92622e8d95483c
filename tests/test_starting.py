"""Deep models that start from a plain GP, and noise that starts to vary."""

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from deepwishart.gram import FeatureGram
from deepwishart.layers import WishartLayer
from deepwishart.likelihoods import Bernoulli, Gaussian, StudentT
from deepwishart.linalg import default_jitter
from deepwishart.models import deep_gaussian_process, deep_inverse_wishart_process, deep_wishart_process
from deepwishart.objectives import elbo, predict, predict_f, sample_grams
from deepwishart.shallow import ShallowGP, fit_shallow_gp, marginal_likelihood
from deepwishart.starting import average_inducing_targets, match_noise, start_from, with_varying_noise
from tests.distributions.instances import generator
from tests.layers.instances import perturb
from tests.model_instances import METHODS, build
from tests.test_shallow import data

GP = ShallowGP(*(torch.tensor(v, dtype=torch.float64) for v in ([1.0, 3.0, 9.0], 1.0, 0.01)))


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
    model = deep_wishart_process(
        X[None], Y[None], num_inducing=40, initialisation=initialisation, generator=generator(6)
    )
    start_from(model, replicated(GP), 40)
    scaled = (model.inducing_inputs[0] / GP.lengthscale).detach()
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


def first_layer(initialisation: str) -> tuple[WishartLayer, Tensor]:
    """As it starts, and the precision of W in F = L W, I + LᵀL/s² with s² = ¼/ν."""
    X, Y = data(20)
    model = deep_wishart_process(
        X[None], Y[None], num_inducing=20, initialisation=initialisation, generator=generator(18)
    )
    start_from(model, replicated(GP), 20)
    layer, identity = cast(WishartLayer, model.layers[0]), torch.eye(20, dtype=X.dtype)
    S = layer.kernel(model.input_gram(X[None, :1])).ii[0].detach() / 3
    L = torch.linalg.cholesky(S + default_jitter(X.dtype) * S.diagonal().mean() * identity)
    return layer, identity + 3 / 0.25 * L.mT @ L


def test_entries_without_correlation_start_with_the_spread_of_their_precision() -> None:
    layer, precision = first_layer("prior")
    expected = precision.diagonal().rsqrt()
    found = layer.posterior.log_scale[0, :, 0].exp().detach()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


def test_a_whitened_layer_starts_with_the_covariance_of_its_features() -> None:
    layer, precision = first_layer("whitened")
    V = layer.posterior.V[0].detach()
    torch.testing.assert_close(V @ V.mT, torch.linalg.inv(precision), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("width", [2, 3, 5])
def test_features_start_with_the_nearest_gram_matrix_of_their_width(width: int) -> None:
    X, Y = data(12)
    model = deep_gaussian_process(X[None], Y[None], num_inducing=12, widths=width, generator=generator(20))
    start_from(model, replicated(GP), 12)
    scaled = (model.inducing_inputs[0] / GP.lengthscale).detach()
    values, vectors = torch.linalg.eigh(scaled @ scaled.mT / (scaled**2).sum(-1).mean())
    nearest = (vectors * values)[:, -width:] @ vectors[:, -width:].mT
    v = model.layers[0].get_parameter("posterior.v")[0].detach()
    torch.testing.assert_close(v @ v.mT / width, nearest, rtol=1e-8, atol=1e-10)
    precision = model.layers[0].get_parameter("posterior.log_precision").exp()
    torch.testing.assert_close(precision, torch.full_like(precision, 1 / 0.5**2))


@pytest.mark.parametrize("width", [2, 5])
def test_narrow_and_wide_layers_start_finite(width: int) -> None:
    X, Y = data(30)
    model = deep_wishart_process(X[None], Y[None], widths=width, initialisation="whitened", generator=generator(8))
    start_from(model, replicated(fit_shallow_gp(X, Y)), 30)
    assert elbo(model, X[None], Y[None], generator=generator(9)).isfinite()


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


def test_outputs_that_share_a_precision_share_the_logarithm_of_their_noise() -> None:
    X, Y = data()
    Y = torch.cat([Y, 3 * Y], -1)
    model = deep_wishart_process(X[None], Y[None], depth=1, num_inducing=20, generator=generator(21))
    match_noise(model, X[None], Y[None])
    log_noise = cast(Gaussian, model.likelihood).log_noise[0].detach()
    assert log_noise[1] > log_noise[0]
    expected = math.log(60 / 20) - log_noise.mean().item()
    assert model.output.posterior.log_precision.unique().tolist() == [pytest.approx(expected)]


def test_students_scale_starts_as_the_root_of_the_noise() -> None:
    X, Y = data()
    model = deep_wishart_process(X[None], Y[None], num_inducing=20, likelihood=StudentT(), generator=generator(22))
    start_from(model, replicated(GP), 60)
    match_noise(model, X[None], Y[None], misfit=1e6)  # which changes nothing: little is left unexplained
    assert cast(StudentT, model.likelihood).log_scale.exp().item() == pytest.approx(0.1)
    assert model.output.posterior.log_precision.unique().exp().tolist() == [pytest.approx(60 / 20 / 0.01)]


def test_classes_start_with_the_curvature_of_their_likelihood() -> None:
    X, Y = data()
    labels = (Y[None] > 0).double()
    model = deep_wishart_process(X[None], labels, num_inducing=20, likelihood=Bernoulli(), generator=generator(23))
    start_from(model, replicated(GP), 60)
    assert model.output.posterior.log_precision.unique().exp().tolist() == [pytest.approx(0.25 * 60 / 20)]


def test_inducing_points_start_from_the_mean_of_the_targets_that_they_equal() -> None:
    X, Y = data(5)
    repeated = torch.tensor([0, 1, 2, 3, 4, 1, 3, 3])
    X, Y = X[repeated], Y[repeated] + torch.arange(8.0, dtype=Y.dtype)[:, None]
    weights = torch.tensor([1.0, 2, 1, 1, 1, 4, 1, 2], dtype=X.dtype)
    inputs, targets = X.expand(2, *X.shape), Y.expand(2, *Y.shape)
    model = deep_wishart_process(inputs, targets, num_inducing=4, generator=generator(24))
    average_inducing_targets(model, X, Y, weights)
    for Z, v in zip(model.inducing_inputs, model.output.posterior.v, strict=True):
        for z, mean in zip(Z, v, strict=True):
            equal = (z == X).all(-1)
            expected = (weights[equal] * Y[equal, 0]).sum() / weights[equal].sum()
            assert mean.item() == pytest.approx(expected.item())


def test_a_single_row_starts_finite() -> None:
    X = torch.zeros(1, 1, 3, dtype=torch.float64)
    model = deep_wishart_process(X, X[..., :1], generator=generator(25))
    start_from(model, replicated(GP), 1)
    assert elbo(model, X, X[..., :1], generator=generator(26)).isfinite()


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


@pytest.mark.parametrize("method", METHODS)
def test_noise_that_is_about_to_vary_leaves_f_as_it_was(method: str) -> None:
    X, Y = data(40)
    Y = torch.cat([Y, Y**2], -1)
    model = build(method, X, Y, num_inducing=12, likelihood=Gaussian(0.3))
    perturb(model)
    with torch.no_grad():
        model.output.kernel.get_parameter("log_height").fill_(math.log(3.0))
    varied = with_varying_noise(model, 40)
    before, after = (predict_f(m, X, 5, generator(0)).components for m in (model, varied))
    torch.testing.assert_close(after.mean[..., :2], before.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(after.variance[..., :2], before.variance, rtol=1e-6, atol=1e-8)
    assert not after.mean[..., 2:].any()
    # The logarithm of the noise has a standard deviation of at most one, whatever the height of the targets.
    assert (varied.likelihood.get_parameter("log_spread").exp() ** 2 * after.variance[..., 2:] <= 1 + 1e-6).all()
    torch.testing.assert_close(*(m.likelihood.get_parameter("log_noise") for m in (varied, model)))
    # An inducing point knows the noise of its 40/12 rows with the curvature ½ of each, in units of h = 3.
    precision = varied.output.posterior.log_precision[..., 2:, :].exp()
    torch.testing.assert_close(precision, torch.full_like(precision, 0.5 * 40 / 12 / 3**2))
    assert elbo(varied, X, Y, generator=generator(1)).isfinite()
    with pytest.raises(ValueError, match="Only Gaussian noise"):
        with_varying_noise(varied, 40)

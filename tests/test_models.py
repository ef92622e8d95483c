"""Whole models: known special cases, priors, reductions, invariances, bad input."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from torch import Tensor

from deepwishart.gram import FeatureGram
from deepwishart.kernels import KERNELS
from deepwishart.layers import GaussianLayer
from deepwishart.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson, StudentT
from deepwishart.models import deep_gaussian_process, deep_wishart_process
from deepwishart.objectives import elbo, predict, predict_f, predictive_log_likelihood
from tests.distributions.instances import generator
from tests.layers.instances import perturb
from tests.model_instances import METHODS, build, data

# Depth 1 is a sparse GP; with M = N and the optimal posterior it is the exact one.


@pytest.mark.parametrize("method", METHODS)
def test_depth_one_is_the_exact_gp(method: str) -> None:
    X, y = data(50)
    noise = 0.1
    model = build(method, X, y, depth=1, num_inducing=50, likelihood=Gaussian(noise), jitter=1e-10)
    with torch.no_grad():
        order = [int((z == X).all(-1).nonzero()) for z in model.inducing_inputs]
        model.output.posterior.v.copy_(y[order])
        model.output.posterior.log_precision.fill_(-math.log(noise))
    # Our Gram matrix divides by D, so the lengthscale is √D there.
    kernel = ConstantKernel(1.0, "fixed") * RBF(3**0.5, "fixed")
    exact = GaussianProcessRegressor(kernel, alpha=noise, optimizer=None).fit(X.numpy(), y[:, 0].numpy())
    found = elbo(model, X, y)
    assert found.shape == ()
    assert found.item() == pytest.approx(exact.log_marginal_likelihood_value_, abs=1e-5)
    X_new, _ = data(20, seed=1)
    mean, std = exact.predict(X_new.numpy(), return_std=True)
    latent = predict_f(model, X_new)
    torch.testing.assert_close(latent.mean[:, 0], torch.from_numpy(mean), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(latent.stddev[:, 0], torch.from_numpy(std), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(predict(model, X_new).variance, latent.variance + noise)


def test_a_sparse_gp_bounds_the_exact_one() -> None:
    X, y = data(50)
    exact = GaussianProcessRegressor(RBF(3**0.5, "fixed"), alpha=0.1, optimizer=None).fit(X.numpy(), y[:, 0].numpy())
    for M in (5, 20, 50):
        model = deep_wishart_process(X, y, depth=1, num_inducing=M, likelihood=Gaussian(0.1), generator=generator(0))
        assert elbo(model, X, y).item() < exact.log_marginal_likelihood_value_ + 1e-6


# Reductions and invariances.


@pytest.mark.parametrize("initialisation", ["prior", "authors", "whitened"])
def test_a_gw_and_ab_gw_reduce_to_gw_under_the_same_noise(initialisation: str) -> None:
    """Away from the start, with all that they share equal and A′ = B = I."""
    X, y = data()
    gw, a_gw, ab_gw = (
        build(method, X, y, depth=3, num_inducing=10, initialisation=initialisation)
        for method in ("gw", "a-gw", "ab-gw")
    )
    perturb(gw, 0.05)
    for larger in (a_gw, ab_gw):
        larger.load_state_dict(gw.state_dict(), strict=False)
    bounds = [elbo(model, X, y, num_samples=4, generator=generator(3)) for model in (gw, a_gw, ab_gw)]
    torch.testing.assert_close(bounds[0], bounds[1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(bounds[1], bounds[2], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_rotating_the_inputs_changes_nothing(method: str) -> None:
    """With equal lengthscales the model sees only the Gram matrix of its inputs."""
    X, y = data()
    model = build(method, X, y, depth=3, num_inducing=10)
    Q = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=generator(1)))[0]
    turned = copy.deepcopy(model)
    turned.inducing_inputs.data.copy_(model.inducing_inputs @ Q)
    bounds = [elbo(m, x, y, num_samples=3, generator=generator(4)) for m, x in ((model, X), (turned, X @ Q))]
    torch.testing.assert_close(bounds[0], bounds[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_replicas_train_as_if_alone(method: str) -> None:
    """The ELBO of a batch of replicas has the gradients of each alone, under its own noise."""
    X, y = data(30, batch=(2,))
    model = build(method, X, y, depth=3, num_inducing=8)
    perturb(model, 0.05)
    bounds = elbo(model, X, y, num_samples=4, generator=generator(5))
    assert bounds.shape == (2,)
    grads = torch.autograd.grad(bounds[0], list(model.parameters()), allow_unused=True)
    for (name, parameter), grad in zip(model.named_parameters(), grads, strict=True):
        assert parameter.shape[0] == 2, name
        assert grad is not None, name
        assert (grad[1] == 0).all(), name
        assert grad.isfinite().all(), name


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_decides_everything(method: str) -> None:
    X, y = data()
    first, second = (build(method, X, y, depth=2, num_inducing=10, generator=generator(3)) for _ in range(2))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(elbo(first, X, y, generator=generator(1)), elbo(second, X, y, generator=generator(1)))


@pytest.mark.parametrize(
    ("likelihood", "targets"),
    [
        (Gaussian(), lambda y: y),
        (HeteroscedasticGaussian(), lambda y: y),
        (StudentT(), lambda y: y),
        (Bernoulli(), lambda y: (y > 0).to(y)),
        (Categorical(3), lambda y: y.argsort(0).argsort(0).remainder(3).to(y)),
        (Poisson(), lambda y: y.abs().round()),
    ],
)
@pytest.mark.parametrize("method", ["ab-gw", "diwp"])
def test_every_likelihood_trains_and_predicts(method: str, likelihood: Any, targets: Any) -> None:
    X, y = data()
    Y = targets(y)
    model = build(method, X, Y, depth=2, num_inducing=10, likelihood=likelihood)
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    g, history = generator(0), []
    for _ in range(40):
        loss = -elbo(model, X, Y, num_samples=4, generator=g)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        history.append(loss.item())
    assert sum(history[-5:]) < sum(history[:5])
    assert predictive_log_likelihood(model, X, Y, 20, generator(0)).isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_several_outputs(method: str) -> None:
    X, y = data()
    Y = torch.cat([y, -y, y**2], -1)
    model = build(method, X, Y, depth=2, num_inducing=10)
    assert elbo(model, X, Y, num_samples=2, generator=generator(0)).isfinite()
    assert predict(model, X, 4, generator(0)).mean.shape == (40, 3)


# Data of all kinds.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "kind", ["single row", "single feature", "constant column", "duplicate columns", "all rows equal"]
)
def test_degenerate_data_work(method: str, kind: str) -> None:
    X, y = data(12)
    X = {
        "single row": X[:1],
        "single feature": X[:, :1],
        "constant column": torch.cat([X, torch.zeros(12, 1, dtype=X.dtype)], -1),
        "duplicate columns": torch.cat([X, X], -1),
        "all rows equal": X[:1].expand(12, 3),
    }[kind]
    y = y[: len(X)]
    model = build(method, X, y, depth=3, num_inducing=20)
    bound = elbo(model, X, y, num_samples=3, generator=generator(0))
    grads = torch.autograd.grad(bound, list(model.parameters()), allow_unused=True)
    assert bound.isfinite()
    assert all(grad is None or grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("widths", [(3, 2), (9, 7)])
def test_rotating_latent_features_changes_nothing(widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn the features of all points in every hidden layer: the ELBO stays."""
    X, y = data(20)
    model = build("ab-gw", X, y, depth=3, num_inducing=5, widths=widths)
    perturb(model, 0.05)
    straight = elbo(model, X, y, num_samples=4, generator=generator(3))

    def turned(F: Tensor, f: Tensor, tt: Tensor) -> FeatureGram:
        Q = torch.linalg.qr(torch.randn(F.shape[-1], F.shape[-1], dtype=torch.float64, generator=generator(9)))[0]
        return FeatureGram(F @ Q, Q.mT @ f, tt)

    monkeypatch.setattr("deepwishart.layers.wishart.FeatureGram", turned)
    torch.testing.assert_close(elbo(model, X, y, num_samples=4, generator=generator(3)), straight, rtol=1e-7, atol=1e-7)


def test_a_width_larger_than_the_number_of_inducing_points() -> None:
    X, y = data(20)
    for method in ("gw", "a-gw", "ab-gw", "dgp"):
        model = build(method, X, y, depth=3, widths=[9, 2], num_inducing=5)
        assert elbo(model, X, y, num_samples=3, generator=generator(0)).isfinite()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nan input": ({"inputs": torch.full((5, 2), float("nan"), dtype=torch.float64)}, r"inputs must be finite, got nan at \(0, 0\)"),
    "infinite target": ({"targets": torch.full((5, 1), float("inf"), dtype=torch.float64)}, r"targets must be finite, got inf"),
    "too few targets": ({"targets": torch.zeros(4, 1, dtype=torch.float64)}, r"targets must have shape .*\(5,\), got \(4, 1\)"),
    "no features": ({"inputs": torch.zeros(5, 0, dtype=torch.float64)}, r"inputs must have shape \(\*batch, N, D\)"),
    "integers": ({"inputs": torch.zeros(5, 2, dtype=torch.long)}, r"must share float64 or float32, got torch.int64"),
    "mixed dtypes": ({"targets": torch.zeros(5, 1)}, r"must share float64 or float32, got torch.float64 and torch.float32"),
    "depth": ({"depth": 0}, r"depth must be a whole number of at least 1, got 0"),
    "num_inducing": ({"num_inducing": 0}, r"num_inducing must be a whole number of at least 1, got 0"),
    "widths": ({"depth": 3, "widths": [2]}, r"one for each of the 2 hidden layers, got \[2\]"),
    "num_outputs": ({"num_outputs": 2}, r"num_outputs must be the number of columns of targets, 1, got 2"),
    "zero width": ({"widths": 0}, r"widths must be a whole number of at least 1, got 0"),
    "posterior": ({"posterior": "wishart"}, r"posterior must be gw, a-gw or ab-gw, got 'wishart'"),
    "kernel": ({"kernel": "rbf"}, r"there is no 'rbf'"),
    "initialisation": ({"initialisation": "zero"}, r"initialisation must be one of prior, authors, whitened, got 'zero'"),
    "kl": ({"kl": "exact"}, r"kl must be closed-form"),
    "fractional depth": ({"depth": 2.5}, r"depth must be a whole number of at least 1, got 2.5"),
    "negative jitter": ({"jitter": -1.0}, r"jitter must be a number from 0 to 1, .*got -1"),
    "numpy": ({"inputs": np.zeros((5, 2))}, r"inputs must be a torch tensor, got ndarray. Use torch.as_tensor"),
    "likelihood by name": ({"likelihood": "gaussian"}, r"likelihood must come from deepwishart.likelihoods"),
    "output_precision": ({"output_precision": "full"}, r"output_precision must be one of shared-full, .*got 'full'"),
    "classes": ({"likelihood": Bernoulli()}, r"targets must be zeros and ones"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case: str) -> None:
    changes, message = BAD[case]
    X, y = data(5, 2)
    with pytest.raises(ValueError, match=message):
        deep_wishart_process(**{"inputs": X, "targets": y, **changes})


@pytest.mark.parametrize("precision", ["shared-full", "shared-diagonal", "separate-full", "separate-diagonal"])
def test_every_output_precision(precision: Any) -> None:
    X, y = data()
    Y = torch.cat([y, -y], -1)
    model = deep_wishart_process(X, Y, num_inducing=10, output_precision=precision, generator=generator(0))
    posterior = model.output.posterior
    assert posterior.groups == (1 if precision.startswith("shared") else 2)
    assert posterior.diagonal == precision.endswith("diagonal")
    assert elbo(model, X, Y, num_samples=3, generator=generator(0)).isfinite()


@pytest.mark.parametrize("kernel", sorted(KERNELS))
@pytest.mark.parametrize("method", METHODS)
def test_every_kernel_on_one_standardised_row_and_on_one_feature(method: str, kernel: str) -> None:
    """A row of zeros gives a linear kernel of zero; points on a line are parallel, in float32 too."""
    for X in (torch.zeros(1, 2, dtype=torch.float64), torch.randn(60, 1, generator=generator(0))):
        y = torch.zeros(len(X), 1, dtype=X.dtype)
        model = build(method, X, y, depth=3, num_inducing=60, kernel=kernel)
        bound = elbo(model, X, y, num_samples=2, generator=generator(0))
        assert bound.isfinite(), X.dtype
        grads = torch.autograd.grad(bound, list(model.parameters()), allow_unused=True)
        assert all(grad is None or grad.isfinite().all() for grad in grads), X.dtype


def test_a_width_that_is_no_multiple_of_the_inputs_keeps_all_of_them() -> None:
    X, y = data(20)
    model = deep_gaussian_process(X, y, depth=2, widths=5, num_inducing=6, generator=generator(0))
    layer, Z = model.layers[0], model.inducing_inputs.detach()
    assert isinstance(layer, GaussianLayer)
    start = layer.posterior.v.detach()
    torch.testing.assert_close(start, torch.cat([Z, Z[:, :2]], -1))


def test_the_users_likelihood_is_not_changed() -> None:
    X, y = data(5, 2)
    likelihood = Gaussian()
    deep_wishart_process(X, y, likelihood=likelihood)
    assert not list(likelihood.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("method", METHODS)
def test_random_starts_on_real_data_are_finite(uci_inputs: Tensor, method: str, dtype: torch.dtype) -> None:
    """The short form of tests/random_starts.py: depth 5, 30 inducing points, 60 rows, 2 samples."""
    rows = torch.randperm(len(uci_inputs), generator=generator(0))[:60]
    X = uci_inputs[rows].to(dtype)
    y = torch.randn(60, 1, dtype=dtype, generator=generator(1))
    model = build(method, X, y, depth=5, num_inducing=30)
    bound = elbo(model, X, y, num_samples=2, generator=generator(2))
    grads = torch.autograd.grad(bound, list(model.parameters()), allow_unused=True)
    assert bound.isfinite()
    assert all(grad is None or grad.isfinite().all() for grad in grads)

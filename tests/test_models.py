"""Whole models: known special cases, priors, reductions, invariances, bad input."""

import copy
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from torch import Tensor

from deepwishart.distributions import extend_wishart
from deepwishart.gram import Gram
from deepwishart.inducing import choose_rows
from deepwishart.kernels import KERNELS
from deepwishart.layers import GaussianLayer, GaussianOutput, InverseWishartLayer, WishartPosterior
from deepwishart.layers.base import condition
from deepwishart.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson, StudentT
from deepwishart.models import (
    DeepKernelProcess,
    deep_gaussian_process,
    deep_inverse_wishart_process,
    deep_wishart_process,
)
from deepwishart.objectives import elbo, predict, predict_f, predict_in_chunks, predictive_log_likelihood
from tests.distributions.instances import generator
from tests.layers.instances import perturb
from tests.proofs import Proofs

METHODS = ("gw", "a-gw", "ab-gw", "dgp", "diwp")


def build(method: str, X: Tensor, y: Tensor, **options: Any) -> DeepKernelProcess:
    """A model by the name of its method."""
    options = {"generator": generator(0), **options}
    if method == "dgp":
        return deep_gaussian_process(X, y, **options)
    if method == "diwp":
        options.pop("widths", None)
        return deep_inverse_wishart_process(X, y, **options)
    return deep_wishart_process(X, y, posterior=method, **options)


def data(N: int = 40, D: int = 3, batch: tuple[int, ...] = (), seed: int = 0) -> tuple[Tensor, Tensor]:
    g = generator(seed)
    X = torch.randn(*batch, N, D, dtype=torch.float64, generator=g)
    y = (X[..., :1] * 1.5).sin() + 0.2 * torch.randn(*batch, N, 1, dtype=torch.float64, generator=g)
    return X, y


def to_the_prior(model: DeepKernelProcess) -> DeepKernelProcess:
    """Every posterior equal to its prior. The Wishart layers below the first must be whitened for that."""
    with torch.no_grad():
        for module in (model.output, *model.layers):
            if isinstance(module, GaussianLayer | GaussianOutput):
                module.posterior.precision_root.zero_()
            if isinstance(module, InverseWishartLayer):
                module.V.zero_()
                module.log_gamma.fill_(-40.0)
    return model


# Depth 1 is a sparse GP; with M = N and the optimal posterior it is the exact one.


@pytest.mark.parametrize("method", METHODS)
def test_depth_one_is_the_exact_gp(method: str) -> None:
    X, y = data(50)
    noise = 0.1
    model = build(method, X, y, depth=1, num_inducing=50, likelihood=Gaussian(noise), jitter=1e-10)
    with torch.no_grad():
        order = [int((z == X).all(-1).nonzero()) for z in model.inducing_inputs]
        model.output.posterior.v.copy_(y[order])
        model.output.posterior.precision_root.copy_(torch.eye(50, dtype=torch.float64) / noise**0.5)
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


# The prior.


def prior_functions(method: str, widths: tuple[int, ...], draws: int, X: Tensor, seed: int) -> Tensor:
    """Latent functions at new points, jointly with nothing: each point's f given its own sample of Gram matrices."""
    Z = torch.randn(4, X.shape[-1], dtype=torch.float64, generator=generator(99))
    options = {"initialisation": "whitened"} if method not in ("dgp", "diwp") else {}
    model = build(method, Z, Z[:, :1], depth=len(widths) + 1, widths=widths, num_inducing=4, **options)
    to_the_prior(model)
    with torch.no_grad():
        noise = model.draw_noise(draws, len(X), generator(seed))
        gram = model.input_gram(X)
        for layer, layer_noise in zip(model.layers, noise, strict=True):
            gram, _ = layer(gram, layer_noise)
        K = model.output.kernel(gram)
        # f at the first inducing point and at the first new one, from their joint law.
        ii, it, tt = K.ii[:, 0, 0], K.it[:, 0, 0], K.tt[:, 0]
        e = torch.randn(draws, 2, dtype=torch.float64, generator=generator(seed + 1))
        first = ii.sqrt() * e[:, 0]
        second = it / ii * first + (tt - it**2 / ii).clamp_min(0).sqrt() * e[:, 1]
    return torch.stack([first, second, gram.tt[:, 0], gram.it[:, 0, 0], gram.ii[:, 0, 1]], -1)


def statistics(draw: Tensor) -> list[Tensor]:
    f, g, tt, it, ii = draw.unbind(-1)
    return [f * g, (f - g).abs(), tt, it, ii]


@pytest.mark.parametrize("widths", [(2,), (3, 2), (6, 1, 3)])
def test_the_deep_wishart_process_has_the_deep_gps_prior(widths: tuple[int, ...], proofs: Proofs) -> None:
    draws = proofs.size(10_000, 400_000)
    X, _ = data(1, seed=5)
    gp = prior_functions("dgp", widths, draws, X, seed=1)
    p = []
    for method in ("gw", "a-gw", "ab-gw"):
        ours = prior_functions(method, widths, draws, X, seed=11)
        pairs = zip(statistics(ours), statistics(gp), strict=True)
        p += [float(scipy.stats.ks_2samp(a.numpy(), b.numpy()).pvalue) for a, b in pairs]
    proofs.p_values(f"Prior of the deep Wishart process against the deep GP's, widths {widths}", p, draws)


@pytest.mark.parametrize("power", [-1, 1])
@pytest.mark.parametrize("widths", [(2,), (3,), (3, 3)])
@pytest.mark.parametrize("method", ["gw", "ab-gw"])
def test_the_comparison_of_priors_rejects_a_wrong_power_of_the_width(
    method: str, widths: tuple[int, ...], power: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1/ν twice, or left out, in every layer: every statistic sees it."""
    X, _ = data(1, seed=5)
    gp = prior_functions("dgp", widths, 20_000, X, seed=1)

    def scaled(kernel: Gram, jitter: Tensor) -> Any:
        return condition(kernel / float(widths[0]) ** -power, jitter)

    monkeypatch.setattr("deepwishart.layers.wishart.condition", scaled)
    wrong = prior_functions(method, widths, 20_000, X, seed=11)
    pairs = list(zip(statistics(wrong), statistics(gp), strict=True))
    p = [float(scipy.stats.ks_2samp(a.numpy(), b.numpy()).pvalue) for a, b in pairs]
    assert max(p) < 1e-4, p


@pytest.mark.parametrize("initialisation", ["prior", "whitened"])
@pytest.mark.parametrize("widths", [(2, 5), (3, 1)])
def test_importance_sampling_from_the_posterior_finds_the_priors_evidence(
    widths: tuple[int, ...], initialisation: str, proofs: Proofs
) -> None:
    """E_Q[p(y | f) P/Q] is E_P[p(y | f)], whatever Q: the sampled KL of every layer closes the loop."""
    draws = proofs.size(20_000, 1_000_000)
    Z = torch.randn(3, 2, dtype=torch.float64, generator=generator(1))
    x, y = torch.tensor([[0.3, -0.2]], dtype=torch.float64), torch.tensor([[0.8]], dtype=torch.float64)
    estimates = []
    for method in ("dgp", "gw", "a-gw", "ab-gw"):
        options: dict[str, Any] = {"depth": 3, "widths": widths, "num_inducing": 3, "jitter": 0.3, "kl": "sampled"}
        if method != "dgp":
            options["initialisation"] = initialisation
        model = to_the_prior(build(method, Z, Z[:, :1], likelihood=Gaussian(0.25), **options))
        model.inducing_inputs.data.copy_(Z)
        if method != "dgp":
            for module in model.layers.modules():
                if isinstance(module, WishartPosterior):
                    perturb(module, 0.06, seed=3)
        with torch.no_grad():
            output = model(x, model.draw_noise(draws, 1, generator(7)))
            log_p = log_prob_of_samples(model, output.marginals, y)
            estimates.append((log_p - sum(output.kls)).exp())
    prior = estimates[0]
    z = []
    for estimate in estimates[1:]:
        error = ((prior.var() + estimate.var()) / draws).sqrt()
        assert error < 0.05 * prior.mean()
        z.append((estimate.mean() - prior.mean()) / error)
    proofs.z_scores(
        f"E_Q[p(y|f) P/Q] of whole models against the deep GP's prior, widths {widths}", torch.stack(z), draws
    )


def log_prob_of_samples(model: DeepKernelProcess, marginals: Any, y: Tensor) -> Tensor:
    """log p(y | G) of every sample."""
    components = model.likelihood.predict(marginals.mean, marginals.variance)
    return components.distribution.log_prob(y)[0, :, 0, 0]


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
def test_minibatches_are_unbiased(method: str, proofs: Proofs) -> None:
    """The mean over all batches of a partition has the full batch's expectation."""
    X, y = data(40)
    model = build(method, X, y, depth=2, num_inducing=8)
    perturb(model, 0.05)
    repeats = proofs.size(60, 600)
    differences = []
    for seed in range(repeats):
        full = elbo(model, X, y, num_samples=8, generator=generator(seed))
        parts = [
            elbo(model, X[b : b + 10], y[b : b + 10], num_data=40, num_samples=8, generator=generator(10_000 + seed))
            for b in range(0, 40, 10)
        ]
        differences.append((torch.stack(parts).mean() - full).detach())
    d = torch.stack(differences)
    proofs.z_scores(
        f"{method}: minibatch ELBO against the full batch", (d.mean() / (d.std() / repeats**0.5))[None], repeats
    )


def test_the_elbo_counts_every_row_and_weighs_the_kl() -> None:
    X, y = data()
    model = build("ab-gw", X, y, depth=1, num_inducing=10)
    whole, without = elbo(model, X, y), elbo(model, X, y, kl_weight=0.0)
    kl = model(X).kl
    torch.testing.assert_close(without - whole, kl)
    torch.testing.assert_close(elbo(model, X, y, num_data=80) - 2 * whole, kl)


@settings(max_examples=15)
@given(st.sampled_from(METHODS), st.integers(1, 3), st.integers(1, 12), st.randoms(use_true_random=False))
def test_a_prediction_depends_on_its_row_alone(method: str, depth: int, chunk_size: int, random: Any) -> None:
    """Not on the batch, the order or the chunks."""
    X, y = data(20)
    model = build(method, X, y, depth=depth, num_inducing=6)
    perturb(model, 0.05)
    rows = random.sample(range(12), random.randint(1, 12))
    X_new, _ = data(12, seed=2)
    whole = predict(model, X_new, 5, generator(1))
    part = predict(model, X_new[rows], 5, generator(1), chunk_size)
    torch.testing.assert_close(part.mean, whole.mean[rows], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(part.variance, whole.variance[rows], rtol=1e-9, atol=1e-9)
    chunks = list(predict_in_chunks(model, X_new, 5, generator(1), chunk_size))
    torch.testing.assert_close(torch.cat([p.mean for p in chunks]), whole.mean, rtol=1e-10, atol=1e-10)
    Y_new = torch.zeros(12, 1, dtype=torch.float64)
    found = predictive_log_likelihood(model, X_new, Y_new, 5, generator(1), chunk_size)
    torch.testing.assert_close(found, whole.log_prob(Y_new))


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


def test_inducing_inputs_are_distinct_rows_of_the_data() -> None:
    X, y = data(30)
    doubled = torch.cat([X, X, X])
    model = deep_wishart_process(doubled, torch.cat([y, y, y]), num_inducing=100, generator=generator(0))
    assert model.inducing_inputs.shape == (30, 3)
    assert len(torch.unique(model.inducing_inputs.detach(), dim=0)) == 30


def test_inducing_inputs_are_spread() -> None:
    """Two clusters, one of them tiny: both have inducing inputs."""
    X = torch.cat([torch.randn(500, 2, generator=generator(0)) * 0.01, torch.full((3, 2), 5.0)])
    chosen = X[choose_rows(X, 5, generator(1))]
    assert (chosen[:, 0] > 4).sum() == 1


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
    """Turn the features of all points in every hidden layer, columns beyond M included: the ELBO stays."""
    X, y = data(20)
    model = build("ab-gw", X, y, depth=3, num_inducing=5, widths=widths)
    perturb(model, 0.05)
    straight = elbo(model, X, y, num_samples=4, generator=generator(3))

    def turned(F: Tensor, F_w: Tensor, cross: Tensor, residual: Tensor, noise: Tensor) -> Any:
        nu = noise.shape[-1]
        Q = torch.linalg.qr(torch.randn(nu, nu, dtype=torch.float64, generator=generator(nu)))[0]
        pad = (0, nu - F.shape[-1])
        F, F_w = (torch.nn.functional.pad(x, pad) @ Q for x in (F, F_w))
        return extend_wishart(F, F_w, cross, residual, noise @ Q)

    monkeypatch.setattr("deepwishart.layers.wishart.extend_wishart", turned)
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


@pytest.mark.parametrize("call", [elbo, predictive_log_likelihood])
def test_rows_that_do_not_fit_are_refused(call: Any) -> None:
    X, y = data(5, 2)
    model = deep_wishart_process(X, y)
    torch.testing.assert_close(
        call(model, X, y[:, 0], generator=generator(0)), call(model, X, y, generator=generator(0))
    )
    for bad_X, bad_Y in ((X, y.expand(5, 2)), (X, y[:3]), (X, y[None])):
        with pytest.raises(ValueError, match=r"Y must have shape \(5, 1\)"):
            call(model, bad_X, bad_Y)
    for bad_X in (X[:, :1], X[0], X[None]):
        with pytest.raises(ValueError, match=r"X must have shape \('N', 2\)"):
            call(model, bad_X, y)
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        call(model, X, y, num_samples=0)


def test_prediction_checks_its_chunks() -> None:
    X, y = data(5, 2)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        predict(deep_wishart_process(X, y), X, chunk_size=0)


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


def test_rows_too_close_to_square_their_distance_are_still_distinct() -> None:
    X = torch.tensor([[0.0], [1e-30], [2e-30], [1e-30]])
    rows = choose_rows(X, 3, generator(0))
    assert len(torch.unique(X[rows], dim=0)) == 3


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "likelihood",
    [HeteroscedasticGaussian(), StudentT(), Bernoulli(), Categorical(2), Poisson()],
    ids=lambda x: type(x).__name__,
)
def test_on_a_gpu_no_likelihood_synchronises(likelihood: Any) -> None:
    X, y = data()
    Y = (y > 0).to(y)
    model = deep_wishart_process(X, Y, depth=2, num_inducing=10, likelihood=likelihood, generator=generator(0)).cuda()
    X, Y, g = X.cuda(), Y.cuda(), torch.Generator("cuda").manual_seed(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        elbo(model, X, Y, num_samples=4, generator=g).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("method", METHODS)
def test_on_a_gpu_a_step_never_synchronises_and_agrees_with_the_cpu(method: str) -> None:
    X, y = data()
    model = build(method, X, y, depth=3, num_inducing=10)
    perturb(model, 0.05)
    noise = model.draw_noise(4, 40, generator(0))
    on_cpu = model(X, noise)
    on_gpu = copy.deepcopy(model).cuda()
    output = on_gpu(X.cuda(), _to_gpu(noise))
    torch.testing.assert_close(output.marginals.mean.cpu(), on_cpu.marginals.mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(output.kl.cpu(), on_cpu.kl, rtol=1e-7, atol=1e-7)
    X, y, g = X.cuda(), y.cuda(), torch.Generator("cuda").manual_seed(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        elbo(on_gpu, X, y, num_samples=4, generator=g).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _to_gpu(noise: Any) -> Any:
    if isinstance(noise, Tensor):
        return noise.cuda()
    moved = [_to_gpu(part) for part in noise]
    return tuple(moved) if type(noise) is tuple else type(noise)(*moved)

"""Joint draws: their marginals are the predictions, their covariances those of known models."""

import pytest
import torch
from torch import Tensor

from deepwishart.joint import _extend, sample_functions
from deepwishart.models import DeepKernelProcess, deep_wishart_process
from deepwishart.objectives import predict_f
from tests.distributions.instances import generator
from tests.layers.instances import perturb
from tests.model_instances import METHODS, build, data, to_the_prior
from tests.proofs import Proofs


def perturbed(method: str, X: Tensor, y: Tensor, **options: object) -> DeepKernelProcess:
    model = build(method, X, y, num_inducing=8, generator=generator(0), **options)
    perturb(model, 0.1)
    return model


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_marginals_are_the_predictions(method: str, depth: int, proofs: Proofs) -> None:
    draws = proofs.size(4_000, 100_000)
    X, y = data(30)
    model = perturbed(method, X, y, depth=depth)
    new = torch.randn(3, 3, dtype=X.dtype, generator=generator(1))
    f = sample_functions(model, new, draws, generator(2))[..., 0]
    expected = predict_f(model, new, draws, generator(3))
    mean, variance = expected.mean[:, 0], expected.variance[:, 0]
    # Two means of samples; of a model of depth 1 the second is exact, which only makes the test stricter.
    z = (f.mean(0) - mean) / (2 * variance / draws).sqrt()
    spread = ((f - f.mean(0)) ** 2).std(0) / draws**0.5
    w = (f.var(0) - variance) / (2**0.5 * spread)
    proofs.z_scores(f"joint draws, {method}, depth {depth}: means and variances", torch.cat([z, w]).detach(), draws)


def test_a_gp_has_its_posterior_covariance() -> None:
    X, y = data(20)
    model = perturbed("ab-gw", X, y, depth=1)
    new = torch.randn(4, 3, dtype=X.dtype, generator=generator(1))
    f = sample_functions(model, new, 200_000, generator(2))[..., 0]
    gram = model.input_gram(new)
    F = torch.cat([gram.inducing, gram.points.mT])
    variance = (2 * model.get_parameter("output.kernel.log_height")).exp()
    K = (variance * (-0.5 * torch.cdist(F, F) ** 2).exp()).detach()
    root = model.output.posterior.precision_root[0].detach()
    Lambda = root @ root.mT
    K_ii, K_it, K_tt = K[:8, :8], K[:8, 8:], K[8:, 8:]
    # u ~ N(·, (K⁻¹ + Λ)⁻¹), and f given u is the prior's.
    A = torch.linalg.solve(K_ii + 1e-8 * torch.eye(8), K_it)
    Sigma = torch.linalg.inv(torch.linalg.inv(K_ii + 1e-8 * torch.eye(8)) + Lambda)
    expected = K_tt - A.mT @ K_it + A.mT @ Sigma @ A
    torch.testing.assert_close(torch.cov(f.mT), expected.squeeze(), atol=0.01, rtol=0.03)


@pytest.mark.parametrize("method", METHODS)
def test_equal_rows_have_equal_functions(method: str) -> None:
    X, y = data(30)
    model = perturbed(method, X, y, depth=3)
    new = torch.randn(2, 3, dtype=X.dtype, generator=generator(1))
    f = sample_functions(model, torch.cat([new, new]), 200, generator(2))[..., 0]
    assert (f[:, :2] - f[:, 2:]).abs().max() < 0.05 * f.std()


@pytest.mark.parametrize("method", ["gw", "dgp", "diwp"])
def test_at_the_prior_the_points_do_not_know_where_they_were_drawn(method: str, proofs: Proofs) -> None:
    """f(a) f(b) has the same mean whether a and b are both points, or one is an inducing point: consistency."""
    draws = proofs.size(20_000, 400_000)
    X, y = data(12)
    options = {} if method in ("dgp", "diwp") else {"initialisation": "whitened"}
    model = to_the_prior(build(method, X, y, depth=2, num_inducing=6, generator=generator(0), **options))
    other = to_the_prior(build(method, X[:6] + 30.0, y[:6], depth=2, num_inducing=6, generator=generator(4), **options))
    new = torch.tensor([[0.0, 0.0, 0.0], [2.0, 1.0, 0.0]], dtype=X.dtype)
    products = [sample_functions(m, new, draws, generator(5))[..., 0].prod(-1) for m in (model, other)]
    z = (products[0].mean() - products[1].mean()) / (sum(p.var() for p in products) / draws) ** 0.5
    proofs.z_scores(f"joint draws, {method}: the prior does not depend on the inducing points", z.detach()[None], draws)


@pytest.mark.parametrize("method", ["gw", "dgp", "diwp"])
def test_at_the_prior_a_layer_has_the_kernel_for_its_mean(method: str, proofs: Proofs) -> None:
    """E[G] = K over inducing points and points together, for Wishart and inverse Wishart alike."""
    draws = proofs.size(20_000, 400_000)
    X, y = data(12)
    options = {} if method in ("dgp", "diwp") else {"initialisation": "whitened"}
    model = to_the_prior(build(method, X, y, depth=2, num_inducing=4, generator=generator(0), **options))
    Z, layer = model.inducing_inputs, model.layers[0]
    new = torch.tensor([[0.0, 0.0, 0.0], [2.0, 1.0, 0.0]], dtype=X.dtype)
    with torch.no_grad():
        (noise,) = model.draw_noise(draws, 1, generator(5))
        above, _ = layer(model.input_gram(new[:1]), noise)
        below = torch.cat([Z, new]) * (-model.log_input_lengthscale).exp() / 3**0.5
        F = _extend(layer, below, above.inducing, generator(6))
        expected = (-0.5 * torch.cdist(below, below) ** 2).exp()
    G = F @ F.mT
    z = (G.mean(0) - expected) / (G.std(0) / draws**0.5)
    proofs.z_scores(
        f"joint draws, {method}: the mean of a layer is its kernel", z[torch.tril_indices(6, 6).unbind()], draws
    )


def test_wide_layers_replicas_and_limits() -> None:
    X, y = data(20, batch=(2,))
    model = deep_wishart_process(X, y, widths=12, num_inducing=5, generator=generator(0))
    assert sample_functions(model, X[:, :4], 3, generator(1)).shape == (3, 2, 4, 1)
    with pytest.raises(ValueError, match="At most 2000 points"):
        sample_functions(model, X[:, :1].expand(2, 2_001, 3), 1)

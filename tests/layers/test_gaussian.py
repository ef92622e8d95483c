"""Gaussian posteriors against dense multivariate normals, and the output against an exact GP."""

import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from deepwishart.gram import Gram, gram_of_features
from deepwishart.kernels import make_kernel
from deepwishart.layers import GaussianOutput, GaussianPosterior
from deepwishart.layers.gaussian import ungroup
from deepwishart.linalg import cholesky
from tests.distributions.instances import generator
from tests.layers.instances import inputs, perturb

M, C = 5, 3
FORMS = [(shared, diagonal) for shared in (True, False) for diagonal in (True, False)]


def dense_posterior(posterior: GaussianPosterior, K: Tensor) -> list[MultivariateNormal]:
    """Q(u_c) = N(ΣΛv, Σ), Σ = (K⁻¹ + Λ)⁻¹, for each output."""
    result = []
    for c in range(C):
        group = 0 if posterior.groups == 1 else c
        if posterior.diagonal:
            Lambda = torch.diag(posterior.log_precision[group].exp())
        else:
            root = (0.5 * posterior.log_precision[group]).exp().diag() @ posterior.precision_mixing[group]
            Lambda = root @ root.mT
        Sigma = torch.linalg.inv(torch.linalg.inv(K) + Lambda)
        result.append(MultivariateNormal(Sigma @ Lambda @ posterior.v[:, c], (Sigma + Sigma.mT) / 2))
    return result


def random_posterior(shared: bool, diagonal: bool) -> GaussianPosterior:
    v = torch.randn(M, C, dtype=torch.float64, generator=generator(0))
    posterior = GaussianPosterior(v, 1.0, shared, diagonal)
    perturb(posterior, 0.5)
    return posterior


@pytest.mark.parametrize(("shared", "diagonal"), FORMS)
def test_divergence_and_marginals_against_dense_normals(shared: bool, diagonal: bool) -> None:
    gram = inputs(M, 4)
    kernel = make_kernel("squared-exponential")
    output = GaussianOutput(kernel, random_posterior(shared, diagonal), torch.zeros((), dtype=torch.float64))
    K = kernel(gram)
    dense = dense_posterior(output.posterior, K.ii)
    found = output(gram)
    prior = MultivariateNormal(torch.zeros(M, dtype=torch.float64), K.ii)
    torch.testing.assert_close(
        found.kl, torch.stack([kl_divergence(q, prior) for q in dense]).sum(), rtol=1e-8, atol=1e-8
    )
    weights = torch.linalg.solve(K.ii, K.it)
    for c, q in enumerate(dense):
        torch.testing.assert_close(found.mean[:, c], weights.mT @ q.mean, rtol=1e-8, atol=1e-8)
        variance = K.tt - (weights * K.it).sum(0) + (weights * (q.covariance_matrix @ weights)).sum(0)
        torch.testing.assert_close(found.variance[:, c], variance, rtol=1e-8, atol=1e-8)


def test_an_optimal_posterior_is_the_exact_gp() -> None:
    """M = N, v = y, Λ = I/σ²: predictions are scikit-learn's, and the divergence closes the ELBO to log p(y)."""
    g = generator(1)
    X, X_new = torch.randn(30, 2, dtype=torch.float64, generator=g), torch.randn(8, 2, dtype=torch.float64, generator=g)
    y = X[:, :1].sin() + 0.1 * torch.randn(30, 1, dtype=torch.float64, generator=g)
    noise = 0.1
    posterior = GaussianPosterior(y, 1 / noise, diagonal=True)
    output = GaussianOutput(make_kernel("squared-exponential"), posterior, torch.tensor(1e-10, dtype=torch.float64))
    found = output(gram_of_features(X, X_new))
    # The Gram matrix divides by D = 2: scikit-learn's lengthscale is √2.
    exact = GaussianProcessRegressor(ConstantKernel(1.0, "fixed") * RBF(2**0.5, "fixed"), alpha=noise, optimizer=None)
    exact.fit(X.numpy(), y[:, 0].numpy())
    mean, std = exact.predict(X_new.numpy(), return_std=True)
    torch.testing.assert_close(found.mean[:, 0], torch.from_numpy(mean), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.variance[:, 0].sqrt(), torch.from_numpy(std), rtol=1e-4, atol=1e-5)
    at_data = output(gram_of_features(X, X))
    residual = (y - at_data.mean) ** 2 + at_data.variance
    expected_log_likelihood = -0.5 * (residual / noise + torch.tensor(2 * torch.pi * noise).log()).sum()
    elbo = (expected_log_likelihood - at_data.kl).item()
    assert elbo == pytest.approx(exact.log_marginal_likelihood_value_, abs=1e-5)


@pytest.mark.parametrize(("shared", "diagonal"), FORMS)
def test_samples_and_replicas_batch(shared: bool, diagonal: bool) -> None:
    S, R = 2, 3
    v = torch.randn(R, M, C, dtype=torch.float64, generator=generator(0))
    posterior = GaussianPosterior(v, 1.0, shared, diagonal)
    perturb(posterior)
    output = GaussianOutput(
        make_kernel("squared-exponential", torch.Size((R,))), posterior, torch.full((R,), 1e-8, dtype=torch.float64)
    )
    gram = Gram(*(block.expand(S, *block.shape) for block in inputs(M, 4, batch=(R,))))
    found = output(gram)
    assert found.mean.shape == found.variance.shape == (S, R, 4, C)
    assert found.kl.shape == (S, R)
    assert (found.variance > 0).all()


@pytest.mark.parametrize(("shared", "diagonal"), FORMS)
def test_grouping_is_undone(shared: bool, diagonal: bool) -> None:
    posterior = random_posterior(shared, diagonal)
    K = torch.eye(M, dtype=torch.float64)
    q = posterior(cholesky(K, jitter=0.0))
    torch.testing.assert_close(ungroup(posterior._grouped(posterior.v)), posterior.v.detach())
    means = torch.stack([dense.mean for dense in dense_posterior(posterior, K)], -1)
    torch.testing.assert_close(ungroup(q.mean), means)

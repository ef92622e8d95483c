"""Extending a Wishart matrix point by point: against the joint law, and through a whole small model."""

import pytest
import scipy.stats
import torch
from torch import Tensor

from deepwishart.distributions import (
    ABGeneralizedWishart,
    AGeneralizedWishart,
    GeneralizedWishart,
    Wishart,
    extend_wishart,
    log_density_ratio,
)
from deepwishart.distributions.bartlett_wishart import BartlettWishart
from deepwishart.linalg import cholesky
from tests.distributions.instances import generator, random_scale_tril, standard_parameters
from tests.proofs import Proofs

M = 4
WIDTHS = [2, 4, 7]  # ν <, =, > M


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


@pytest.mark.parametrize("df", WIDTHS)
def test_marginal_and_conditional_make_the_joint(df: int, proofs: Proofs) -> None:
    draws = proofs.size(20_000, 500_000)
    L = random_scale_tril(M + 1, 0)
    joint = Wishart(df, L).sample((draws,), generator=generator(1))
    S = L @ L.mT
    factor = cholesky(S[:M, :M], jitter=0.0)
    T, F = Wishart(df, factor.tril).rsample_bartlett((draws,), generator(2))
    a = factor.whiten(S[:M, M:])
    residual = S[M:, M:].diagonal() - (a**2).sum(0)
    extension = extend_wishart(T.mT @ a, residual, normal(draws, df, 1, seed=3))
    ours = torch.cat([(F @ extension.features).squeeze(-1), extension.diagonal], -1)
    theirs = torch.cat([joint[:, :M, M], joint[:, M:, M]], -1)
    p = [float(scipy.stats.ks_2samp(ours[:, k].numpy(), theirs[:, k].numpy()).pvalue) for k in range(theirs.shape[-1])]
    # A statistic of both blocks, so that their dependence counts too.
    ours_ratio = extension.diagonal[:, 0] / (F @ F.mT).diagonal(dim1=-2, dim2=-1).sum(-1)
    theirs_ratio = joint[:, M, M] / joint[:, :M, :M].diagonal(dim1=-2, dim2=-1).sum(-1)
    p.append(float(scipy.stats.ks_2samp(ours_ratio.numpy(), theirs_ratio.numpy()).pvalue))
    proofs.p_values(f"Wishart extended by a point against the joint Wishart, M = {M}, ν = {df}", p, draws)


def test_columns_beyond_M_count() -> None:
    """ν > M: E[G_tt] = ν S_tt only if the new point has features in the columns where the others have none."""
    df, draws = 9, 50_000
    L = random_scale_tril(M + 1, 0)
    S = L @ L.mT
    factor = cholesky(S[:M, :M], jitter=0.0)
    T, _ = Wishart(df, factor.tril).rsample_bartlett((draws,), generator(0))
    a = factor.whiten(S[:M, M:])
    residual = S[M:, M:].diagonal() - (a**2).sum(0)
    G_tt = extend_wishart(T.mT @ a, residual, normal(draws, df, 1, seed=1)).diagonal[:, 0]
    z = (G_tt.mean() - df * S[M, M]) / (G_tt.std() / draws**0.5)
    assert abs(z) < 4
    short = extend_wishart(T.mT @ a, residual, normal(draws, M, 1, seed=1)).diagonal[:, 0]
    assert (short.mean() - df * S[M, M]) / (short.std() / draws**0.5) < -20


def test_a_residual_of_zero_or_below_is_no_trouble() -> None:
    T, _ = Wishart(2, torch.eye(3)).rsample_bartlett()
    residual = torch.tensor([0.0, -1e-9], requires_grad=True)
    extension = extend_wishart(T.mT @ torch.eye(3)[:, :2], residual, torch.randn(2, 2))
    (grad,) = torch.autograd.grad(extension.diagonal.sum(), residual)
    assert extension.features.isfinite().all()
    assert grad.isfinite().all()


# End to end: two hidden layers, three inducing and two new points, p(y) by importance sampling from Q.

X = torch.tensor([[-1.0], [0.2], [1.1], [-0.4], [0.8]], dtype=torch.float64)
Y = torch.tensor([0.3, -0.5], dtype=torch.float64)
POINTS, JITTER, NOISE = 3, 0.3, 0.5


def squared_exponential(G: Tensor) -> Tensor:
    d = G.diagonal(dim1=-2, dim2=-1)
    K = (-0.5 * (d[..., :, None] - 2 * G + d[..., None, :])).exp()
    return K + JITTER * torch.eye(K.shape[-1], dtype=K.dtype)


def likelihood(G: Tensor, f_noise: Tensor) -> Tensor:
    """p(y | f) at the two new points, f drawn from the output GP."""
    f = torch.linalg.cholesky(squared_exponential(G)) @ f_noise[..., None]
    return torch.distributions.Normal(f[..., POINTS:, 0], NOISE).log_prob(Y).sum(-1).exp()


def prior_estimate(widths: tuple[int, int], draws: int) -> Tensor:
    """From features, as a deep GP draws them."""
    G = (X @ X.mT).expand(draws, 5, 5)
    for layer, width in enumerate(widths):
        F = torch.linalg.cholesky(squared_exponential(G)) @ normal(draws, 5, width, seed=layer)
        G = F @ F.mT / width
    return likelihood(G, normal(draws, 5, seed=10))


def posterior_estimate(family: str, widths: tuple[int, int], draws: int) -> Tensor:
    """p(y|f) P/Q with the inducing block from Q and the new points, jointly, from the conditional prior."""
    G, log_weight = (X @ X.mT).expand(draws, 5, 5), torch.zeros(draws, dtype=torch.float64)
    for layer, width in enumerate(widths):
        S = squared_exponential(G) / width
        L = torch.linalg.cholesky(S)
        prior = Wishart(width, L[:, :POINTS, :POINTS], validate_args=False)
        q = posterior(family, prior, width)
        T, F = q.rsample_bartlett(generator=generator(20 + layer))
        log_weight = log_weight + log_density_ratio(prior, q, T, F)
        F_w = torch.nn.functional.pad(prior.whiten(F), (0, width - F.shape[-1]))
        F_all = L @ torch.cat([F_w, normal(draws, 5 - POINTS, width, seed=30 + layer)], -2)
        G = F_all @ F_all.mT
    return likelihood(G, normal(draws, 5, seed=40)) * log_weight.exp()


def posterior(family: str, prior: Wishart, width: int) -> BartlettWishart:
    """Near the prior, with some of every freedom."""
    free = standard_parameters(POINTS, width)
    free["rate"], free["scale"] = 0.9 * free["rate"], 1.1 * free["scale"]
    free["loc"] = free["loc"] + 0.1
    r = min(POINTS, width)
    turn = torch.linalg.matrix_exp(0.1 * normal(POINTS, POINTS, seed=7))
    B = torch.eye(r, dtype=torch.float64) + 0.1 * torch.ones(r, r, dtype=torch.float64).tril(-1)
    if family == "gw":
        return GeneralizedWishart(width, prior.scale_tril, **free, validate_args=False)
    if family == "a-gw":
        return AGeneralizedWishart(width, prior.scale_tril @ turn, **free, validate_args=False)
    return ABGeneralizedWishart(width, prior.scale_tril @ turn, B, **free, validate_args=False)


@pytest.mark.parametrize("widths", [(2, 5), (3, 1)])
def test_importance_sampling_through_two_layers_finds_the_deep_gps_evidence(
    widths: tuple[int, int], proofs: Proofs
) -> None:
    draws = proofs.size(40_000, 2_000_000)
    prior = prior_estimate(widths, draws)
    z = []
    for family in ("gw", "a-gw", "ab-gw"):
        estimate = posterior_estimate(family, widths, draws)
        error = ((prior.var() + estimate.var()) / draws).sqrt()
        z.append((estimate.mean() - prior.mean()) / error)
        assert error < 0.02 * prior.mean()
    proofs.z_scores(f"E_Q[p(y|f) P/Q] against the deep GP's features, widths {widths}", torch.stack(z), draws)


@pytest.mark.parametrize("df", [3, 5])
def test_gradients_of_any_order(df: int) -> None:
    mean, noise = normal(2, 3, 4, seed=0), normal(2, df, 4, seed=1)
    residual = 0.1 + normal(4, seed=2) ** 2
    arguments = tuple(x.requires_grad_() for x in (mean, residual, noise))
    assert torch.autograd.gradcheck(extend_wishart, arguments)
    assert torch.autograd.gradgradcheck(extend_wishart, arguments)


def test_what_is_left_of_nothing_has_no_gradient() -> None:
    residual = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        extend_wishart(normal(2, 3, seed=0), residual, normal(2, 3, seed=1))[0].sum(), residual
    )
    assert (gradient != 0).tolist() == [False, False, True]

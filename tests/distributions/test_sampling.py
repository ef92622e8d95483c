"""Samples: their law against the density, explicit randomness, reparameterised gradients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from deepwishart.distributions import InverseWishart, Wishart
from deepwishart.distributions.bartlett_wishart import BartlettWishart
from tests.distributions.instances import (
    ALL,
    CLASSES,
    FAMILIES,
    POSTERIORS,
    SIZES,
    free_coordinates,
    generator,
    make,
    make_bartlett,
    parameters,
    random_scale_tril,
)
from tests.proofs import Proofs, z_limit


def mean_z(values: Tensor, expected: Tensor) -> Tensor:
    """z-scores of sample means against what they should be."""
    return (values.mean(0) - expected) / (values.std(0) / len(values) ** 0.5)


# Goodness of fit: counts in cells against the density integrated over them.

_NODES, _WEIGHTS = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(12))


def cell_nodes(edges: Tensor) -> tuple[Tensor, Tensor]:
    """Gauss–Legendre nodes and weights in each interval, shape (cells, 12)."""
    middle, half = (edges[1:] + edges[:-1]) / 2, (edges[1:] - edges[:-1]) / 2
    return middle[:, None] + half[:, None] * _NODES, half[:, None] * _WEIGHTS


def rank_one_p_value(q: BartlettWishart, density: BartlettWishart, draws: int) -> float:
    """χ² test of samples of q (P = 2, ν = 1) in cells of (√G₁₁, G₂₁/√G₁₁) against another's density."""
    G = q.sample((draws,), generator=generator(5))
    u, w = G[:, 0, 0].sqrt(), G[:, 1, 0] / G[:, 0, 0].sqrt()
    u_edges = torch.quantile(u, torch.linspace(0.001, 0.999, 13, dtype=torch.float64))
    w_edges = torch.quantile(w, torch.linspace(0.001, 0.999, 13, dtype=torch.float64))
    counts = torch.histogramdd(torch.stack([u, w], -1), bins=[u_edges, w_edges]).hist.flatten()

    (un, uw), (wn, ww) = cell_nodes(u_edges), cell_nodes(w_edges)
    U, W = torch.broadcast_tensors(un[:, None, :, None], wn[None, :, None, :])
    gram = torch.stack([torch.stack([U * U, U * W], -1), torch.stack([U * W, W * W], -1)], -2)
    values = (density.log_prob(gram) + (2 * U * U).log()).exp()  # ∂(G₁₁, G₂₁)/∂(u, w) = 2u²
    mass = (values * uw[:, None, :, None] * ww[None, :, None, :]).sum((-2, -1)).flatten()
    return chi_square_p_value(counts, draws * mass, draws)


def chi_square_p_value(counts: Tensor, expected: Tensor, draws: int) -> float:
    """Cells that expect fewer than five go, with the space outside, into one remainder."""
    keep = expected >= 5
    rest, rest_expected = draws - counts[keep].sum(), draws - expected[keep].sum()
    observed = torch.cat([counts[keep], rest[None]])
    expectation = torch.cat([expected[keep], rest_expected[None]])
    statistic = ((observed - expectation) ** 2 / expectation).sum().item()
    return float(scipy.stats.chi2(len(observed) - 1).sf(statistic))


def rank_one_instance(family: str) -> BartlettWishart:
    q = make_bartlett(family, 2, 1, seed=7)
    if family != "wishart":
        q.bartlett.concentration = q.bartlett.concentration + 1
    q._validate_args = False
    return q


def test_samples_fit_the_density_at_rank_one(proofs: Proofs) -> None:
    draws = proofs.size(40_000, 1_000_000)
    p = [rank_one_p_value(q, q, draws) for q in map(rank_one_instance, FAMILIES)]
    proofs.p_values("χ² goodness of fit of samples and density, P = 2, ν = 1, each family", p, draws)


@pytest.mark.parametrize("family", POSTERIORS)
def test_the_fit_sees_a_changed_parameter(family: str) -> None:
    """Power: the same samples against a density whose σ is off by a tenth."""
    q, wrong = rank_one_instance(family), rank_one_instance(family)
    wrong.bartlett.scale = wrong.bartlett.scale * 1.1
    assert rank_one_p_value(q, wrong, 40_000) < 1e-6


def full_rank_p_value(q: BartlettWishart, density: BartlettWishart, draws: int) -> float:
    """The same for P = 2, ν ≥ 2, in cells of (log G₁₁, G₂₁/√G₁₁, log of the Schur complement)."""
    G = q.sample((draws,), generator=generator(6))
    log_g, w = G[:, 0, 0].log(), G[:, 1, 0] / G[:, 0, 0].sqrt()
    coordinates = (log_g, w, (G[:, 1, 1] - w**2).log())
    levels = torch.linspace(0.002, 0.998, 7, dtype=torch.float64)
    edges = [torch.quantile(x, levels) for x in coordinates]
    counts = torch.histogramdd(torch.stack(coordinates, -1), bins=edges).hist.flatten()

    (gn, gw), (wn, ww), (en, ew) = map(cell_nodes, edges)
    g, v, e = torch.broadcast_tensors(
        gn[:, None, None, :, None, None], wn[None, :, None, None, :, None], en[None, None, :, None, None, :]
    )
    G21 = v * (g / 2).exp()
    gram = torch.stack([torch.stack([g.exp(), G21], -1), torch.stack([G21, v**2 + e.exp()], -1)], -2)
    values = (density.log_prob(gram) + 1.5 * g + e).exp()
    weights = gw[:, None, None, :, None, None] * ww[None, :, None, None, :, None] * ew[None, None, :, None, None, :]
    mass = (values * weights).sum((-3, -2, -1)).flatten()
    return chi_square_p_value(counts, draws * mass, draws)


def test_samples_fit_the_density_at_full_rank(proofs: Proofs) -> None:
    draws = proofs.size(40_000, 1_000_000)
    instances = [make(family, 2, 3, seed=9, validate_args=False) for family in ALL]
    p = [full_rank_p_value(q, q, draws) for q in instances]
    proofs.p_values("χ² goodness of fit of samples and density, P = 2, ν = 3, each family", p, draws)


def test_the_score_has_mean_zero_under_samples(proofs: Proofs) -> None:
    """E[∇_θ log q(G)] = 0 in any dimension, for every parameter: density and sampler belong together."""
    draws = proofs.size(4_000, 200_000)
    scores = []
    for family in FAMILIES:
        for P, df in [(3, 2), (4, 4), (3, 6)]:
            G = make(family, P, df).sample((draws,), generator=generator(P))
            scores.append(mean_z(*_scores(family, P, df, G)))
    proofs.z_scores("The score has mean zero, every parameter of every family", torch.cat(scores), draws)


def _scores(family: str, P: int, df: int, G: Tensor) -> tuple[Tensor, Tensor]:
    """Per-sample gradients of log q with respect to all parameters that count, and zeros to compare with."""
    arguments = parameters(family, P, df)
    names = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    # One copy of the parameters for each sample makes per-sample gradients of one backward pass.
    copies = {name: arguments[name].expand(len(G), *arguments[name].shape).clone().requires_grad_() for name in names}
    q = CLASSES[family](df, **copies, validate_args=False)
    grads = torch.autograd.grad(q.log_prob(G).sum(), list(copies.values()))
    used = [grad[:, counts(name, grad.shape[1:])] for name, grad in zip(names, grads, strict=True)]
    flat = torch.cat(used, 1)
    return flat, torch.zeros(flat.shape[1], dtype=G.dtype)


def counts(name: str, shape: torch.Size) -> Tensor:
    """Which entries of a parameter the distribution depends on."""
    everything = torch.ones(shape, dtype=torch.bool)
    if name in ("scale_tril", "column_mixing"):
        return everything.tril()
    return everything.tril(-1) if name in ("loc", "scale") else everything


# The law itself, against the definition by Gaussian features.


@pytest.mark.parametrize(("P", "df"), SIZES)
def test_wishart_samples_are_sums_of_outer_products(P: int, df: int, proofs: Proofs) -> None:
    draws = proofs.size(8_000, 400_000)
    L = random_scale_tril(P, 0)
    ours = Wishart(df, L).sample((draws,), generator=generator(1))
    features = L @ torch.randn(draws, P, df, dtype=torch.float64, generator=generator(2))
    theirs = features @ features.mT
    statistics = [
        (free_coordinates(ours, 1)[:, -1], free_coordinates(theirs, 1)[:, -1]),
        (ours[:, -1, -1], theirs[:, -1, -1]),
        (ours.sum((-2, -1)), theirs.sum((-2, -1))),
    ]
    p = [float(scipy.stats.ks_2samp(a.numpy(), b.numpy()).pvalue) for a, b in statistics]
    proofs.p_values(f"Wishart samples against sums of outer products, P = {P}, ν = {df}", p, draws)


@pytest.mark.parametrize(("P", "delta"), [(1, 3.0), (3, 2.5), (5, 8.0)])
def test_diagonal_of_an_inverse_wishart_is_inverse_gamma(P: int, delta: float, proofs: Proofs) -> None:
    """Under IW(δK, δ + P + 1) each G_tt is InvGamma((δ + 2)/2, δ k_tt/2), whatever P."""
    draws = proofs.size(8_000, 400_000)
    L = random_scale_tril(P, 3)
    G = InverseWishart(delta + P + 1, delta**0.5 * L).sample((draws,), generator=generator(3))
    k = (L @ L.mT).diagonal()
    p = []
    for t in range(P):
        law = scipy.stats.invgamma((delta + 2) / 2, scale=delta * k[t].item() / 2)
        p.append(float(scipy.stats.kstest(G[:, t, t].numpy(), law.cdf).pvalue))
    proofs.p_values(f"Diagonal of an inverse Wishart against the inverse Gamma, P = {P}", p, draws)


def test_inverse_of_an_inverse_wishart_is_wishart(proofs: Proofs) -> None:
    draws = proofs.size(8_000, 400_000)
    P, df, L = 3, 5, random_scale_tril(3, 4)
    G = InverseWishart(df, L).sample((draws,), generator=generator(4))
    inverse_scale = torch.linalg.inv(L @ L.mT)
    expected = np.asarray(scipy.stats.wishart(df, inverse_scale.numpy()).rvs(draws, random_state=0))
    ours = torch.linalg.inv(G).numpy()
    p = [float(scipy.stats.ks_2samp(ours[:, i, j], expected[:, i, j]).pvalue) for i in range(P) for j in range(i + 1)]
    proofs.p_values("Inverse of an inverse Wishart against SciPy's Wishart", p, draws)


# Randomness is explicit.


@pytest.mark.parametrize("family", ALL)
def test_a_generator_decides_everything(family: str) -> None:
    q = make(family, 3, 2, batch=(2,))
    torch.manual_seed(1)
    first = q.rsample((4,), generator=generator(0))
    torch.manual_seed(2)
    assert torch.equal(first, q.rsample((4,), generator=generator(0)))
    assert not torch.equal(first, q.rsample((4,), generator=generator(1)))
    assert torch.equal(q.sample((4,), generator=generator(0)), first)


@pytest.mark.parametrize("family", ALL)
def test_noise_is_data(family: str) -> None:
    q = make(family, 3, 2, batch=(2,))
    noise = q.draw_noise((4,), generator(0))
    first, again = q.rsample_bartlett(noise=noise), q.rsample_bartlett(noise=noise)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(first[0], q.rsample_bartlett((4,), generator(0))[0])


def test_no_replica_shifts_anothers_noise() -> None:
    """Two batches that differ in their first element only have equal second elements under one generator."""
    one, two = parameters("ab-gw", 4, 3, batch=(2,)), parameters("ab-gw", 4, 3, seed=50, batch=(2,))
    mixed = {k: torch.stack([two[k][0], v[1]]) if isinstance(v, Tensor) else v for k, v in one.items()}
    samples = [CLASSES["ab-gw"](**arguments).sample((6,), generator=generator(0)) for arguments in (one, mixed)]
    assert torch.equal(samples[0][:, 1], samples[1][:, 1])
    assert not torch.equal(samples[0][:, 0], samples[1][:, 0])


@pytest.mark.parametrize("family", ALL)
def test_F_is_a_factor_of_the_sample(family: str) -> None:
    q = make(family, 4, 3)
    _, F = q.rsample_bartlett((5,), generator(0))
    assert F.shape == (5, 4, 4 if family == "iw" else 3)
    torch.testing.assert_close(F @ F.mT, q.rsample((5,), generator(0)))


# Reparameterised gradients: their mean is the derivative of an expectation known in closed form.


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize(("P", "df"), [(1, 1), (2, 1), (3, 3), (2, 5)])
def test_reparameterised_gradients_against_finite_differences(family: str, P: int, df: int, proofs: Proofs) -> None:
    """∂/∂θ E[⟨C, G⟩ + ⟨D, G∘G⟩], the expectation from mean and variance, differentiated numerically."""
    if family == "iw":
        df += 4  # fourth moments must exist
    draws = proofs.size(20_000, 1_000_000)
    C, D = torch.randn(2, P, P, dtype=torch.float64, generator=generator(8))
    arguments = parameters(family, P, df)
    names = [name for name, value in arguments.items() if isinstance(value, Tensor)]

    def instance(values: dict[str, Tensor]) -> Any:
        return CLASSES[family](**{**arguments, **values}, validate_args=False)

    def expectation(values: dict[str, Tensor]) -> float:
        q = instance(values)
        return (C * q.mean + D * (q.variance + q.mean**2)).sum().item()

    copies = {name: arguments[name].expand(draws, *arguments[name].shape).clone().requires_grad_() for name in names}
    G = instance(copies).rsample(generator=generator(9))
    grads = torch.autograd.grad((C * G + D * G**2).sum(), list(copies.values()))
    z = []
    for name, grad in zip(names, grads, strict=True):
        for index in counts(name, arguments[name].shape).nonzero().tolist():
            per_sample = grad[(slice(None), *index)]
            expected = finite_difference(expectation, arguments[name], name, tuple(index))
            error = (per_sample.std() / draws**0.5).item()
            # torch's gamma gradient has a relative error of 7e-4 of its own.
            slack = 1e-3 * per_sample.abs().mean().item()
            z.append((abs(per_sample.mean().item() - expected) - slack) / error)
    assert max(z) < z_limit(len(z))


def finite_difference(
    function: Callable[[dict[str, Tensor]], float], tensor: Tensor, name: str, index: tuple[int, ...]
) -> float:
    step = 1e-5
    values = []
    for sign in (1, -1):
        moved = tensor.clone()
        moved[index] += sign * step
        values.append(function({name: moved}))
    return (values[0] - values[1]) / (2 * step)


def test_sample_does_not_track_gradients() -> None:
    L = random_scale_tril(3, 0).requires_grad_()
    assert not Wishart(2, L).sample().requires_grad
    assert Wishart(2, L).rsample().requires_grad

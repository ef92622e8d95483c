"""Densities against autodiff Jacobians, SciPy, the paper's own form, integrals and one another."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from torch import Tensor

from deepwishart.distributions import (
    ABGeneralizedWishart,
    AGeneralizedWishart,
    GeneralizedWishart,
    InverseWishart,
    Wishart,
)
from deepwishart.distributions.bartlett_wishart import BartlettWishart
from deepwishart.linalg import thin_cholesky
from tests.distributions.instances import (
    ALL,
    FAMILIES,
    POSTERIORS,
    SIZES,
    bartlett_parameters,
    free_coordinates,
    generator,
    make,
    make_bartlett,
    random_column_mixing,
    random_row_mixing,
    random_scale_tril,
    standard_parameters,
)
from tests.proofs import Proofs
from tests.reference import densities as reference

GRID = [(P, df) for P in range(1, 6) for df in (1, 2, 3, 4, 5, 7, 11)]


def log_abs_jacobian(distribution: BartlettWishart, T: Tensor) -> float:
    """log|∂(free coordinates of G)/∂(T_jj², T_ij)| by autodiff."""
    P, r = T.shape
    row, column = torch.tril_indices(P, r)
    on_diagonal = row == column
    A, B = distribution.rows.matrix, distribution.mix_columns(torch.eye(r, dtype=T.dtype))

    def gram(coordinates: Tensor) -> Tensor:
        entries = torch.where(on_diagonal, coordinates.clamp_min(0).sqrt(), coordinates)
        F = A @ torch.zeros(P, r, dtype=T.dtype).index_put((row, column), entries) @ B
        return free_coordinates(F @ F.mT, r)

    coordinates = torch.where(on_diagonal, T[row, column] ** 2, T[row, column])
    jacobian = torch.autograd.functional.jacobian(gram, coordinates)
    assert isinstance(jacobian, Tensor)
    return torch.linalg.slogdet(jacobian).logabsdet.item()


def bartlett_log_density(distribution: BartlettWishart, T: Tensor) -> float:
    b = distribution.bartlett
    return reference.log_bartlett(T, b.concentration, b.rate, b.loc, b.scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_prob_is_the_density_of_T_over_an_autodiff_jacobian(family: str, proofs: Proofs) -> None:
    errors = []
    for P, df in GRID:
        for seed in range(proofs.size(2, 40)):
            q = make_bartlett(family, P, df, seed=100 * seed)
            T, F = q.rsample_bartlett(generator=generator(seed))
            expected = bartlett_log_density(q, T) - log_abs_jacobian(q, T)
            for found in (q.log_prob(F @ F.mT), q.log_prob_bartlett(T, F)):
                errors.append(abs(found.item() - expected) / (1 + abs(expected)))
    proofs.record(
        f"log_prob of {family} against an autodiff Jacobian, 35 pairs (P, ν)",
        cases=len(errors),
        worst=max(errors),
        limit=1e-7,
        unit="relative error",
    )
    assert np.median(errors) < 1e-13


@pytest.mark.parametrize(("P", "nu"), [(2, 1), (3, 2), (4, 4), (3, 7), (5, 3)])
def test_the_papers_jacobians(P: int, nu: int) -> None:
    """O2023, eqs. 39–44, with absolute values, against autodiff."""
    r = min(nu, P)
    T = make_bartlett("gw", P, nu).rsample_bartlett()[0]
    L, A, B = random_scale_tril(P, 0), random_row_mixing(P, 1), random_column_mixing(r, 2)
    row, column = torch.tril_indices(P, r)

    def logdet(function: Callable[[Tensor], Tensor], start: Tensor) -> float:
        def on_coordinates(x: Tensor) -> Tensor:
            return free_coordinates(function(torch.zeros(P, r, dtype=x.dtype).index_put((row, column), x)), r)

        jacobian = torch.autograd.functional.jacobian(on_coordinates, start[row, column])
        assert isinstance(jacobian, Tensor)
        return torch.linalg.slogdet(jacobian).logabsdet.item()

    j = torch.arange(1, r + 1)
    square = (math.log(2) + (P - j + 1) * T.diagonal().log()).sum().item()
    assert logdet(lambda X: X @ X.mT, T) == pytest.approx(square, abs=1e-12)  # ΛΛᵀ
    powers = torch.arange(1, P + 1).clamp_max(nu)
    assert logdet(lambda X: L @ X, T) == pytest.approx((powers * L.diagonal().log()).sum().item(), abs=1e-12)
    assert logdet(lambda X: X @ B, T) == pytest.approx(((P - j + 1) * B.diagonal().abs().log()).sum().item(), abs=1e-12)
    # C ↦ A C Aᵀ: the Jacobians of T ↦ A T Tᵀ Aᵀ and T ↦ T Tᵀ differ by it.
    C, D = T @ T.mT, A @ T @ T.mT @ A.mT
    ratio = (nu - P - 1) / 2 * (torch.linalg.slogdet(C[:r, :r])[1] - torch.linalg.slogdet(D[:r, :r])[1])
    expected = nu * torch.linalg.slogdet(A).logabsdet + ratio
    assert logdet(lambda X: A @ X @ X.mT @ A.mT, T) - square == pytest.approx(expected.item(), abs=1e-9)


@pytest.mark.parametrize(("P", "df"), GRID)
def test_minor_free_densities_equal_the_papers(P: int, df: int) -> None:
    r = min(df, P)
    L, A, B = random_scale_tril(P, P), random_row_mixing(P, df), random_column_mixing(r, P + df)
    free = bartlett_parameters(P, df, 3)
    T = GeneralizedWishart(df, L, **free).rsample_bartlett()[0]
    log_q_T = reference.log_bartlett(T, *free.values())
    identity = torch.eye(r, dtype=torch.float64)
    cases = [
        (GeneralizedWishart(df, L, **free), L @ T, reference.log_gw(T, L, df, log_q_T)),
        (AGeneralizedWishart(df, A, **free), A @ T, reference.log_ab_gw(T, A, identity, df, log_q_T)),
        (ABGeneralizedWishart(df, A, B, **free), A @ T @ B, reference.log_ab_gw(T, A, B, df, log_q_T)),
    ]
    for q, F, expected in cases:
        assert q.log_prob(F @ F.mT).item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert q.log_prob_bartlett(T, F).item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def recover(q: BartlettWishart, G: Tensor) -> Tensor:
    """T from G, as log_prob does it."""
    phi, _ = thin_cholesky(G, q.rank)
    return q._unmix_columns(q.rows.unmix(phi)[0])


@pytest.mark.parametrize(("P", "df"), GRID)
def test_T_is_recovered_from_the_matrix(P: int, df: int) -> None:
    for family in POSTERIORS:
        q = make_bartlett(family, P, df, seed=P + 10 * df)
        T, F = q.rsample_bartlett()
        A, B = q.rows.matrix, q.mix_columns(torch.eye(q.rank, dtype=torch.float64))
        recovered = recover(q, F @ F.mT)
        torch.testing.assert_close(recovered, T, rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(recovered, reference.recover_bartlett(F @ F.mT, A, B, q.rank), rtol=1e-6, atol=1e-6)


def test_recovery_of_T_meets_the_condition_number_of_A_once() -> None:
    """At a condition number of 1e7 a Cholesky factor of A⁻¹GA⁻ᵀ has no digits left to speak of; ours has several."""
    P, df = 6, 3
    U, V = (torch.linalg.qr(torch.randn(P, P, dtype=torch.float64))[0] for _ in range(2))
    A = U * torch.logspace(0, -7, P, dtype=torch.float64) @ V
    q = AGeneralizedWishart(df, A, **bartlett_parameters(P, df, 0))
    T, F = q.rsample_bartlett()
    G, identity = F @ F.mT, torch.eye(df, dtype=torch.float64)
    ours = (recover(q, G) - T).abs().max().item()
    naive = (reference.recover_bartlett(G, A, identity, df) - T).abs().max().item()
    assert ours < 0.1 * naive


@pytest.mark.parametrize(("df", "P"), [(7, 3), (3, 3), (1, 1), (200, 4), (6, 6)])
def test_wishart_agrees_with_scipy(df: int, P: int) -> None:
    L = random_scale_tril(P, 0)
    dist = Wishart(df, L)
    G = dist.sample((5,))
    expected = [scipy.stats.wishart.logpdf(g.numpy(), df, (L @ L.mT).numpy()) for g in G]
    torch.testing.assert_close(dist.log_prob(G), torch.tensor(expected).reshape(5), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("P", "df"), GRID)
def test_wishart_agrees_with_the_singular_density(P: int, df: int) -> None:
    L = random_scale_tril(P, 1)
    G = Wishart(df, L).sample()
    expected = reference.log_wishart(G, L @ L.mT, df)
    assert Wishart(df, L).log_prob(G).item() == pytest.approx(expected, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize(("P", "df"), [(1, 1.5), (2, 1.3), (3, 7.25), (5, 40.0)])
def test_inverse_wishart_agrees_with_scipy(P: int, df: float) -> None:
    L = random_scale_tril(P, 2)
    dist = InverseWishart(df, L)
    N, F = dist.rsample_bartlett((5,))
    G = F @ F.mT
    expected = torch.tensor([scipy.stats.invwishart.logpdf(g.numpy(), df, (L @ L.mT).numpy()) for g in G]).reshape(5)
    torch.testing.assert_close(dist.log_prob(G), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(dist.log_prob_bartlett(N, F), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("P", "df"), GRID)
def test_reductions(P: int, df: int) -> None:
    """AB-GW → A-GW → GW → Wishart as B → I, A → lower with positive diagonal, T → standard."""
    r = min(df, P)
    L, A, free = random_scale_tril(P, 4), random_row_mixing(P, 5), bartlett_parameters(P, df, 6)
    identity = torch.eye(r, dtype=torch.float64)
    G = AGeneralizedWishart(df, A, **free).sample((3,))
    ab, a = ABGeneralizedWishart(df, A, identity, **free), AGeneralizedWishart(df, A, **free)
    torch.testing.assert_close(ab.log_prob(G), a.log_prob(G), rtol=1e-12, atol=1e-11)

    a_lower, gw = AGeneralizedWishart(df, L, **free), GeneralizedWishart(df, L, **free)
    torch.testing.assert_close(a_lower.log_prob(G), gw.log_prob(G), rtol=1e-9, atol=1e-9)

    standard = GeneralizedWishart(df, L, **standard_parameters(P, df))
    torch.testing.assert_close(standard.log_prob(G), Wishart(df, L).log_prob(G), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("P", "df"), [(3, 2), (4, 6)])
def test_a_lower_row_mixing_with_negative_diagonal_flips_loc(P: int, df: int) -> None:
    """A = L D with D = diag(±1) is GW with μ_ij flipped by d_i d_j."""
    L, free = random_scale_tril(P, 0), bartlett_parameters(P, df, 1)
    d = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)[:P]
    flipped = {**free, "loc": free["loc"] * d[:, None] * d[None, : min(df, P)]}
    G = Wishart(df, L).sample((4,))
    torch.testing.assert_close(
        AGeneralizedWishart(df, L * d, **free).log_prob(G),
        GeneralizedWishart(df, L, **flipped).log_prob(G),
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize(("P", "df"), [(2, 1), (3, 2), (4, 4), (3, 6)])
def test_column_scales_of_B_are_absorbed_by_T(P: int, df: int) -> None:
    """A diagonal B only rescales T's columns, whose signs G cannot see: (β/b², μ|b|, σ|b|)."""
    A, free = random_row_mixing(P, 0), bartlett_parameters(P, df, 1)
    b = random_column_mixing(min(df, P), 2).diagonal()
    absorbed = {**free, "rate": free["rate"] / b**2, "loc": free["loc"] * b.abs(), "scale": free["scale"] * b.abs()}
    G = AGeneralizedWishart(df, A, **free).sample((4,))
    torch.testing.assert_close(
        ABGeneralizedWishart(df, A, torch.diag(b), **free).log_prob(G),
        AGeneralizedWishart(df, A, **absorbed).log_prob(G),
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("family", ALL)
def test_normalised_in_one_dimension(family: str) -> None:
    q = make(family, 1, 3, validate_args=False)

    def density(log_g: float) -> float:
        g = torch.tensor([[math.exp(log_g)]], dtype=torch.float64)
        return math.exp(q.log_prob(g).item() + log_g)

    total, _ = scipy.integrate.quad(density, -40, 40, limit=400, epsabs=1e-13, points=[0.0])
    assert total == pytest.approx(1, abs=1e-11)


def smooth_instance(family: str, df: int) -> BartlettWishart:
    """P = 2 with concentrations large enough for a density without poles, so that sums over a grid converge."""
    q = make_bartlett(family, 2, df, seed=7)
    if family != "wishart":
        q.bartlett.concentration = q.bartlett.concentration + 2
    q._validate_args = False
    return q


@pytest.mark.parametrize("family", FAMILIES)
def test_normalised_at_rank_one(family: str) -> None:
    """P = 2, ν = 1: over G₁₁ and G₂₁, with w = G₂₁/√G₁₁ (the second feature)."""
    q = smooth_instance(family, 1)
    log_g = torch.linspace(-30, 7, 1501, dtype=torch.float64)
    w = torch.linspace(-25, 25, 1801, dtype=torch.float64)
    root = (log_g / 2).exp()[:, None]
    G11, G21, G22 = torch.broadcast_tensors(root**2, root * w, w**2)
    G = torch.stack([torch.stack([G11, G21], -1), torch.stack([G21, G22], -1)], -2)
    density = (q.log_prob(G) + log_g[:, None] + log_g[:, None] / 2).exp()
    total = density.sum() * (log_g[1] - log_g[0]) * (w[1] - w[0])
    assert total.item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("df", [2, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_normalised_at_full_rank(family: str, df: int) -> None:
    """P = 2, ν ≥ 2: over G₁₁, w = G₂₁/√G₁₁ and the Schur complement e."""
    q = smooth_instance(family, df)
    log_g = torch.linspace(-16, 6, 121, dtype=torch.float64)[:, None, None]
    w = torch.linspace(-14, 14, 141, dtype=torch.float64)[None, :, None]
    log_e = torch.linspace(-22, 6, 141, dtype=torch.float64)[None, None, :]
    root = (log_g / 2).exp()
    G11, G21, G22 = torch.broadcast_tensors(root**2, root * w, w**2 + log_e.exp())
    G = torch.stack([torch.stack([G11, G21], -1), torch.stack([G21, G22], -1)], -2)
    density = (q.log_prob(G) + 1.5 * log_g + log_e).exp()
    step = (log_g[1] - log_g[0]).item() * (w[0, 1] - w[0, 0]).item() * (log_e[0, 0, 1] - log_e[0, 0, 0]).item()
    # A Wishart of two degrees of freedom has 1.5e-5 of its mass beyond the grid.
    assert density.sum().item() * step == pytest.approx(1, abs=5e-5 if family == "wishart" else 1e-9)


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize(("P", "df"), SIZES)
def test_both_paths_agree(family: str, P: int, df: int) -> None:
    """log_prob recovers T from the matrix; log_prob_bartlett is given it."""
    q = make(family, P, df, batch=(3,))
    T, F = q.rsample_bartlett((4,))
    torch.testing.assert_close(q.log_prob(F @ F.mT), q.log_prob_bartlett(T, F), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("family", POSTERIORS)
@pytest.mark.parametrize(("P", "df"), [(1, 2), (3, 3), (2, 7)])
def test_a_density_of_full_rank_depends_on_T_but_not_on_df(family: str, P: int, df: int) -> None:
    """At r = P, ν cancels: the KL divergence between unequal df relies on it."""
    q, other = make(family, P, df, seed=3), make(family, P, df + 4, seed=3)
    G = q.sample((3,))
    torch.testing.assert_close(q.log_prob(G), other.log_prob(G), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_without_a_factor_has_nan_density_when_nothing_is_validated(family: str) -> None:
    q = make(family, 3, 3, validate_args=False)
    assert q.log_prob(-torch.eye(3, dtype=torch.float64)).isnan()

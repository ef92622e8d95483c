"""Closed-form KL divergences and the stable log-density ratio."""

import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.distributions import kl_divergence

from deepwishart.distributions import (
    ABGeneralizedWishart,
    AGeneralizedWishart,
    GeneralizedWishart,
    InverseWishart,
    Wishart,
    log_density_ratio,
)
from deepwishart.distributions.bartlett_wishart import BartlettWishart
from deepwishart.linalg import inverse_tril
from tests.distributions.instances import (
    CLASSES,
    FAMILIES,
    POSTERIORS,
    SIZES,
    bartlett_parameters,
    generator,
    make,
    make_bartlett,
    parameters,
    random_row_mixing,
    random_scale_tril,
    standard_parameters,
)
from tests.proofs import Proofs
from tests.reference.kl import kl_as_in_the_note

CONFIGURATIONS = [(2, 1), (3, 2), (4, 2), (3, 3), (2, 5), (5, 4)]


@pytest.mark.parametrize("family", POSTERIORS)
@pytest.mark.parametrize(("P", "df"), SIZES)
def test_log_density_ratio_is_the_difference_of_log_probs(family: str, P: int, df: int) -> None:
    q, p = make_bartlett(family, P, df), Wishart(df, random_scale_tril(P, 20))
    T, F = q.rsample_bartlett((50,))
    G = F @ F.mT
    torch.testing.assert_close(log_density_ratio(p, q, T, F), p.log_prob(G) - q.log_prob(G), rtol=1e-8, atol=1e-8)


def test_closed_form_kl_against_monte_carlo(proofs: Proofs) -> None:
    draws = proofs.size(20_000, 2_000_000)
    z = []
    for P, df in CONFIGURATIONS:
        for family in FAMILIES:
            q, p = make_bartlett(family, P, df, seed=13), Wishart(df, random_scale_tril(P, 14))
            ratio = log_density_ratio(p, q, *q.rsample_bartlett((draws,), generator(P)))
            z.append((kl_divergence(q, p) + ratio.mean()) / (ratio.std() / draws**0.5))
    proofs.z_scores("Closed-form KL against Monte Carlo, 24 configurations", torch.stack(z), draws)


@pytest.mark.parametrize("family", POSTERIORS)
@pytest.mark.parametrize(("P", "df"), [*SIZES, (20, 5), (12, 12)])
def test_closed_form_kl_term_by_term(family: str, P: int, df: int) -> None:
    """Against the same divergence written as five sums, without the cancellations made by hand."""
    q, L = make_bartlett(family, P, df), random_scale_tril(P, 20)
    assert kl_divergence(q, Wishart(df, L)).item() == pytest.approx(kl_as_in_the_note(q, L), rel=1e-11, abs=1e-10)


def test_importance_weights_average_to_one(proofs: Proofs) -> None:
    """E_Q[P/Q] = 1, with P close enough to Q for the weights to have a variance."""
    draws = proofs.size(20_000, 2_000_000)
    z = []
    for P, df in [(2, 1), (3, 2), (3, 3), (2, 5)]:
        for family in POSTERIORS:
            q = near_wishart(family, P, df)
            p = Wishart(df, 0.9 * random_scale_tril(P, 1))
            weights = log_density_ratio(p, q, *q.rsample_bartlett((draws,), generator(df))).exp()
            z.append((weights.mean() - 1) / (weights.std() / draws**0.5))
    proofs.z_scores("E_Q[P/Q] = 1, twelve configurations", torch.stack(z), draws)


def near_wishart(family: str, P: int, df: int) -> BartlettWishart:
    """A posterior a little broader than a Wishart, with some of every freedom that its family has."""
    free = standard_parameters(P, df)
    free["loc"] = 0.1 * bartlett_parameters(P, df, 5)["loc"]
    free["rate"] = 0.9 * free["rate"]
    free["scale"] = 1.1 * free["scale"]
    L = random_scale_tril(P, 1)
    turn = torch.linalg.matrix_exp(0.1 * torch.randn(P, P, dtype=torch.float64, generator=generator(3)))
    B = torch.eye(min(df, P), dtype=torch.float64) + 0.1 * torch.ones(min(df, P), min(df, P)).tril(-1)
    if family == "gw":
        return GeneralizedWishart(df, L, **free)
    if family == "a-gw":
        return AGeneralizedWishart(df, L @ turn, **free)
    return ABGeneralizedWishart(df, L @ turn, B, **free)


@pytest.mark.parametrize(("P", "df"), SIZES)
def test_kl_is_zero_between_equals(P: int, df: int) -> None:
    L = random_scale_tril(P, 0)
    equal = GeneralizedWishart(df, L, **standard_parameters(P, df))
    assert kl_divergence(equal, Wishart(df, L)).item() == pytest.approx(0, abs=1e-11 * df)
    assert kl_divergence(Wishart(df, L), Wishart(df, L)).item() == pytest.approx(0, abs=1e-11 * df)


@pytest.mark.parametrize(("df1", "df0"), [(4, 4), (3, 7), (9, 5)])
def test_kl_of_wisharts_against_the_textbook(df1: int, df0: int) -> None:
    """Full rank, equal and unequal df: the known divergence between two Wisharts."""
    P = 3
    L1, L0 = random_scale_tril(P, 1), random_scale_tril(P, 2)
    S1, S0 = L1 @ L1.mT, L0 @ L0.mT
    nu1 = torch.tensor(df1 / 2, dtype=torch.float64)
    nu0 = torch.tensor(df0 / 2, dtype=torch.float64)
    mvdigamma = torch.digamma(nu1 - torch.arange(P, dtype=torch.float64) / 2).sum()
    expected = (
        0.5 * df0 * (torch.logdet(S0) - torch.logdet(S1))
        + 0.5 * df1 * (torch.trace(torch.linalg.solve(S0, S1)) - P)
        + torch.mvlgamma(nu0, P)
        - torch.mvlgamma(nu1, P)
        + (nu1 - nu0) * mvdigamma
    )
    torch.testing.assert_close(kl_divergence(Wishart(df1, L1), Wishart(df0, L0)), expected, rtol=1e-11, atol=1e-11)


def test_kl_of_inverse_wisharts_equals_that_of_their_inverses() -> None:
    """KL does not change under G ↦ G⁻¹, so an integer df has an answer from the Wishart."""
    P = 3
    for df1, df0 in [(4, 4), (3, 7), (9, 5)]:
        L1, L0 = random_scale_tril(P, 1), random_scale_tril(P, 2)
        inverse = [torch.linalg.cholesky(torch.linalg.inv(L @ L.mT)) for L in (L1, L0)]
        expected = kl_divergence(Wishart(df1, inverse[0]), Wishart(df0, inverse[1]))
        found = kl_divergence(InverseWishart(df1, L1), InverseWishart(df0, L0))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", POSTERIORS)
def test_kl_at_unequal_df_against_monte_carlo(family: str, proofs: Proofs) -> None:
    """Both of full rank: the degrees of freedom of q do not matter."""
    draws = proofs.size(20_000, 1_000_000)
    z = []
    for df1, df0 in [(3, 6), (8, 4)]:
        q, p = make_bartlett(family, 3, df1), Wishart(df0, random_scale_tril(3, 5))
        G = q.sample((draws,), generator=generator(df1))
        ratio = q.log_prob(G) - p.log_prob(G)
        z.append((kl_divergence(q, p) - ratio.mean()) / (ratio.std() / draws**0.5))
    proofs.z_scores(f"KL of {family} against a Wishart of other df, by Monte Carlo", torch.stack(z), draws)


@pytest.mark.parametrize(("P", "df1", "df0"), [(1, 2.5, 1.5), (3, 6.25, 4.5), (4, 5.0, 9.75)])
def test_log_density_ratio_of_inverse_wisharts_against_scipy(P: int, df1: float, df0: float) -> None:
    L1, L0 = random_scale_tril(P, 3), random_scale_tril(P, 4)
    q, p = InverseWishart(df1, L1), InverseWishart(df0, L0)
    N, F = q.rsample_bartlett((5,))
    expected = [
        scipy.stats.invwishart.logpdf(G.numpy(), df0, (L0 @ L0.mT).numpy())
        - scipy.stats.invwishart.logpdf(G.numpy(), df1, (L1 @ L1.mT).numpy())
        for G in F @ F.mT
    ]
    found = log_density_ratio(p, q, N, F)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64).reshape(5), rtol=1e-9, atol=1e-9)


def test_kl_of_inverse_wisharts_against_monte_carlo(proofs: Proofs) -> None:
    draws = proofs.size(20_000, 1_000_000)
    z = []
    for P, df1, df0 in [(1, 2.5, 1.5), (3, 6.25, 4.5), (4, 5.0, 9.75)]:
        q, p = InverseWishart(df1, random_scale_tril(P, 3)), InverseWishart(df0, random_scale_tril(P, 4))
        G = q.sample((draws,), generator=generator(P))
        ratio = q.log_prob(G) - p.log_prob(G)
        z.append((kl_divergence(q, p) - ratio.mean()) / (ratio.std() / draws**0.5))
    proofs.z_scores("Closed-form KL of inverse Wisharts against Monte Carlo", torch.stack(z), draws)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_caller_has_changes_nothing(family: str) -> None:
    """scale_tril_inverse and row_mixing_logabsdet only save work."""
    q, L = make_bartlett(family, 4, 3), random_scale_tril(4, 9)
    with_inverse = Wishart(3, L, scale_tril_inverse=inverse_tril(L))
    torch.testing.assert_close(kl_divergence(q, with_inverse), kl_divergence(q, Wishart(3, L)))
    G = with_inverse.sample()
    torch.testing.assert_close(with_inverse.log_prob(G), Wishart(3, L).log_prob(G))
    A, free = random_row_mixing(4, 0), bartlett_parameters(4, 3, 1)
    known = AGeneralizedWishart(3, A, **free, row_mixing_logabsdet=torch.linalg.slogdet(A).logabsdet)
    torch.testing.assert_close(known.log_prob(G), AGeneralizedWishart(3, A, **free).log_prob(G))
    torch.testing.assert_close(
        kl_divergence(known, with_inverse), kl_divergence(AGeneralizedWishart(3, A, **free), with_inverse)
    )


def test_kl_broadcasts() -> None:
    q, p = make("ab-gw", 3, 2, batch=(5, 1)), make("wishart", 3, 2, batch=(4,))
    kl = kl_divergence(q, p)
    assert kl.shape == (5, 4)
    one = kl_divergence(make("ab-gw", 3, 2, batch=(5, 1)).expand((5, 4)), p.expand((5, 4)))
    torch.testing.assert_close(kl, one)


def test_different_ranks_and_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one rank.*rank=2.*rank=3.*same df"):
        kl_divergence(make("gw", 3, 2), make("wishart", 3, 3))
    with pytest.raises(ValueError, match="one size"):
        kl_divergence(make("gw", 3, 2), make("wishart", 4, 2))
    with pytest.raises(ValueError, match="one size"):
        kl_divergence(make("iw", 3, 2), make("iw", 4, 2))
    with pytest.raises(ValueError, match="one dtype"):
        kl_divergence(make("iw", 3, 2), make("iw", 3, 2, dtype=torch.float32))
    with pytest.raises(ValueError, match=r"must broadcast, got \(2,\) and \(3,\)"):
        kl_divergence(make("a-gw", 3, 2, batch=(2,)), make("wishart", 3, 2, batch=(3,)))
    q, p = make("gw", 3, 2), make("wishart", 3, 2)
    with pytest.raises(ValueError, match="p must be a Wishart"):
        log_density_ratio(q, p, *q.rsample_bartlett())


@pytest.mark.parametrize(("P", "df"), [(40, 5), (100, 10)])
def test_the_ratio_keeps_more_digits_in_float32_than_two_log_probs(P: int, df: int) -> None:
    """Median error over twenty draws, against float64, on a smooth kernel: at least twice smaller."""
    x = torch.linspace(0, 3, P, dtype=torch.float64)
    L64 = torch.linalg.cholesky((-0.5 * (x[:, None] - x) ** 2).exp() + 1e-2 * torch.eye(P, dtype=torch.float64))
    free64 = bartlett_parameters(P, df, 1)

    def both(dtype: torch.dtype, noise: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        free = {name: value.to(dtype) for name, value in free64.items()}
        q = GeneralizedWishart(df, L64.to(dtype), **free, validate_args=False)
        p = Wishart(df, L64.to(dtype), validate_args=False)
        T, F = (x.to(dtype) for x in noise)
        G = F @ F.mT
        return log_density_ratio(p, q, T, F).double(), (p.log_prob(G) - q.log_prob(G)).double()

    pair = GeneralizedWishart(df, L64, **free64).rsample_bartlett((20,))
    exact, _ = both(torch.float64, pair)
    ratio, separate = both(torch.float32, pair)
    assert (ratio - exact).abs().median() * 2 < (separate - exact).abs().median()


def test_kl_gradients_by_gradcheck() -> None:
    P, df = 3, 2
    names = ["row_mixing", "column_mixing", *bartlett_parameters(P, df, 0)]
    arguments = parameters("ab-gw", P, df)
    tensors = tuple(arguments[name].requires_grad_() for name in names)
    L = random_scale_tril(P, 5).requires_grad_()

    def kl(*values: Tensor) -> Tensor:
        q = CLASSES["ab-gw"](df, **dict(zip(names, values[:-1], strict=True)), validate_args=False)
        return kl_divergence(q, Wishart(df, values[-1].tril(), validate_args=False))

    assert torch.autograd.gradcheck(kl, (*tensors, L))

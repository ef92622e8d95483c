"""Means and variances against reductions, SciPy and Monte Carlo."""

import mpmath
import pytest
import scipy.stats
import torch

from deepwishart.distributions import GeneralizedWishart, InverseWishart, Wishart
from deepwishart.distributions.bartlett import root_gamma_moments
from tests.distributions.instances import (
    ALL,
    POSTERIORS,
    SIZES,
    generator,
    make,
    make_bartlett,
    random_scale_tril,
    standard_parameters,
)
from tests.proofs import Proofs
from tests.reference.moments import gram_moments


def test_cumulants_of_the_root_of_a_gamma_against_scipy() -> None:
    """√Gamma(α, β) is a generalised Gamma with power 2."""
    for alpha in (0.1, 0.5, 1.0, 3.7, 20.0):
        for beta in (0.5, 2.0):
            moments = root_gamma_moments(*torch.tensor([alpha, beta], dtype=torch.float64))
            mean, variance, skew, kurtosis = scipy.stats.gengamma(alpha, 2, scale=beta**-0.5).stats("mvsk")
            expected = (mean, variance, skew * variance**1.5, kurtosis * variance**2)
            for found, value in zip(moments, expected, strict=True):
                assert found.item() == pytest.approx(float(value), rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cumulants_keep_their_digits_at_any_concentration(dtype: torch.dtype) -> None:
    """Against 60-digit arithmetic, on both sides of the switch to the series, and where α − w² would lose all."""
    tolerance = 1e-10 if dtype == torch.float64 else 1e-6
    for alpha in (1e-6, 0.05, 1.0, 10.0, 31.9, 32.0, 33.0, 500.0, 1e6, 1e9):
        given = torch.tensor(alpha, dtype=dtype)
        moments = root_gamma_moments(given, torch.ones_like(given))
        with mpmath.workdps(60):
            a = mpmath.mpf(given.item())
            m1, m3 = (mpmath.gammaprod([a + mpmath.mpf(k) / 2], [a]) for k in (1, 3))
            m2, m4 = a, a * (a + 1)
            variance = m2 - m1**2
            third = m3 - 3 * m1 * m2 + 2 * m1**3
            fourth = m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4 - 3 * variance**2
        assert moments.mean.item() == pytest.approx(float(m1), rel=tolerance)
        assert moments.variance.item() == pytest.approx(float(variance), rel=tolerance)
        # The higher two enter Var[G] beside terms of the order of α.
        assert moments.third.item() == pytest.approx(float(third), rel=tolerance, abs=tolerance)
        assert moments.fourth.item() == pytest.approx(float(fourth), rel=tolerance, abs=tolerance * max(alpha, 1))


def test_gradients_of_the_cumulants_by_gradcheck() -> None:
    alpha = torch.tensor([0.2, 5.0, 31.0, 33.0, 400.0], dtype=torch.float64, requires_grad=True)
    rate = torch.tensor([0.5, 1.0, 2.0, 0.7, 3.0], dtype=torch.float64, requires_grad=True)
    # The numerical side needs the slack: a difference of fourth cumulants just below the switch is mostly rounding.
    assert torch.autograd.gradcheck(lambda a, b: tuple(root_gamma_moments(a, b)), (alpha, rate), atol=5e-5)


@pytest.mark.parametrize(("P", "df"), SIZES)
def test_standard_parameters_give_the_wisharts_moments(P: int, df: int) -> None:
    L = random_scale_tril(P, 0)
    q, wishart = GeneralizedWishart(df, L, **standard_parameters(P, df)), Wishart(df, L)
    torch.testing.assert_close(q.mean, wishart.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(q.variance, wishart.variance, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("P", "df"), [(1, 1), (3, 3), (2, 7)])
def test_wishart_moments_agree_with_scipy(P: int, df: int) -> None:
    L = random_scale_tril(P, 1)
    expected = scipy.stats.wishart(df, (L @ L.mT).numpy())
    torch.testing.assert_close(Wishart(df, L).mean, torch.as_tensor(expected.mean()).reshape(P, P))
    torch.testing.assert_close(Wishart(df, L).variance, torch.as_tensor(expected.var()).reshape(P, P))


@pytest.mark.parametrize(("P", "df"), [(1, 5.0), (3, 7.5), (2, 40.0)])
def test_inverse_wishart_moments_agree_with_scipy(P: int, df: float) -> None:
    L = random_scale_tril(P, 2)
    expected = scipy.stats.invwishart(df, (L @ L.mT).numpy())
    torch.testing.assert_close(InverseWishart(df, L).mean, torch.as_tensor(expected.mean()).reshape(P, P))
    torch.testing.assert_close(InverseWishart(df, L).variance, torch.as_tensor(expected.var()).reshape(P, P))


def test_moments_that_do_not_exist_are_nan() -> None:
    L = random_scale_tril(3, 0)
    dist = InverseWishart(torch.tensor([3.5, 5.0, 7.0], dtype=torch.float64), L)
    assert dist.mean.isnan().all(-1).all(-1).tolist() == [True, False, False]
    assert dist.variance.isnan().all(-1).all(-1).tolist() == [True, True, False]


@pytest.mark.parametrize("family", POSTERIORS)
@pytest.mark.parametrize(("P", "df"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_mean_and_variance_against_multiplying_everything_out(family: str, P: int, df: int) -> None:
    q = make_bartlett(family, P, df, seed=21)
    b = q.bartlett
    raw = {}
    for j in range(q.rank):
        root = scipy.stats.gengamma(b.concentration[j].item(), 2, scale=b.rate[j].item() ** -0.5)
        raw[j, j] = [float(root.moment(k)) for k in range(5)]
        for i in range(j + 1, P):
            normal = scipy.stats.norm(b.loc[i, j].item(), b.scale[i, j].item())
            raw[i, j] = [float(normal.moment(k)) for k in range(5)]
    B = q.mix_columns(torch.eye(q.rank, dtype=torch.float64))
    mean, variance = gram_moments(q.rows.matrix.numpy(), B.numpy(), raw)
    torch.testing.assert_close(q.mean, torch.from_numpy(mean), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(q.variance, torch.from_numpy(variance), rtol=1e-9, atol=1e-9)


def test_mean_and_variance_against_monte_carlo(proofs: Proofs) -> None:
    draws = proofs.size(40_000, 4_000_000)
    mean_z, variance_z = [], []
    for P, df in [(1, 1), (2, 1), (3, 2), (3, 3), (2, 5), (4, 3)]:
        for family in (*POSTERIORS, "wishart"):
            q = make_bartlett(family, P, df, seed=11)
            G = q.sample((draws,), generator=generator(P + df))
            deviation = (G - q.mean) ** 2
            mean_z.append(((G.mean(0) - q.mean) / (q.variance / draws).sqrt()).flatten())
            variance_z.append(((deviation.mean(0) - q.variance) / (deviation.std(0) / draws**0.5)).flatten())
    proofs.z_scores("Closed-form mean against Monte Carlo, every entry of G", torch.cat(mean_z), draws)
    proofs.z_scores("Closed-form variance against Monte Carlo, every entry of G", torch.cat(variance_z), draws)


@pytest.mark.parametrize("family", ALL)
def test_moments_have_the_batch_shape(family: str) -> None:
    q = make(family, 3, 2, batch=(4,)).expand((5, 4))
    assert q.mean.shape == q.variance.shape == q.stddev.shape == (5, 4, 3, 3)
    alone = make(family, 3, 2, batch=(4,))
    torch.testing.assert_close(q.variance[1], alone.variance)

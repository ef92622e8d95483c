"""The corners: P = 1, ν = 1, ν = P − 1, ν = P, ν ≫ P, and sizes that a model would use."""

import numpy as np
import pytest
import scipy.stats
import torch
from torch.distributions import kl_divergence

from deepwishart.distributions import ABGeneralizedWishart, AGeneralizedWishart, Wishart
from tests.distributions.instances import (
    ALL,
    FAMILIES,
    bartlett_parameters,
    make,
    make_bartlett,
    random_row_mixing,
    random_scale_tril,
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("P", "df"), [(1, 1), (1, 50), (5, 1), (5, 4), (5, 5), (3, 2000), (100, 10), (12, 12)])
def test_everything_is_finite(family: str, P: int, df: int) -> None:
    q, p = make_bartlett(family, P, df), Wishart(df, random_scale_tril(P, 1))
    G = q.sample((3,))
    assert q.log_prob(G).isfinite().all()
    assert q.mean.isfinite().all()
    assert (q.variance > 0).all()
    assert kl_divergence(q, p) > 0


@pytest.mark.parametrize("df", [1, 3, 400])
def test_in_one_dimension_a_wishart_is_a_gamma(df: int) -> None:
    scale = 1.7
    dist = Wishart(df, torch.tensor([[scale**0.5]], dtype=torch.float64))
    expected = scipy.stats.gamma(df / 2, scale=2 * scale)
    G = dist.sample((50,))
    torch.testing.assert_close(dist.log_prob(G), torch.from_numpy(expected.logpdf(G[:, 0, 0].numpy())))
    assert dist.mean.item() == pytest.approx(expected.mean())
    assert dist.variance.item() == pytest.approx(expected.var())


@pytest.mark.parametrize("family", ["gw", "a-gw", "ab-gw"])
def test_in_one_dimension_every_family_is_a_gamma(family: str) -> None:
    """G = (a b)² g, whatever the signs of a and b."""
    q = make_bartlett(family, 1, 4)
    factor = (q.rows.matrix * q.mix_columns(torch.ones(1, 1, dtype=torch.float64))).item() ** 2
    alpha, beta = q.bartlett.concentration.item(), q.bartlett.rate.item()
    expected = scipy.stats.gamma(alpha, scale=factor / beta)
    G = q.sample((50,))
    torch.testing.assert_close(q.log_prob(G), torch.from_numpy(expected.logpdf(G[:, 0, 0].numpy())))


def test_at_one_degree_of_freedom_B_is_a_scale() -> None:
    P, b = 4, -1.7
    A, free = random_row_mixing(P, 0), bartlett_parameters(P, 1, 1)
    G = AGeneralizedWishart(1, A, **free).sample((5,))
    with_b = ABGeneralizedWishart(1, A, torch.tensor([[b]], dtype=torch.float64), **free)
    torch.testing.assert_close(with_b.log_prob(G), AGeneralizedWishart(1, abs(b) * A, **free).log_prob(G))


def test_a_wishart_of_many_degrees_of_freedom_is_narrow() -> None:
    df = 10**6
    dist = Wishart(df, torch.eye(3, dtype=torch.float64))
    G = dist.sample((200,)) / df
    assert (G - torch.eye(3, dtype=torch.float64)).abs().max() < 0.01
    assert dist.log_prob(df * G).isfinite().all()


@pytest.mark.parametrize("family", ALL)
def test_df_accepts_any_integer_type(family: str) -> None:
    q = make(family, 3, np.int64(2))  # type: ignore[arg-type]
    assert q.sample().shape == (3, 3)

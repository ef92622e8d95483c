"""The probability plot shows the distribution that it says it shows."""

from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

from deepwishart.distributions import AGeneralizedWishart
from deepwishart.experiments.probability_plot import (
    draw_probability_plot,
    exact_skewness,
    fit_gamma,
    top_left_elements,
)
from tests.proofs import Proofs


def test_samples_follow_the_definition(proofs: Proofs) -> None:
    """G₁₁ is g² under GW and (|g| + n)² under A-GW, with g ~ N(0, 1) and n ~ N(3, 1)."""
    draws = proofs.size(10_000, 1_000_000)
    samples = top_left_elements(draws, seed=3)
    rng = np.random.default_rng(0)
    g, n = np.abs(rng.standard_normal(draws)), rng.normal(3, 1, draws)
    p = [
        float(scipy.stats.kstest(samples["GW"], scipy.stats.chi2(1).cdf).pvalue),
        float(scipy.stats.ks_2samp(samples["A-GW"], (g + n) ** 2).pvalue),
    ]
    proofs.p_values("Samples of the probability plot against their definition", p, draws)
    signed = (rng.standard_normal(draws) + n) ** 2
    assert scipy.stats.ks_2samp(samples["A-GW"], signed).pvalue < 1e-6  # the paper's slip would be seen


def test_exact_skewness() -> None:
    """The figures of the erratum, and a Gamma's own for GW."""
    a_gw = exact_skewness(3, 1)
    assert a_gw.actual == pytest.approx(1.0511, abs=5e-5)
    assert a_gw.gamma == pytest.approx(1.1735, abs=5e-5)
    gw = exact_skewness(0, 0)
    assert gw.actual == pytest.approx(8**0.5)
    assert gw.gamma == pytest.approx(8**0.5)


def test_skewness_agrees_with_the_closed_form_moments() -> None:
    one = torch.full((1,), 0.5, dtype=torch.float64)
    ones = torch.ones(2, 1, dtype=torch.float64)
    A = torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    q = AGeneralizedWishart(1, A, one, one, 3 * ones, ones)
    expected = 2 * q.variance[0, 0].sqrt() / q.mean[0, 0]
    assert exact_skewness(3, 1).gamma == pytest.approx(expected.item())


def test_gw_lies_within_the_band_and_a_gw_does_not() -> None:
    samples = top_left_elements(10_000)
    outside = {}
    for name, values in samples.items():
        fit = fit_gamma(values)
        outside[name] = np.mean((fit.samples < fit.low) | (fit.samples > fit.high))
    assert outside["GW"] < 0.02
    assert outside["A-GW"] > 0.5


@pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
def test_pictures_of_every_format(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"plot.{ending}"
    draw_probability_plot(path, num_samples=300)
    assert path.stat().st_size > 10_000

"""Gamma variates from fixed noise: law, gradients, and independence of the noise from the parameters."""

import pytest
import scipy.stats
import torch

from deepwishart.distributions.gamma import GammaNoise, standard_gamma
from tests.distributions.instances import generator
from tests.proofs import Proofs

CONCENTRATIONS = (0.05, 0.3, 0.99, 1.0, 1.7, 12.0, 1e4)


def draw(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> GammaNoise:
    return GammaNoise.draw(torch.Size(shape), torch.empty((), dtype=dtype), generator(seed))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_law_is_gamma(dtype: torch.dtype, proofs: Proofs) -> None:
    draws = proofs.size(20_000, 2_000_000)
    p = []
    for seed, alpha in enumerate(CONCENTRATIONS):
        variates = standard_gamma(torch.tensor(alpha, dtype=dtype), draw((draws,), seed, dtype)).double().numpy()
        p.append(float(scipy.stats.kstest(variates, scipy.stats.gamma(alpha).cdf).pvalue))
    # float32 cannot hold the smallest of Gamma(0.05): what underflows is the dtype's business, not the sampler's.
    p = p if dtype == torch.float64 else p[1:]
    proofs.p_values(f"Gamma variates from fixed noise against SciPy's cdf, {str(dtype)[6:]}", p, draws)


def test_a_wrong_acceptance_rule_would_be_seen() -> None:
    """The test above has power: variates with every first proposal accepted fail it."""
    noise = draw((20_000,))
    always = noise._replace(uniform=torch.full_like(noise.uniform, 1e-300))
    variates = standard_gamma(torch.tensor(1.0, dtype=torch.float64), always).numpy()
    assert scipy.stats.kstest(variates, scipy.stats.gamma(1.0).cdf).pvalue < 1e-4


def test_gradients_against_finite_differences_of_the_quantile_function() -> None:
    """Implicit reparameterisation moves a variate along its quantile: ∂g/∂α at a fixed cdf."""
    alpha = torch.tensor([0.4, 1.3, 7.0, 80.0], dtype=torch.float64, requires_grad=True)
    g = standard_gamma(alpha, draw((50, 4)))
    (grad,) = torch.autograd.grad(g.sum(), alpha)
    step = 1e-5
    a, x = alpha.detach().numpy(), g.detach().numpy()
    level = scipy.stats.gamma(a).cdf(x)
    expected = (scipy.stats.gamma(a + step).ppf(level) - scipy.stats.gamma(a - step).ppf(level)) / (2 * step)
    torch.testing.assert_close(grad, torch.from_numpy(expected.sum(0)), rtol=2e-3, atol=0)


def test_noise_of_one_replica_does_not_depend_on_anothers_parameters() -> None:
    one, other = torch.tensor([0.2, 3.0]), torch.tensor([500.0, 3.0])
    noise = draw((1000, 2), dtype=torch.float32)
    assert torch.equal(standard_gamma(one, noise)[:, 1], standard_gamma(other, noise)[:, 1])


def test_nan_stays_nan_and_alone() -> None:
    g = standard_gamma(torch.tensor([float("nan"), 2.0]), draw((100, 2), dtype=torch.float32))
    assert g[:, 0].isnan().all()
    assert g[:, 1].isfinite().all()


def test_variates_are_positive_even_where_they_underflow() -> None:
    g = standard_gamma(torch.tensor(1e-3), draw((1000,), dtype=torch.float32))
    assert (g > 0).all()


def test_a_variate_with_every_proposal_rejected_is_the_mode_of_the_proposal() -> None:
    noise = draw((3,))
    refused = noise._replace(uniform=torch.ones_like(noise.uniform), normal=torch.full_like(noise.normal, -1e3))
    torch.testing.assert_close(
        standard_gamma(torch.tensor(2.0, dtype=torch.float64), refused),
        torch.full((3,), 2 - 1 / 3, dtype=torch.float64),
    )

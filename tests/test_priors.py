"""The deep Wishart process and the deep GP have one prior, seen from samples and through importance weights."""

import math
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor

from deepwishart.layers import WishartPosterior
from deepwishart.likelihoods import Gaussian
from deepwishart.models import (
    DeepKernelProcess,
)
from tests.distributions.instances import generator
from tests.layers.instances import perturb
from tests.model_instances import build, data, to_the_prior
from tests.proofs import Proofs


def prior_functions(
    method: str, widths: tuple[int, ...], draws: int, X: Tensor, seed: int, wrong_power: int = 0
) -> Tensor:
    """Latent functions at new points, jointly with nothing: each point's f given its own sample of Gram matrices."""
    Z = torch.randn(4, X.shape[-1], dtype=torch.float64, generator=generator(99))
    options = {"initialisation": "whitened"} if method not in ("dgp", "diwp") else {}
    model = build(method, Z, Z[:, :1], depth=len(widths) + 1, widths=widths, num_inducing=4, **options)
    to_the_prior(model)
    with torch.no_grad():
        for layer, width in zip(model.layers, widths, strict=True):
            layer.get_parameter("kernel.log_height").add_(0.5 * wrong_power * math.log(width))
        noise = model.draw_noise(draws, len(X), generator(seed))
        gram = model.input_gram(X)
        for layer, layer_noise in zip(model.layers, noise, strict=True):
            gram, _ = layer(gram, layer_noise)
        K = model.output.kernel(gram)
        # f at the first inducing point and at the first new one, from their joint law.
        ii, it, tt = K.ii[:, 0, 0], K.it[:, 0, 0], K.tt[:, 0]
        e = torch.randn(draws, 2, dtype=torch.float64, generator=generator(seed + 1))
        first = ii.sqrt() * e[:, 0]
        second = it / ii * first + (tt - it**2 / ii).clamp_min(0).sqrt() * e[:, 1]
    return torch.stack([first, second, gram.tt[:, 0], gram.it[:, 0, 0], gram.ii[:, 0, 1]], -1)


def statistics(draw: Tensor) -> list[Tensor]:
    f, g, tt, it, ii = draw.unbind(-1)
    return [f * g, (f - g).abs(), tt, it, ii]


@pytest.mark.parametrize("widths", [(2,), (3, 2), (6, 1, 3)])
def test_the_deep_wishart_process_has_the_deep_gps_prior(widths: tuple[int, ...], proofs: Proofs) -> None:
    draws = proofs.size(10_000, 400_000)
    X, _ = data(1, seed=5)
    gp = prior_functions("dgp", widths, draws, X, seed=1)
    p = []
    for method in ("gw", "a-gw", "ab-gw"):
        ours = prior_functions(method, widths, draws, X, seed=11)
        pairs = zip(statistics(ours), statistics(gp), strict=True)
        p += [float(scipy.stats.ks_2samp(a.numpy(), b.numpy()).pvalue) for a, b in pairs]
    proofs.p_values(f"Prior of the deep Wishart process against the deep GP's, widths {widths}", p, draws)


@pytest.mark.parametrize("power", [-1, 1])
@pytest.mark.parametrize("widths", [(2,), (3,), (3, 3)])
@pytest.mark.parametrize("method", ["gw", "ab-gw"])
def test_the_comparison_of_priors_rejects_a_wrong_power_of_the_width(
    method: str, widths: tuple[int, ...], power: int
) -> None:
    """1/ν twice, or left out, in every layer: every statistic sees it."""
    X, _ = data(1, seed=5)
    gp = prior_functions("dgp", widths, 20_000, X, seed=1)
    wrong = prior_functions(method, widths, 20_000, X, seed=11, wrong_power=power)
    pairs = list(zip(statistics(wrong), statistics(gp), strict=True))
    p = [float(scipy.stats.ks_2samp(a.numpy(), b.numpy()).pvalue) for a, b in pairs]
    assert max(p) < 1e-4, p


@pytest.mark.parametrize("initialisation", ["prior", "whitened"])
@pytest.mark.parametrize("widths", [(2, 5), (3, 1)])
def test_importance_sampling_from_the_posterior_finds_the_priors_evidence(
    widths: tuple[int, ...], initialisation: str, proofs: Proofs
) -> None:
    """E_Q[p(y | f) P/Q] is E_P[p(y | f)], whatever Q: the sampled KL of every layer closes the loop."""
    draws = proofs.size(20_000, 1_000_000)
    Z = torch.randn(3, 2, dtype=torch.float64, generator=generator(1))
    x, y = torch.tensor([[0.3, -0.2]], dtype=torch.float64), torch.tensor([[0.8]], dtype=torch.float64)
    estimates = []
    for method in ("dgp", "gw", "a-gw", "ab-gw"):
        options: dict[str, Any] = {"depth": 3, "widths": widths, "num_inducing": 3, "jitter": 0.3, "kl": "sampled"}
        if method != "dgp":
            options["initialisation"] = initialisation
        model = to_the_prior(build(method, Z, Z[:, :1], likelihood=Gaussian(0.25), **options))
        model.inducing_inputs.data.copy_(Z)
        if method != "dgp":
            for module in model.layers.modules():
                if isinstance(module, WishartPosterior):
                    perturb(module, 0.06, seed=3)
        with torch.no_grad():
            output = model(x, model.draw_noise(draws, 1, generator(7)))
            log_p = log_prob_of_samples(model, output.marginals, y)
            estimates.append((log_p - sum(output.kls)).exp())
    prior = estimates[0]
    z = []
    for estimate in estimates[1:]:
        error = ((prior.var() + estimate.var()) / draws).sqrt()
        assert error < 0.05 * prior.mean()
        z.append((estimate.mean() - prior.mean()) / error)
    proofs.z_scores(
        f"E_Q[p(y|f) P/Q] of whole models against the deep GP's prior, widths {widths}", torch.stack(z), draws
    )


def log_prob_of_samples(model: DeepKernelProcess, marginals: Any, y: Tensor) -> Tensor:
    """log p(y | G) of every sample."""
    components = model.likelihood.predict(marginals.mean, marginals.variance)
    return components.distribution.log_prob(y)[0, :, 0, 0]

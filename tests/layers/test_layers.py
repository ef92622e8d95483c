"""Hidden layers: their law at the prior, reductions, invariances, divergences."""

from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.distributions import kl_divergence

from deepwishart.distributions import InverseWishart, Wishart
from deepwishart.gram import AnyGram, Gram
from deepwishart.layers import INITIALISATIONS, WishartPosterior
from deepwishart.layers.base import remaining_variance
from deepwishart.layers.posterior import draw_together
from deepwishart.linalg import cholesky, column_norms
from tests.distributions.instances import generator
from tests.layers.instances import JITTER, METHODS, inputs, joint, make_layer, perturb
from tests.proofs import Proofs

M = 4
WIDTHS = (2, 4, 7)  # ν <, =, > M
WISHART = ("gw", "a-gw", "ab-gw")


def sample(layer: Any, gram: AnyGram, draws: int, seed: int, num_points: int | None = None) -> Any:
    """Many samples from one layer, each other point with its own noise."""
    points = gram.tt.shape[-1] if num_points is None else num_points
    batch = gram.ii.shape[:-2]
    with torch.no_grad():
        return layer(gram, layer.draw_noise(torch.Size((draws,)) + batch, points, generator(seed)))


def kernel_matrix(layer: Any, gram: AnyGram) -> Tensor:
    """K over all points, jitter included."""
    with torch.no_grad():
        K = joint(layer.kernel(gram))
    return K + JITTER * K[:M, :M].diagonal().mean() * torch.eye(M + 1, dtype=K.dtype)


def ks(ours: Tensor, theirs: Tensor) -> list[float]:
    """p-values of two-sample tests on entries and on statistics that mix the blocks."""

    def statistics(G: Tensor) -> list[Tensor]:
        ratio = G[:, M, M] / G[:, 0, 0]
        determinant = G[:, 0, 0] * G[:, M, M] - G[:, 0, M] ** 2  # of a minor that has rank two at every width here
        return [G[:, 0, 0], G[:, 0, 1], G[:, 0, M], G[:, M - 1, M], G[:, M, M], G.sum((-2, -1)), ratio, determinant]

    pairs = zip(statistics(ours), statistics(theirs), strict=True)
    return [float(scipy.stats.ks_2samp(a.numpy(), b.numpy()).pvalue) for a, b in pairs]


# The law of a layer whose posterior is its prior.


@pytest.mark.parametrize("df", WIDTHS)
@pytest.mark.parametrize("method", [*WISHART, "dgp"])
def test_at_the_prior_inducing_and_other_points_have_the_joint_wishart_law(
    method: str, df: int, proofs: Proofs
) -> None:
    """A Gaussian layer's Gram matrix too: the deep Wishart process and the deep GP have one prior."""
    draws = proofs.size(10_000, 500_000)
    gram = inputs(M, 1)
    layer = make_layer(method, gram, df)
    ours = joint(sample(layer, gram, draws, 1).gram)
    theirs = Wishart(df, torch.linalg.cholesky(kernel_matrix(layer, gram) / df)).sample((draws,), generator(2))
    proofs.p_values(
        f"{method} layer at the prior against the joint Wishart, M = {M}, ν = {df}", ks(ours, theirs), draws
    )


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("method", ["a-gw", "dgp"])
def test_the_comparison_sees_a_wrong_power_of_the_width(method: str, factor: float) -> None:
    """A layer with 1/ν twice, or without it, at ν = 2 is off by this factor."""
    gram = inputs(M, 1)
    layer = make_layer(method, gram, 2)
    ours = joint(sample(layer, gram, 10_000, 1).gram)
    wrong = Wishart(2, torch.linalg.cholesky(factor * kernel_matrix(layer, gram) / 2)).sample((10_000,), generator(2))
    p = ks(ours, wrong)
    assert max(p[0], p[2], p[4], p[5]) < 1e-6


def test_at_the_prior_inducing_and_other_points_have_the_joint_inverse_wishart_law(proofs: Proofs) -> None:
    draws = proofs.size(10_000, 500_000)
    gram = inputs(M, 1)
    layer = make_layer("diwp", gram, 0)
    with torch.no_grad():
        layer.V.zero_()
        layer.log_gamma.fill_(-40.0)
    ours = joint(sample(layer, gram, draws, 1).gram)
    delta = layer.log_delta.exp().item()
    scale = torch.linalg.cholesky(delta * kernel_matrix(layer, gram))
    theirs = InverseWishart(delta + M + 1 + 1, scale).sample((draws,), generator(2))
    proofs.p_values("diwp layer at the prior against the joint inverse Wishart", ks(ours, theirs), draws)


@pytest.mark.parametrize("batch_size", [1, 10, 100])
def test_the_inverse_wisharts_conditional_does_not_depend_on_the_batch_size(batch_size: int, proofs: Proofs) -> None:
    """Copies of one point in a batch of any size: each has the marginal InvGamma((δ + 2)/2, δ k_tt/2)."""
    draws = proofs.size(20_000, 500_000) // batch_size
    gram = inputs(M, 1)
    wide = Gram(gram.ii, gram.it.expand(M, batch_size), gram.tt.expand(batch_size))
    layer = make_layer("diwp", gram, 0)
    with torch.no_grad():
        layer.V.zero_()
        layer.log_gamma.fill_(-40.0)
    G_tt = sample(layer, wide, draws, 3).gram.tt
    delta, k = layer.log_delta.exp().item(), kernel_matrix(layer, gram)[M, M].item()
    law = scipy.stats.invgamma((delta + 2) / 2, scale=delta * k / 2)
    # Points of one draw share the inducing block: one of them is a fair sample.
    p = float(scipy.stats.kstest(G_tt[:, -1].numpy(), law.cdf).pvalue)
    proofs.p_values(f"diwp: marginal of a point in a batch of {batch_size}", [p], draws)


@pytest.mark.parametrize("jitter", [1e-6, 0.3])
def test_jitter_is_white_noise_on_ii_and_tt_but_not_between_them(jitter: float) -> None:
    K = make_layer("gw", inputs(M, 3), 3).kernel(inputs(M, 3))
    factor = cholesky(K.ii, torch.tensor(jitter, dtype=torch.float64))
    cross = factor.whiten(K.it)
    residual = remaining_variance(K.tt, factor.jitter[..., None], column_norms(cross))
    noise = jitter * K.ii.diagonal().mean()
    noisy = K.ii + noise * torch.eye(M, dtype=torch.float64)
    torch.testing.assert_close(factor.tril @ factor.tril.mT, noisy)
    torch.testing.assert_close(cross.mT @ cross, K.it.mT @ torch.linalg.solve(noisy, K.it))
    torch.testing.assert_close(residual, K.tt + noise - (K.it * torch.linalg.solve(noisy, K.it)).sum(0))


# Reductions.


@pytest.mark.parametrize("df", WIDTHS)
def test_a_gw_with_unit_mixing_is_gw_and_ab_gw_with_unit_columns_is_a_gw(df: int) -> None:
    gram = inputs(M, 5)
    gw, a_gw, ab_gw = (make_layer(method, gram, df) for method in WISHART)
    perturb(ab_gw, seed=1)
    for simpler in (gw, a_gw):
        shared = {k: v for k, v in ab_gw.state_dict().items() if k in simpler.state_dict()}
        simpler.load_state_dict(shared)
    with torch.no_grad():
        ab_gw.posterior.columns.zero_()
    noise = gw.draw_noise(torch.Size((3,)), 5, generator(0))
    assert_same(ab_gw(gram, noise), a_gw(gram, noise))
    with torch.no_grad():
        a_gw.posterior.rows.zero_()
    assert_same(a_gw(gram, noise), gw(gram, noise))


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip((*one.gram, one.kl), (*other.gram, other.kl), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_mixing_cannot_become_singular() -> None:
    posterior = WishartPosterior("ab-gw", 3, torch.eye(5, dtype=torch.float64))
    perturb(posterior, 3.0)
    torch.testing.assert_close(torch.linalg.det(posterior.row_mixing).abs().item(), 1.0, rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.linalg.det(posterior.column_mixing).item(), 1.0, rtol=1e-9, atol=0)


def test_rows_are_mixed_by_a_lower_times_an_upper_matrix_and_columns_by_a_lower_one() -> None:
    """Entry by entry: A′ is no triangular matrix, which would make A-GW a GW."""
    posterior = WishartPosterior("ab-gw", 3, torch.eye(4, dtype=torch.float64))
    perturb(posterior, 0.5)
    rows, columns = posterior.rows.detach() / 2, posterior.columns.detach()  # A′ is learned in units of 1/√M
    A, B = posterior.row_mixing, posterior.column_mixing
    assert A is not None
    assert B is not None
    for i in range(4):
        for j in range(4):
            lower = [rows[i, k].item() if k < i else float(k == i) for k in range(4)]
            upper = [rows[k, j].item() if k < j else float(k == j) for k in range(4)]
            expected = sum(a * b for a, b in zip(lower, upper, strict=True))
            assert A[i, j].item() == pytest.approx(expected)
    for i in range(3):
        for j in range(3):
            expected = columns[i, j].item() if j < i else float(i == j)
            assert B[i, j].item() == pytest.approx(expected)


# Invariances.


@pytest.mark.parametrize("method", METHODS)
def test_a_point_does_not_depend_on_its_batch_under_shared_noise(method: str) -> None:
    gram = inputs(M, 7)
    layer = make_layer(method, gram, 3)
    perturb(layer)
    noise = layer.draw_noise(torch.Size((3,)), 1, generator(0))
    whole = layer(gram, noise)
    for size in (1, 3, 7):
        part = layer(Gram(gram.ii, gram.it[:, :size], gram.tt[:size]), noise)
        torch.testing.assert_close(part.gram.it, whole.gram.it[..., :size], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(part.gram.tt, whole.gram.tt[..., :size], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(part.kl, whole.kl)


@pytest.mark.parametrize("method", METHODS)
def test_replicas_are_independent_models(method: str) -> None:
    """Two replicas in one pass equal each alone, under the same noise."""
    gram = inputs(M, 5, batch=(2,))
    layer = make_layer(method, gram, 3)
    perturb(layer)
    noise = layer.draw_noise(torch.Size((3, 2)), 5, generator(0))
    together = layer(gram, noise)
    for r in range(2):
        alone = make_layer(method, Gram(*(block[r] for block in gram)), 3)
        alone.load_state_dict({name: value[r] for name, value in layer.state_dict().items()})
        single = alone(Gram(*(block[r] for block in gram)), replica_of(noise, r))
        for a, b in zip(single.gram, together.gram, strict=True):
            torch.testing.assert_close(a, b[:, r], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(single.kl, together.kl[..., r], rtol=1e-10, atol=1e-10)


def replica_of(noise: Any, r: int) -> Any:
    """The noise of one replica: the second dimension, or the third where proposals come first."""
    if isinstance(noise, Tensor):
        return noise[:, r]
    if type(noise).__name__ == "GammaNoise":
        return type(noise)(noise.normal[:, :, r], noise.uniform[:, :, r], noise.boost[:, r])
    return type(noise)(*(replica_of(part, r) for part in noise))


@pytest.mark.parametrize("method", METHODS)
def test_the_first_layers_divergence_needs_no_samples(method: str) -> None:
    gram = inputs(M, 5)
    layer = make_layer(method, gram, 3)
    first = layer(gram, layer.draw_noise(torch.Size((6,)), 5, generator(0)))
    assert first.kl.shape == ()
    assert first.gram.ii.shape == (6, M, M)
    second = layer(first.gram, layer.draw_noise(torch.Size((6,)), 5, generator(1)))
    assert second.kl.shape == (6,)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("method", METHODS)
def test_every_parameter_has_a_finite_gradient(method: str, dtype: torch.dtype) -> None:
    gram = inputs(20, 10, dtype=dtype)
    layer = make_layer(method, gram, 3)
    with torch.no_grad():
        layer.jitter.fill_(1e-3)
    output = layer(gram, layer.draw_noise(torch.Size((2,)), 10, generator(0)))
    again = layer(output.gram, layer.draw_noise(torch.Size((2,)), 10, generator(1)))
    loss = output.kl.mean() + again.kl.mean() + again.gram.it.sum() + again.gram.tt.sum()
    for name, parameter in layer.named_parameters():
        (grad,) = torch.autograd.grad(loss, parameter, retain_graph=True)
        assert grad.isfinite().all(), name
        assert grad.abs().sum() > 0, name


# Divergences.


@pytest.mark.parametrize("method", METHODS)
def test_three_estimators_of_the_divergence_agree(method: str, proofs: Proofs) -> None:
    """In expectation, and so do their gradients, whose first two moments are reported."""
    draws, passes = proofs.size(4_000, 400_000), proofs.size(100, 4_000)
    gram = inputs(M, 1)
    values, gradients = {}, {}
    for kl in ("closed-form", "sampled", "path-derivative"):
        layer = make_layer(method, gram, 3, kl=kl)
        if method == "dgp":
            with torch.no_grad():
                layer.posterior.log_precision.zero_()
        perturb(layer, 0.2, seed=5)
        values[kl] = sample(layer, gram, draws, 6).kl
        gradients[kl] = torch.stack([divergence_gradient(layer, gram, seed) for seed in range(passes)])
    exact, reference = values["closed-form"], gradients["closed-form"][0]
    z = [(values[kl].mean() - exact) / (values[kl].std() / draws**0.5) for kl in ("sampled", "path-derivative")]
    proofs.z_scores(f"{method}: sampled divergences against the closed form", torch.stack(z), draws)
    for kl in ("sampled", "path-derivative"):
        spread = gradients[kl].std(0) / passes**0.5
        # torch's gamma gradient has a relative error of 7e-4 of its own.
        error = (gradients[kl].mean(0) - reference) / (spread + 1e-9 + 1e-3 * reference.abs())
        assert error.abs().max() < 6, kl
    rows = [["closed-form", f"{reference.norm():.3g}", "0", "0"]]
    for kl in ("sampled", "path-derivative"):
        mean, spread = gradients[kl].mean(0).norm(), gradients[kl].std(0).norm()
        rows.append([kl, f"{mean:.3g}", f"{spread:.3g}", f"{values[kl].std():.3g}"])
    proofs.report(
        f"Gradients of the divergence of a {method} layer, M = {M}, ν = 3, one sample, {passes:,} passes",
        ["estimator", "norm of the mean", "norm of the standard deviation", "standard deviation of the value"],
        rows,
    )


@pytest.mark.parametrize("initialisation", ["prior", "whitened", "authors"])
@pytest.mark.parametrize("df", [1, 4, 7])
@pytest.mark.parametrize("kl", ["sampled", "path-derivative"])
def test_the_estimators_agree_at_any_width_and_initialisation(kl: str, df: int, initialisation: str) -> None:
    gram, draws = inputs(M, 1), 4_000
    values = []
    for estimator in ("closed-form", kl):
        layer = make_layer("ab-gw", gram, df, initialisation, kl=estimator)
        perturb(layer, 0.2, seed=5)
        values.append(sample(layer, gram, draws, 6).kl)
    exact, sampled = values
    assert abs(sampled.mean() - exact) < 4.5 * sampled.std() / draws**0.5


@pytest.mark.parametrize("delta", [0.5, 4.0])
def test_the_inverse_wisharts_joint_law_at_other_delta(delta: float) -> None:
    """δ below and at M; and with a posterior that is not the prior, the conditional is still the prior's."""
    gram, draws = inputs(M, 1), 10_000
    layer = make_layer("diwp", gram, 0)
    with torch.no_grad():
        layer.log_delta.fill_(delta).log_()
        layer.log_gamma.fill_(1.0)
        layer.V.mul_(20.0)
    ours = sample(layer, gram, draws, 1)
    K = kernel_matrix(layer, gram)
    # Given the inducing block, weights h of the new point: mean K_ii⁻¹ k_it, and the residual's law.
    G_ii, G_it, G_tt = ours.gram
    h = torch.linalg.solve(G_ii, G_it)
    expected = torch.linalg.solve(K[:M, :M], K[:M, M:])
    z = (h.mean(0) - expected) / (h.std(0) / draws**0.5)
    assert z.abs().max() < 4.5
    residual = G_tt[:, 0] - (G_it * h).sum(-2)[:, 0]
    s = delta * (K[M, M] - (K[:M, M] * expected[:, 0]).sum()).item()
    law = scipy.stats.invgamma((delta + M + 2) / 2, scale=s / 2)
    assert scipy.stats.kstest(residual.numpy(), law.cdf).pvalue > 1e-4


def divergence_gradient(layer: Any, gram: AnyGram, seed: int) -> Tensor:
    """Of one pass with one sample, with respect to all parameters that it depends on."""
    kl = layer(gram, layer.draw_noise(torch.Size((1,)), 1, generator(1000 + seed))).kl.sum()
    grads = torch.autograd.grad(kl, list(layer.parameters()), allow_unused=True)
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


@pytest.mark.parametrize("name", ["prior", "whitened"])
@pytest.mark.parametrize("method", WISHART)
def test_initialisations_at_the_prior_have_no_divergence(method: str, name: str) -> None:
    gram = inputs(M, 1)
    layer = make_layer(method, gram, 3, name)
    kl = layer(gram, layer.draw_noise(torch.Size((2,)), 1, generator(0))).kl
    assert kl.item() == pytest.approx(0, abs=1e-9)


def test_the_whitened_posterior_has_no_divergence_whatever_lies_below() -> None:
    layer = make_layer("ab-gw", inputs(M, 1), 3, "whitened")
    other = inputs(M, 1, seed=9)
    kl = layer(other, layer.draw_noise(torch.Size((2,)), 1, generator(0))).kl
    assert kl.item() == pytest.approx(0, abs=1e-9)


def test_unknown_names_are_refused() -> None:
    gram = inputs(M, 1)
    with pytest.raises(ValueError, match=r"posterior must be gw, a-gw or ab-gw, got 'wishart'"):
        WishartPosterior("wishart", 3, torch.eye(3))
    with pytest.raises(ValueError, match=r"kl must be closed-form, sampled or path-derivative, got 'exact'"):
        make_layer("gw", gram, 3, kl="exact")


@pytest.mark.parametrize("start", ["authors", "prior"])
def test_posterior_is_the_papers(start: str) -> None:
    """Ψ = (1 − q) S + q V Vᵀ and A = chol(Ψ) A′, against dense algebra; V may have units of its own."""
    unit = torch.linalg.cholesky(joint(inputs(M - 1, 1, seed=5)) + torch.eye(M, dtype=torch.float64))
    posterior = WishartPosterior("ab-gw", 3, unit, INITIALISATIONS[start])
    perturb(posterior, 0.3)
    V = unit @ posterior.V if start == "prior" else posterior.V
    S = joint(inputs(M - 1, 1)) + torch.eye(M, dtype=torch.float64)
    q = posterior.q_logit.sigmoid()
    Psi = (1 - q) * S + q * V @ V.mT
    found = posterior(cholesky(S, jitter=0.0))
    torch.testing.assert_close(found.rows.matrix, torch.linalg.cholesky(Psi) @ posterior.row_mixing)
    torch.testing.assert_close(found.rows.logabsdet, torch.linalg.slogdet(found.rows.matrix).logabsdet)
    assert kl_divergence(found, Wishart(3, torch.linalg.cholesky(S))) > 0


def test_the_authors_start_is_narrow_and_away_from_the_prior() -> None:
    """μ ~ N(0, 1/ν), σ = e⁻³, V ~ N(0, 1/M) entry by entry, q = sigmoid(−4); α and β as in the prior."""
    size, df = 200, 8
    start = INITIALISATIONS["authors"]
    q = WishartPosterior("a-gw", df, torch.eye(size, dtype=torch.float64), start, generator=generator(0))
    below = torch.ones(size, df).tril(-1).bool()
    assert q.loc[below].std().item() == pytest.approx(df**-0.5, rel=0.1)
    assert q.V.std().item() == pytest.approx(size**-0.5, rel=0.02)
    assert q.log_scale.unique().item() == -3
    assert q.q_logit.sigmoid().item() == pytest.approx(0.018)
    torch.testing.assert_close(q.log_concentration.exp()[0].item(), df / 2)
    torch.testing.assert_close(q.log_rate.exp().unique().item(), 0.5)


@pytest.mark.parametrize("initialisation", ["prior", "whitened"])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_layers_drawn_together_are_those_drawn_alone(batch: tuple[int, ...], initialisation: str) -> None:
    gram = inputs(M, 2, batch=batch)
    layers = [make_layer("ab-gw", gram, 3, initialisation, is_first=k == 0) for k in range(3)]
    for k, layer in enumerate(layers):
        perturb(layer, seed=k)
    noise = [layer.draw_noise(torch.Size((2, *batch)), 2, generator(k)).inducing for k, layer in enumerate(layers)]
    together = draw_together([layer.posterior for layer in layers], noise)
    for layer, own, draw in zip(layers, noise, together, strict=True):
        for found, expected in zip(draw, layer.posterior.tensors.draw(own), strict=True):
            torch.testing.assert_close(found, expected)

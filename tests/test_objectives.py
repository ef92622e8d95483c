"""The ELBO and predictions: minibatches, rows, chunks, devices, and what does not fit."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map

from deepwishart import objectives
from deepwishart.likelihoods import Bernoulli, Categorical, HeteroscedasticGaussian, Poisson, StudentT
from deepwishart.models import (
    deep_wishart_process,
)
from deepwishart.objectives import (
    _chunk_size,
    _samples_by_pass,
    elbo,
    elbo_given_noise,
    predict,
    predict_in_chunks,
    predictive_log_likelihood,
)
from tests.distributions.instances import generator
from tests.layers.instances import perturb
from tests.model_instances import METHODS, build, data
from tests.proofs import Proofs


@pytest.mark.parametrize("method", METHODS)
def test_minibatches_are_unbiased(method: str, proofs: Proofs) -> None:
    """The mean over all batches of a partition has the full batch's expectation."""
    X, y = data(40)
    model = build(method, X, y, depth=2, num_inducing=8)
    perturb(model, 0.05)
    repeats = proofs.size(60, 600)
    differences = []
    for seed in range(repeats):
        full = elbo(model, X, y, num_samples=8, generator=generator(seed))
        parts = [
            elbo(model, X[b : b + 10], y[b : b + 10], num_data=40, num_samples=8, generator=generator(10_000 + seed))
            for b in range(0, 40, 10)
        ]
        differences.append((torch.stack(parts).mean() - full).detach())
    d = torch.stack(differences)
    proofs.z_scores(
        f"{method}: minibatch ELBO against the full batch", (d.mean() / (d.std() / repeats**0.5))[None], repeats
    )


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((method, {}) for method in METHODS),
        ("a-gw", {"initialisation": "whitened"}),
        ("a-gw", {"kernel": "matern-3/2"}),
        ("dgp", {"likelihood": HeteroscedasticGaussian()}),
        ("gw", {"likelihood": Categorical(3)}),
    ],
)
def test_rows_that_are_dealt_out_are_seen_by_one_sample_each(
    method: str, options: dict[str, Any], depth: int, batch: tuple[int, ...], is_weighted: bool
) -> None:
    X, y = data(15, batch=batch)
    y = y.round().clamp(0, 2) if isinstance(options.get("likelihood"), Categorical) else y
    weights = torch.rand(*batch, 15, dtype=X.dtype, generator=generator(1)) if is_weighted else None
    model = build(method, X, y, depth=depth, num_inducing=6, **options)
    perturb(model, 0.05)
    noise = model.draw_noise(5, 15, generator(2), deal_rows=True)
    found = elbo_given_noise(model, X, y, noise, 100, 0.7, weights, deal_rows=True)
    alone = []
    for sample in range(5):
        rows = slice(sample, None, 5)

        def its_own(values: Tensor, sample: int = sample, rows: slice = rows) -> Tensor:
            own = values.narrow(values.shape.index(5), sample, 1)  # nothing else is five
            return own[..., rows] if values.shape[-1] == 15 else own

        counts = None if weights is None else weights[..., rows]
        noise_of_it = tree_map(its_own, noise)
        alone.append(elbo_given_noise(model, X[..., rows, :], y[..., rows, :], noise_of_it, 100, 0.7, counts))
    torch.testing.assert_close(found, torch.stack(alone).mean(0), rtol=1e-10, atol=1e-10)


def test_dealt_rows_count_like_others() -> None:
    X, y = data(12)
    model = build("gw", X, y, depth=2, num_inducing=6)
    with pytest.raises(ValueError, match="got 12 rows and 5 samples"):
        elbo(model, X, y, num_samples=5, deal_rows=True)
    bounds = [elbo(model, X, y, num_data=n, num_samples=3, generator=generator(0), deal_rows=True) for n in (12, None)]
    assert bounds[0] == bounds[1]
    sparse = build("gw", X, y, depth=1, num_inducing=6)
    assert elbo(sparse, X, y, num_samples=3, deal_rows=True) == elbo(sparse, X, y)


def test_the_elbo_counts_every_row_and_weighs_the_kl() -> None:
    X, y = data()
    model = build("ab-gw", X, y, depth=1, num_inducing=10)
    whole, without = elbo(model, X, y), elbo(model, X, y, kl_weight=0.0)
    kl = model(X).kl
    torch.testing.assert_close(without - whole, kl)
    torch.testing.assert_close(elbo(model, X, y, num_data=80) - 2 * whole, kl)


@settings(max_examples=15)
@given(st.sampled_from(METHODS), st.integers(1, 3), st.integers(1, 12), st.randoms(use_true_random=False))
def test_a_prediction_depends_on_its_row_alone(method: str, depth: int, chunk_size: int, random: Any) -> None:
    """Not on the batch, the order or the chunks."""
    X, y = data(20)
    model = build(method, X, y, depth=depth, num_inducing=6)
    perturb(model, 0.05)
    rows = random.sample(range(12), random.randint(1, 12))
    X_new, _ = data(12, seed=2)
    whole = predict(model, X_new, 5, generator(1))
    part = predict(model, X_new[rows], 5, generator(1), chunk_size)
    torch.testing.assert_close(part.mean, whole.mean[rows], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(part.variance, whole.variance[rows], rtol=1e-9, atol=1e-9)
    chunks = list(predict_in_chunks(model, X_new, 5, generator(1), chunk_size))
    torch.testing.assert_close(torch.cat([p.mean for p in chunks]), whole.mean, rtol=1e-10, atol=1e-10)
    Y_new = torch.zeros(12, 1, dtype=torch.float64)
    found = predictive_log_likelihood(model, X_new, Y_new, 5, generator(1), chunk_size)
    torch.testing.assert_close(found, whole.log_prob(Y_new))


@pytest.mark.parametrize("call", [elbo, predictive_log_likelihood])
def test_rows_that_do_not_fit_are_refused(call: Any) -> None:
    X, y = data(5, 2)
    model = deep_wishart_process(X, y)
    torch.testing.assert_close(
        call(model, X, y[:, 0], generator=generator(0)), call(model, X, y, generator=generator(0))
    )
    for bad_X, bad_Y in ((X, y.expand(5, 2)), (X, y[:3]), (X, y[None])):
        with pytest.raises(ValueError, match=r"Y must have shape \(5, 1\)"):
            call(model, bad_X, bad_Y)
    for bad_X in (X[:, :1], X[0], X[None]):
        with pytest.raises(ValueError, match=r"X must have shape \('N', 2\)"):
            call(model, bad_X, y)
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        call(model, X, y, num_samples=0)


def test_an_empty_batch_is_refused() -> None:
    X, y = data(5, 2)
    with pytest.raises(ValueError, match="at least one row, got none"):
        elbo(deep_wishart_process(X, y), X[:0], y[:0], num_data=5)


@pytest.mark.parametrize("kernel", ["squared-exponential", "matern-5/2"])
@pytest.mark.parametrize("method", METHODS)
def test_marginals_do_not_keep_what_they_are_made_from(method: str, kernel: str) -> None:
    """Else all chunks of a prediction would keep their matrices of inducing points by rows."""
    X, y = data(20)
    model = build(method, X, y, depth=2, num_inducing=6, kernel=kernel)
    mean, variance, _ = model(X, model.draw_noise(5, 1, generator(0))).marginals
    for values in (mean, variance):
        assert values.untyped_storage().nbytes() <= values.nbytes


def test_prediction_checks_its_chunks() -> None:
    X, y = data(5, 2)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        predict(deep_wishart_process(X, y), X, chunk_size=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "likelihood",
    [HeteroscedasticGaussian(), StudentT(), Bernoulli(), Categorical(2), Poisson()],
    ids=lambda x: type(x).__name__,
)
def test_on_a_gpu_no_likelihood_synchronises(likelihood: Any) -> None:
    X, y = data()
    Y = (y > 0).to(y)
    model = deep_wishart_process(X, Y, depth=2, num_inducing=10, likelihood=likelihood, generator=generator(0)).cuda()
    X, Y, g = X.cuda(), Y.cuda(), torch.Generator("cuda").manual_seed(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        elbo(model, X, Y, num_samples=4, generator=g).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("method", METHODS)
def test_on_a_gpu_a_step_never_synchronises_and_agrees_with_the_cpu(method: str) -> None:
    X, y = data()
    model = build(method, X, y, depth=3, num_inducing=10)
    perturb(model, 0.05)
    noise = model.draw_noise(4, 40, generator(0))
    on_cpu = model(X, noise)
    on_gpu = copy.deepcopy(model).cuda()
    output = on_gpu(X.cuda(), _to_gpu(noise))
    torch.testing.assert_close(output.marginals.mean.cpu(), on_cpu.marginals.mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(output.kl.cpu(), on_cpu.kl, rtol=1e-7, atol=1e-7)
    X, y, g = X.cuda(), y.cuda(), torch.Generator("cuda").manual_seed(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        elbo(on_gpu, X, y, num_samples=4, generator=g).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _to_gpu(noise: Any) -> Any:
    if isinstance(noise, Tensor):
        return noise.cuda()
    moved = [_to_gpu(part) for part in noise]
    return tuple(moved) if type(noise) is tuple else type(noise)(*moved)


def test_chunks_are_small_where_a_likelihood_has_many_nodes() -> None:
    """Ten classes by 128 nodes are more numbers a row than ten inducing points."""
    X = torch.randn(30, 2, dtype=torch.float64)
    many = build(
        "gw", X, torch.arange(30.0, dtype=torch.float64)[:, None] % 10, likelihood=Categorical(10), num_inducing=10
    )
    few = build("gw", X, X[:, :1], num_inducing=10)
    assert _chunk_size(many, 50, None) * 5 < _chunk_size(few, 50, None)
    assert _chunk_size(many, 50, 7) == 7


@pytest.mark.parametrize("method", ["a-gw", "dgp", "diwp"])
def test_samples_that_do_not_fit_into_one_pass_are_drawn_in_several(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, Y = data(30)
    model, X_new = build(method, X, Y, num_inducing=8), data(11)[0]
    assert _samples_by_pass(model, 7) == [7]
    # Room for four times three matrices of eight inducing points.
    monkeypatch.setattr(objectives, "_CHUNK_BYTES", 4 * 8 * 3 * 8 * 8)
    counts, source = _samples_by_pass(model, 7), generator(1)
    assert counts == [3, 3, 1]
    parts = [model(X_new, model.draw_noise(count, 1, source)).marginals for count in counts]
    expected = torch.cat([model.likelihood.predict(part.mean, part.variance).distribution.mean for part in parts], 1)
    found = predict(model, X_new, 7, generator(1)).components.mean
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(predict(model, X_new[:2], 7, generator(1), 1).components.mean, found[:, :, :2])


def test_a_pass_has_no_more_samples_than_its_rows_leave_room_for() -> None:
    X, Y = data(80)
    model = build("gw", X, Y, num_inducing=60)
    counts = _samples_by_pass(model, 100)
    assert counts == [33, 33, 33, 1]
    a_sample = 4 * 8 * 60 * _chunk_size(model, 100, None)
    assert counts[0] * a_sample <= objectives._CHUNK_BYTES < (counts[0] + 1) * a_sample


def test_gradients_are_recorded_between_chunks() -> None:
    X, Y = data(30)
    for predictive in predict_in_chunks(build("gw", X, Y), X, 2, generator(0), 10):
        assert torch.is_grad_enabled()
        assert not predictive.mean.requires_grad


def test_a_model_of_depth_1_needs_one_pass() -> None:
    X, Y = data(30)
    assert _samples_by_pass(build("gw", X, Y, depth=1), 10_000) == [10_000]

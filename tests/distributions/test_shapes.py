"""Shapes, broadcasting, expand and dtypes, over everything that hypothesis can think of."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.distributions.instances import ALL, CLASSES, POSTERIORS, make, parameters

shapes = st.lists(st.integers(0, 3), max_size=2).map(tuple)
families = st.sampled_from(ALL)
sizes = st.integers(1, 4)
dtypes = st.sampled_from([torch.float64, torch.float32])


@st.composite
def broadcast_pairs(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A batch shape, and one that it broadcasts to."""
    target = draw(st.lists(st.integers(1, 3), max_size=3).map(tuple))
    kept = draw(st.integers(0, len(target)))
    tail = target[len(target) - kept :]
    return tuple(size if draw(st.booleans()) else 1 for size in tail), target


@given(families, sizes, sizes, shapes, shapes, dtypes)
def test_samples_and_densities_have_torchs_shapes(
    family: str, P: int, df: int, batch: tuple[int, ...], sample: tuple[int, ...], dtype: torch.dtype
) -> None:
    q = make(family, P, df, batch=batch, dtype=dtype)
    assert q.batch_shape == batch
    assert q.event_shape == (P, P)
    if family in POSTERIORS:
        assert q.concentration.shape == q.rate.shape == (*batch, q.rank)
        assert q.loc.shape == q.scale.shape == (*batch, P, q.rank)
    T, F = q.rsample_bartlett(sample)
    assert T.shape == F.shape == (*sample, *batch, P, q.bartlett.rank)
    G = q.rsample(sample)
    assert G.shape == (*sample, *batch, P, P)
    assert G.dtype == F.dtype == dtype
    log_prob = q.log_prob(G)
    assert log_prob.shape == (*sample, *batch)
    assert log_prob.dtype == dtype
    assert log_prob.isfinite().all()
    assert q.support.check(G).all()
    assert q.mean.shape == q.variance.shape == (*batch, P, P)
    assert q.mean.dtype == q.variance.dtype == dtype


@given(families, sizes, sizes, broadcast_pairs())
def test_expand_is_a_view_of_the_same_distribution(
    family: str, P: int, df: int, pair: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    batch, target = pair
    q = make(family, P, df, batch=batch)
    expanded = q.expand(target)
    assert type(expanded) is type(q)
    assert expanded.batch_shape == target
    assert q.batch_shape == batch
    G = expanded.sample((2,))
    assert G.shape == (2, *target, P, P)
    torch.testing.assert_close(expanded.log_prob(G), q.log_prob(G))
    # One value for the whole batch, and a sum over it, as Independent makes.
    one = make(family, P, df).sample()
    assert expanded.log_prob(one).shape == target
    torch.testing.assert_close(expanded.log_prob(one), q.log_prob(one).expand(target))
    T, F = q.rsample_bartlett()
    assert expanded.log_prob_bartlett(T, F).shape == target
    total = torch.distributions.Independent(expanded, len(target)).log_prob(one)
    torch.testing.assert_close(total, q.log_prob(one).expand(target).sum())
    torch.testing.assert_close(expanded.mean, q.mean.expand(*target, P, P))
    for name in q.arg_constraints:
        if torch.is_tensor(getattr(q, name)):
            event = getattr(q, name).shape[len(batch) :]
            assert getattr(expanded, name).shape == (*target, *event)


@given(families, sizes, sizes, broadcast_pairs(), st.randoms(use_true_random=False))
def test_parameters_broadcast(
    family: str, P: int, df: int, pair: tuple[tuple[int, ...], tuple[int, ...]], random: Any
) -> None:
    """Any mixture of batch shapes is the same as all parameters expanded to the full one."""
    small, full = pair
    small_arguments, full_arguments = (parameters(family, P, df, batch=batch) for batch in (small, full))
    given_arguments, expanded = {}, {}
    for name, value in full_arguments.items():
        chosen = value if random.random() < 0.5 or not isinstance(value, Tensor) else small_arguments[name]
        given_arguments[name] = chosen
        event = value.shape[len(full) :] if isinstance(value, Tensor) else ()
        expanded[name] = chosen.expand((*full, *event)) if isinstance(value, Tensor) else value
    q, reference = CLASSES[family](**given_arguments), CLASSES[family](**expanded)
    q = q.expand(full)
    noise = q.draw_noise((2,))
    (T, F), (T_reference, F_reference) = q.rsample_bartlett(noise=noise), reference.rsample_bartlett(noise=noise)
    torch.testing.assert_close(F, F_reference)
    torch.testing.assert_close(q.log_prob_bartlett(T, F), reference.log_prob_bartlett(T_reference, F_reference))
    torch.testing.assert_close(q.variance, reference.variance)


@given(families, sizes, sizes, st.integers(1, 4))
def test_a_batch_is_many_single_distributions(family: str, P: int, df: int, batch: int) -> None:
    q = make(family, P, df, batch=(batch,))
    G = q.sample((3,))
    arguments = parameters(family, P, df, batch=(batch,))
    for k in range(batch):
        single = {
            name: value[k] if isinstance(value, Tensor) and value.ndim else value for name, value in arguments.items()
        }
        torch.testing.assert_close(CLASSES[family](**single).log_prob(G[:, k]), q.log_prob(G)[:, k])


@pytest.mark.parametrize("family", ALL)
def test_float32_agrees_with_float64(family: str) -> None:
    q64, q32 = (make(family, 4, 3, dtype=dtype) for dtype in (torch.float64, torch.float32))
    G = q64.sample((20,))
    # Rounding to float32 takes a Gram matrix off its exact rank, which validation allows for; now and then it also
    # makes one numerically singular, which validation refuses.
    G = G[q32.support.check(G.float())]
    assert len(G) >= 18
    torch.testing.assert_close(q32.log_prob(G.float()).double(), q64.log_prob(G), rtol=1e-3, atol=2e-2)
    torch.testing.assert_close(q32.mean.double(), q64.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(q32.variance.double(), q64.variance, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ALL)
def test_it_is_a_torch_distribution(family: str) -> None:
    q = make(family, 3, 2, batch=(2,))
    assert isinstance(q, torch.distributions.Distribution)
    assert q.has_rsample
    assert getattr(q.support, "event_dim", None) == 2
    assert set(q.arg_constraints) <= set(dir(q))
    for name, constraint in q.arg_constraints.items():
        assert torch.as_tensor(constraint.check(torch.as_tensor(getattr(q, name)))).all()
    assert type(q).__name__ in repr(q)
    independent = torch.distributions.Independent(q, 1)
    assert independent.log_prob(q.sample()).shape == ()


def test_the_inverse_wishart_knows_the_bound_of_its_df() -> None:
    constraint = make("iw", 3, 2).arg_constraints["df"]
    assert constraint.check(torch.tensor([1.99, 2.0, 2.01])).tolist() == [False, False, True]

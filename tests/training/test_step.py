"""What a step computes."""

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from deepwishart.gram import deal
from deepwishart.objectives import elbo_given_noise
from deepwishart.training import TrainingConfig
from deepwishart.training.loop import Trainer
from deepwishart.training.parameters import flattened
from deepwishart.training.step import pad_rows
from tests.distributions.instances import generator
from tests.training.instances import data, model_for


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(("N", "padded"), [(3, 8), (16, 16), (21, 24)])
@pytest.mark.parametrize("method", ["a-gw", "dgp"])
def test_rows_that_are_added_count_for_nothing(method: str, N: int, padded: int, is_weighted: bool) -> None:
    X, Y = data(2, N=N)
    model = model_for(X, Y, method, num_inducing=5)
    weights = torch.rand(2, N, dtype=X.dtype, generator=generator(3)) if is_weighted else None
    more = pad_rows(X, Y, weights, 8)
    assert more[0].shape[-2] == more[1].shape[-2] == padded
    noise = model.draw_noise(3, padded, generator(4))

    def of_the_first_rows(values: Tensor) -> Tensor:
        return values[..., :N] if values.shape[-1] == padded else values

    found = elbo_given_noise(model, *more[:2], noise, None, 1.0, more[2])
    expected = elbo_given_noise(model, X, Y, tree_map(of_the_first_rows, noise), None, 1.0, weights)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_all_rows_are_dealt_out_even_if_samples_get_different_numbers(is_weighted: bool) -> None:
    """20 rows for 3 samples: the bound is that of 7, 7 and 6 rows, each set seen by a sample of its own."""
    X, Y = data(2, N=20)
    model = model_for(X, Y, "a-gw", num_inducing=5)
    weights = torch.rand(2, 20, dtype=X.dtype, generator=generator(3)) if is_weighted else None
    config = TrainingConfig(num_steps=1, num_samples=3, deal_rows=True)
    with flattened(model, model.batch_shape) as flat:
        step = Trainer(model, flat, X, Y, config, weights=weights).step
        X_dealt, Y_dealt, noise, *rest = step._draw(torch.ones(1, dtype=X.dtype))
        found = elbo_given_noise(model, X_dealt, Y_dealt, noise, *rest)
    assert X_dealt.shape[-2] == 21
    output = model(X_dealt, noise, True)
    mean, variance, _ = output.marginals
    fit = model.likelihood.expected_log_prob(deal(Y_dealt.mT, 3).mT, mean, variance)
    seen = fit.movedim(0, -1).flatten(-2)[:, :20]  # row i was seen by sample i mod 3
    expected = (seen if weights is None else weights * seen).sum(-1) - output.kl.mean(0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
